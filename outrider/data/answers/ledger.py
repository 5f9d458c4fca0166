"""The status of every prompt (answered, failed, skipped), and which server answered it, in SQLite.

    answers.sqlite   one row per prompt, keyed by the hash of its content

answers.jsonl is authoritative.  A prompt is marked as answered before its line is written, so a killed run may leave an
entry without a line, which `reconcile` reopens.  Every prompt of a run is answered, failed, skipped, taken or open.
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
"""`taken`: a process is answering it."""
STATUSES: tuple[Status, ...] = ("open", "taken", "answered", "failed", "skipped")
TABLE = """
CREATE TABLE IF NOT EXISTS prompts (
    prompt_hash TEXT PRIMARY KEY,
    id TEXT NOT NULL,
    position INTEGER,            -- index in the prompts of the last run; NULL if it is not one of them
    status TEXT NOT NULL DEFAULT 'open',
    reason TEXT,                 -- why it failed or was skipped
    finish_reason TEXT,
    tokens INTEGER,              -- generated tokens, without the prompt
    tokens_from TEXT,            -- target, ids or text
    server TEXT,
    model TEXT,                  -- the server's name for it
    attempts INTEGER
) WITHOUT ROWID
"""
EMPTY = "reason = NULL, finish_reason = NULL, tokens = NULL, tokens_from = NULL, server = NULL, model = NULL"


class Origin(NamedTuple):
    """Where an answer comes from."""

    tokens_from: Literal["target", "ids", "text"] = "target"
    """The local target; a server that sent token ids; or a server that sent text, which was tokenised here."""
    server: str | None = None
    model: str | None = None
    attempts: int = 1
    """Number of requests for its prompt."""


class Ledger:
    """The prompts of a folder, used by the process that holds the folder's lock and by its helper processes."""

    def __init__(self, folder: Path):
        """Raises DataError for a file of another format."""
        self.path = folder / LEDGER
        with self.reported():
            # autocommit: transactions are explicit
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=30)
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                self._db.close()
                raise DataError(
                    f"{self.path} has format {version}, but this Outrider reads {FORMAT}; delete it "
                    "(the answers are kept)"
                )
            # a killed process loses no entry; a power failure loses the last ones, which `reconcile` reopens
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
        """Report a damaged database as DataError; a full disk as OSError, as for any other file."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path.name}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path} is damaged ({error}); delete it (the answers are kept)") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything done inside, or nothing if it raises."""
        with self.reported():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # a full disk ends it without a rollback here
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # ── setup ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def reconcile(self, lines: Iterable[tuple[str, str]]) -> None:
        """Make the entries match the lines of answers.jsonl, (prompt hash, id) each, and clear all positions."""
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
        """Enter a prompt of this run; returns its status."""
        self._db.execute(
            "INSERT INTO prompts (prompt_hash, id, position) VALUES (?, ?, ?) "
            "ON CONFLICT DO UPDATE SET id = excluded.id, position = excluded.position",
            (prompt_hash, name, position),
        )
        return self.status(prompt_hash)

    # ── one prompt ────────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self, prompt_hash: str) -> Status:
        """The status of a prompt; `open` if it is unknown."""
        row = self._db.execute("SELECT status FROM prompts WHERE prompt_hash = ?", (prompt_hash,)).fetchone()
        status: Status = "open" if row is None else row[0]
        return status

    def take(self, prompt_hash: str) -> bool:
        """Claim an open prompt for this process; False if it is not open.  Only one process can succeed."""
        with self.reported():
            query = "UPDATE prompts SET status = 'taken' WHERE prompt_hash = ? AND status = 'open'"
            return self._db.execute(query, (prompt_hash,)).rowcount == 1

    def position(self, prompt_hash: str) -> int | None:
        """Its index among the prompts of this run; None if it belongs to another run."""
        row = self._db.execute("SELECT position FROM prompts WHERE prompt_hash = ?", (prompt_hash,)).fetchone()
        return None if row is None else row[0]

    def answer(self, prompt_hash: str, tokens: int, finish_reason: str | None, origin: Origin) -> None:
        """Mark a prompt as answered; call before its line is written.  tokens: number of generated tokens."""
        with self.reported():
            self._db.execute(
                "UPDATE prompts SET status = 'answered', reason = NULL, finish_reason = ?, tokens = ?, "
                "tokens_from = ?, server = ?, model = ?, attempts = ? WHERE prompt_hash = ?",
                (finish_reason, tokens, *origin, prompt_hash),
            )

    def fail(self, prompt_hash: str, reason: str, attempts: int) -> None:
        """No server answered the prompt; the next run tries again."""
        self._close("failed", prompt_hash, reason, attempts)

    def skip(self, prompt_hash: str, reason: str) -> None:
        """The prompt can't be answered."""
        self._close("skipped", prompt_hash, reason, 0)

    def _close(self, status: Status, prompt_hash: str, reason: str, attempts: int) -> None:
        with self.reported():
            self._db.execute(
                "UPDATE prompts SET status = ?, reason = ?, attempts = ? WHERE prompt_hash = ?",
                (status, reason, attempts, prompt_hash),
            )

    # ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────

    def counts(self) -> dict[Status, int]:
        """Number of this run's prompts by status; they add up to all prompts."""
        query = "SELECT status, count(*) FROM prompts WHERE position IS NOT NULL GROUP BY status"
        return dict.fromkeys(STATUSES, 0) | dict(self._db.execute(query).fetchall())

    def facts(self) -> dict[str, int]:
        """`retokenised`: answers of this run that arrived as text.  `truncated`: answers that reached the length
        limit."""
        row = self._db.execute(
            "SELECT count(*) FILTER (WHERE tokens_from = 'text'), count(*) FILTER (WHERE finish_reason = 'length') "
            "FROM prompts WHERE position IS NOT NULL AND status = 'answered'"
        ).fetchone()
        return dict(zip(("retokenised", "truncated"), row, strict=True))

    def reasons(self, status: Status, count: int = 3) -> list[str]:
        """Why prompts failed or were skipped: the most frequent reasons first, with the number of prompts for each."""
        rows = self._db.execute(
            "SELECT reason, count(*) FROM prompts WHERE position IS NOT NULL AND status = ? "
            "GROUP BY reason ORDER BY count(*) DESC, reason LIMIT ?",
            (status, count),
        ).fetchall()
        return [reason if number == 1 else f"{reason} ({number} prompts)" for reason, number in rows]

    def servers(self) -> dict[str, int]:
        """Number of answers of this run by server."""
        query = "SELECT server, count(*) FROM prompts WHERE position IS NOT NULL AND server IS NOT NULL GROUP BY server"
        return dict(self._db.execute(query).fetchall())
