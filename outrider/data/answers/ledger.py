"""What became of every prompt: answered, failed or skipped, and by whom; SQLite beside the answers.

    answers.sqlite   a row a prompt, by the hash of its content

The lines of answers.jsonl are what counts.  A prompt is entered as answered before its line is written, so a killed run
may leave an entry without a line: `reconcile` opens it again.  Of all prompts that a run was given, answered, failed,
skipped, taken and open ones add up to the whole.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from outrider.errors import DataError

LEDGER = "answers.sqlite"
FORMAT = 1
Status = Literal["open", "taken", "answered", "failed", "skipped"]
"""`taken`: a process is at it."""
STATUSES: tuple[Status, ...] = ("open", "taken", "answered", "failed", "skipped")
TABLE = """
CREATE TABLE IF NOT EXISTS prompts (
    prompt_hash TEXT PRIMARY KEY,
    id TEXT NOT NULL,
    position INTEGER,            -- in the last run's prompts; NULL where that run was not given it
    status TEXT NOT NULL DEFAULT 'open',
    reason TEXT,                 -- of one that failed or was skipped
    finish_reason TEXT,
    tokens INTEGER,              -- that were written, prompt excluded
    tokens_from TEXT,            -- target, ids or text
    server TEXT,
    model TEXT,                  -- as the server names it
    attempts INTEGER
) WITHOUT ROWID
"""
EMPTY = "reason = NULL, finish_reason = NULL, tokens = NULL, tokens_from = NULL, server = NULL, model = NULL"


class Origin(NamedTuple):
    """Who wrote an answer."""

    tokens_from: Literal["target", "ids", "text"] = "target"
    """The target here; a server, as token ids; or a server, as text that was tokenised here."""
    server: str | None = None
    model: str | None = None
    attempts: int = 1
    """How often its prompt was asked."""


class Ledger:
    """The prompts of a folder, for the process with the folder's lock, and for others that it shares them with."""

    def __init__(self, folder: Path):
        """Raises DataError for a file that is not a ledger of this format."""
        self.path = folder / LEDGER
        with self.reported():
            # autocommit: transactions begin where they are asked for
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30)
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                self._db.close()
                raise DataError(
                    f"{self.path} has format {version}, but this Outrider reads {FORMAT}; delete it, the answers stay"
                )
            # a killed process loses no entry, a power failure the last ones, which `reconcile` opens again
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(TABLE)
            self._db.execute(f"PRAGMA user_version = {FORMAT}")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def reported(self) -> Iterator[None]:
        """A file that is not SQLite's is said with its remedy; a full disk is an OSError, as of any other file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path.name}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path} is damaged ({error}); delete it, the answers stay") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is done within, or nothing."""
        with self.reported():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # a full disk has ended it already
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # ── before the first answer ───────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self, lines: Iterable[tuple[str, str]]) -> None:
        """Go by the lines that there are, (prompt hash, id) each; no prompt is one of a run yet."""
        execute = self._db.execute
        execute("CREATE TEMP TABLE IF NOT EXISTS written (prompt_hash TEXT PRIMARY KEY, id TEXT) WITHOUT ROWID")
        execute("DELETE FROM written")
        self._db.executemany("INSERT OR IGNORE INTO written VALUES (?, ?)", lines)
        execute("UPDATE prompts SET position = NULL WHERE position IS NOT NULL")
        execute(
            f"UPDATE prompts SET status = 'open', attempts = NULL, {EMPTY} "
            "WHERE status != 'open' AND (status != 'answered' OR prompt_hash NOT IN (SELECT prompt_hash FROM written))"
        )
        execute(
            "INSERT INTO prompts (prompt_hash, id, status) SELECT prompt_hash, id, 'answered' FROM written WHERE true "
            "ON CONFLICT DO UPDATE SET status = 'answered'"
        )
        execute("DROP TABLE written")

    def ask(self, prompt_hash: str, name: str, position: int) -> Status:
        """Enter a prompt of this run; whether it is open or answered."""
        self._db.execute(
            "INSERT INTO prompts (prompt_hash, id, position) VALUES (?, ?, ?) "
            "ON CONFLICT DO UPDATE SET id = excluded.id, position = excluded.position",
            (prompt_hash, name, position),
        )
        return self.status(prompt_hash)

    # ── one prompt ────────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self, prompt_hash: str) -> Status:
        """What became of a prompt so far; `open` for one that is not known."""
        row = self._db.execute("SELECT status FROM prompts WHERE prompt_hash = ?", (prompt_hash,)).fetchone()
        found: Status = "open" if row is None else row[0]
        return found

    def take(self, prompt_hash: str) -> bool:
        """Whether an open prompt is this process's from here on; of several that ask, one gets it."""
        with self.reported():
            query = "UPDATE prompts SET status = 'taken' WHERE prompt_hash = ? AND status = 'open'"
            return self._db.execute(query, (prompt_hash,)).rowcount == 1

    def position(self, prompt_hash: str) -> int | None:
        """Its number among the prompts of this run; None where it is another run's."""
        row = self._db.execute("SELECT position FROM prompts WHERE prompt_hash = ?", (prompt_hash,)).fetchone()
        return None if row is None else row[0]

    def answer(self, prompt_hash: str, tokens: int, finish_reason: str | None, origin: Origin) -> None:
        """Enter an answer of so many tokens.  Its line is written next."""
        with self.reported():
            self._db.execute(
                "UPDATE prompts SET status = 'answered', reason = NULL, finish_reason = ?, tokens = ?, "
                "tokens_from = ?, server = ?, model = ?, attempts = ? WHERE prompt_hash = ?",
                (finish_reason, tokens, *origin, prompt_hash),
            )

    def fail(self, prompt_hash: str, reason: str, attempts: int) -> None:
        """No server answers it; the next run asks again."""
        self._close("failed", prompt_hash, reason, attempts)

    def skip(self, prompt_hash: str, reason: str) -> None:
        """It can't be asked."""
        self._close("skipped", prompt_hash, reason, 0)

    def _close(self, status: Status, prompt_hash: str, reason: str, attempts: int) -> None:
        with self.reported():
            self._db.execute(
                "UPDATE prompts SET status = ?, reason = ?, attempts = ? WHERE prompt_hash = ?",
                (status, reason, attempts, prompt_hash),
            )

    # ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────

    def counts(self) -> dict[Status, int]:
        """How many of this run's prompts are open, taken, answered, failed and skipped; they add up to all of them."""
        query = "SELECT status, count(*) FROM prompts WHERE position IS NOT NULL GROUP BY status"
        return dict.fromkeys(STATUSES, 0) | dict(self._db.execute(query).fetchall())

    def facts(self) -> dict[str, int]:
        """`retokenised` and `truncated`: answers of this run that came as text, and that ended for want of room."""
        row = self._db.execute(
            "SELECT count(*) FILTER (WHERE tokens_from = 'text'), count(*) FILTER (WHERE finish_reason = 'length') "
            "FROM prompts WHERE position IS NOT NULL AND status = 'answered'"
        ).fetchone()
        return dict(zip(("retokenised", "truncated"), row, strict=True))

    def reasons(self, status: Status, count: int = 3) -> list[str]:
        """Why prompts failed or were skipped: the most frequent reasons first, each with its number of prompts."""
        rows = self._db.execute(
            "SELECT reason, count(*) FROM prompts WHERE position IS NOT NULL AND status = ? "
            "GROUP BY reason ORDER BY count(*) DESC, reason LIMIT ?",
            (status, count),
        ).fetchall()
        return [reason if number == 1 else f"{reason} ({number} prompts)" for reason, number in rows]

    def servers(self) -> dict[str, int]:
        """Answers of this run by the server that wrote them."""
        query = "SELECT server, count(*) FROM prompts WHERE position IS NOT NULL AND server IS NOT NULL GROUP BY server"
        return dict(self._db.execute(query).fetchall())
