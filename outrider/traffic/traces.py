"""Recorded traffic, read from the formats there are and written in our own: when each call came, and what it asked.  No torch.

A row of our own format is `{t, session, body, expected_output_tokens, meta}`, one a line; `body` is what was sent to an
OpenAI-compatible server, `t` is in seconds.

A log is read twice: once to check every row and to note where it stands, then row by row in the order of the times, so its size
on disk is not its size in memory.  (JSON that is one array, as ShareGPT's, is held whole.)
"""

from __future__ import annotations

import csv
import functools
import json
import math
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.atomic import replacing
from outrider.errors import ConfigError, DataError
from outrider.traffic.calls import Call, Unanswered
from outrider.traffic.formats import FORMATS, UNREADABLE, Parse, format_of
from outrider.traffic.redaction import redacted


@dataclass(frozen=True)
class Trace:
    """A log that was read through once: every row that counts can be read, and where it stands is known."""

    path: Path
    format: str
    size: int
    """Calls."""
    has_times: bool
    span_s: float
    """From the first call to the last."""
    num_synthetic: int
    num_answers: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Rows that were not taken, by reason."""
    places: Sequence[int] = field(default=(), repr=False)
    """Where each row begins, in bytes, in the order of their times; for JSON that is one array its index."""
    lines: Sequence[int] = field(default=(), repr=False)
    start: float = 0.0
    rows: Sequence[Any] | None = field(default=None, repr=False)
    columns: Sequence[str] | None = None
    parse: Parse = field(default=lambda row, name: [], repr=False)

    def calls(self) -> Iterator[Call]:
        """Every call, in the order of their times.  DataError names the line of a row that changed since the first reading."""
        if self.rows is not None:
            for place, line in zip(self.places, self.lines, strict=True):
                yield from self._again(functools.partial(self.rows.__getitem__, place), line)
            return
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; {CHANGED}") from None
        with file:
            for place, line in zip(self.places, self.lines, strict=True):
                file.seek(place)
                yield from self._again(lambda: _decoded(file.readline(), self.columns), line)

    def _again(self, read: Callable[[], Any], line: int) -> list[Call]:
        """What the row asks, its times counted from the first call."""
        try:
            calls = _parsed(self.parse, read(), line)
            if not calls or (self.has_times and any(call.at_s is None for call in calls)):
                raise ValueError("no call with a time" if calls else "no call in it")
            return [replace(call, at_s=None if call.at_s is None else call.at_s - self.start) for call in calls]
        except (*UNREADABLE, Unanswered) as error:
            raise DataError(f"{self.path}:{line}: {_said_of(error)}; {CHANGED}") from None


def read(path: Path, format: str | None = None, skip_bad: bool = False) -> Trace:
    """Read a log through.  DataError names the line of the first row that can't be read; `skip_bad` counts them."""
    if not path.is_file():
        raise DataError(f"no log at {path}; name a file")
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known; choose from {', '.join(FORMATS)}")
    rows, columns = _array_in(path), _columns_in(path)
    name = format or _recognised(path, rows, columns)
    index = _Index(path, name, skip_bad)
    for place, line, row in _rows(path, rows, columns, index):
        index.take(place, line, row)
    if not index.size:
        raise DataError(f"{path}: no calls in it{index.said()}; wanted a log of requests ({', '.join(FORMATS)})")
    return index.trace(rows, columns)


CHANGED = "the log could be read before, so it changed meanwhile; use a copy that nobody writes to"


def _parsed(parse: Parse, row: Any, line: int) -> list[Call]:
    calls = parse(row, str(line))
    if not all(isinstance(call.answer, str | None) for call in calls):
        raise ValueError("an answer that is no text")
    return calls


def _said_of(error: Exception) -> str:
    return f"no {error} in it" if isinstance(error, KeyError) else str(error) or "it failed in the log"


class _Index:
    """What the first reading notes of every row."""

    def __init__(self, path: Path, name: str, skip_bad: bool) -> None:
        self.path, self.name, self.skip_bad = path, name, skip_bad
        self.parse = FORMATS[name]()
        self.places, self.lines, self.times = array("q"), array("q"), array("d")
        self.size = self.synthetic = self.answers = 0
        self.left_out: Counter[str] = Counter()

    def take(self, place: int, line: int, row: Any) -> None:
        try:
            calls = _parsed(self.parse, row, line)
        except Unanswered:
            self.left_out["failed in the log"] += 1
            return
        except UNREADABLE as error:
            self.bad(line, _said_of(error))
            return
        if not calls:
            self.left_out["nothing asked"] += 1
            return
        self.places.append(place)
        self.lines.append(line)
        self.times.append(math.nan if calls[0].at_s is None else calls[0].at_s)
        self.size += len(calls)
        self.synthetic += sum(call.synthetic for call in calls)
        self.answers += sum(call.answer is not None for call in calls)

    def bad(self, line: int, said: str) -> None:
        if not self.skip_bad:
            raise DataError(
                f"{self.path}:{line}: {said}; read as {self.name}; mend the row, name the --format, or count such rows "
                "with --skip-bad"
            )
        self.left_out["not readable"] += 1

    def said(self) -> str:
        return "".join(f", {count} {reason}" for reason, count in self.left_out.items())

    def trace(self, rows: list[Any] | None, columns: list[str] | None) -> Trace:
        timed = sum(not math.isnan(time) for time in self.times)
        if timed not in (0, len(self.times)):
            raise DataError(f"{self.path}: {timed} of {len(self.times)} rows have a time; give all of them one, or none")
        order: Sequence[int] = range(len(self.times))
        if timed and any(later < former for former, later in zip(self.times, self.times[1:], strict=False)):
            order = sorted(order, key=self.times.__getitem__)
        start, end = (self.times[order[0]], self.times[order[-1]]) if timed else (0.0, 0.0)
        return Trace(
            self.path, self.name, self.size, timed > 0, end - start, self.synthetic, self.answers, dict(self.left_out),
            array("q", (self.places[row] for row in order)), array("q", (self.lines[row] for row in order)), start, rows,
            columns, self.parse,
        )  # fmt: skip


def _rows(path: Path, rows: list[Any] | None, columns: list[str] | None, index: _Index) -> Iterator[tuple[int, int, Any]]:
    """(place, line, row) of each; lines count from 1, entries of an array too."""
    if rows is not None:
        yield from ((place, place + 1, row) for place, row in enumerate(rows))
        return
    with path.open("rb") as file:
        place = 0
        for line, text in enumerate(file, 1):
            began, place = place, place + len(text)
            if not text.strip() or (columns is not None and line == 1):
                continue
            try:
                row = _decoded(text, columns)
            except ValueError as error:
                index.bad(line, str(error))
                continue
            yield began, line, row


def _decoded(text: bytes, columns: Sequence[str] | None) -> Any:
    if columns is not None:
        cells = next(csv.reader([text.decode().rstrip("\r\n")]))
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} cells where the first line names {len(columns)}")
        return dict(zip(columns, cells, strict=True))
    try:
        row = json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__} where an object was wanted")
    return row


def _array_in(path: Path) -> list[Any] | None:
    with path.open("rb") as file:
        start = file.read(64)
    if start[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is packed with gzip; unpack it first")
    if not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return None
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); wanted one array, or an object a line") from None
    return list(rows)


def _columns_in(path: Path) -> list[str] | None:
    """Names in the first line of a CSV file."""
    with path.open("rb") as file:
        first = file.readline(4096).decode("utf-8-sig", "replace").strip()
    return next(csv.reader([first])) if "Timestamp" in first and "Request tokens" in first else None


def _recognised(path: Path, rows: list[Any] | None, columns: list[str] | None) -> str:
    """The format, by the first row that is an object."""
    if columns is not None:
        return "burstgpt"
    if rows is None:
        with path.open("rb") as file:
            rows = []
            for text in file:
                try:
                    rows.append(_decoded(text, None))
                    break
                except ValueError:
                    continue
    row = next((row for row in rows if isinstance(row, dict)), {})
    name = format_of(row)
    if name is None:
        keys = ", ".join(list(row)[:8]) or "nothing that is JSON"
        raise DataError(f"{path}: a row holds {keys}; wanted a log of requests; name the --format: {', '.join(FORMATS)}")
    return name


def write(path: Path, calls: Iterable[Call], redact: bool = False) -> int:
    """Write calls in our own format, whole or not at all.  Returns how many.

    `redact` keeps lengths, settings, and a hash of each text with a key that is thrown away: who reads the file can tell which
    texts were equal, and can't find out what they said.
    """
    key = secrets.token_bytes(32)
    count = 0
    try:
        with replacing(path) as part, part.open("w", encoding="utf-8") as file:
            for call in calls:
                file.write(json.dumps(_row(redacted(call, key) if redact else call)) + "\n")
                count += 1
    except OSError as error:
        raise DataError(f"can't write {path}: {error.strerror}; name a file in a folder that exists") from None
    return count


def _row(call: Call) -> dict[str, Any]:
    meta = {"id": call.id, "synthetic": call.synthetic or None, "answer": call.answer}
    row = {
        "t": call.at_s, "session": call.session, "body": call.body, "expected_output_tokens": call.expected_tokens,
        "meta": {key: value for key, value in meta.items() if value is not None},
    }  # fmt: skip
    return {key: value for key, value in row.items() if value is not None}
