"""Recorded traffic, read from several formats and written in Outrider's.  No torch.

A row of Outrider's format is `{t, session, body, expected_output_tokens, meta}`, one per line; `body` is what was sent
to an OpenAI-compatible server, `t` is in seconds.

A log is read twice: first to check every row and record its offset, then row by row in the order of the times, so it
need not fit into memory.  (A JSON array, as in ShareGPT, is kept in memory.)
"""

from __future__ import annotations

import csv
import functools
import json
import math
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from outrider.errors import ConfigError, DataError
from outrider.storage.atomic import replacing
from outrider.storage.json_text import numbered_lines, parse_json
from outrider.storage.trusted import MOST_TEXT, regular
from outrider.targets.files import unreadable
from outrider.traffic.logs.calls import Call, RecordedFailure
from outrider.traffic.logs.formats import FORMATS, UNREADABLE, Parse, format_of
from outrider.traffic.logs.redaction import redacted

CHANGED = "the log has changed since it was checked; use a copy that nothing writes to"


@dataclass
class Trace:
    """A checked log: every row is valid, and its offset is known."""

    path: Path
    format: str
    parse: Parse = field(repr=False)
    rows: Sequence[Any] | None = field(default=None, repr=False)
    """The rows, if the file is a JSON array."""
    columns: Sequence[str] | None = None
    """Names of the columns, if the file is CSV."""
    size: int = 0
    """Number of calls."""
    has_times: bool = False
    start_s: float = 0.0
    span_s: float = 0.0
    """From the first call to the last."""
    num_synthetic: int = 0
    num_answers: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Numbers of skipped rows, by reason."""
    offsets: Sequence[int] = field(default=(), repr=False)
    """Byte offset of each row, or its index in a JSON array, in the order of the times."""
    lines: Sequence[int] = field(default=(), repr=False)

    def calls(self) -> Iterator[Call]:
        """Every call, in the order of their times.  Raises DataError, with the line, if a row has changed since the log
        was checked."""
        try:
            source = nullcontext() if self.rows is not None else self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; {CHANGED}") from None
        with source as file:
            for offset, line in zip(self.offsets, self.lines, strict=True):
                try:
                    calls = self.parse(self._row(file, offset), str(line))
                    if not calls or (self.has_times and any(call.at_s is None for call in calls)):
                        raise ValueError("its call has no time" if calls else "no call in it")
                except (*UNREADABLE, RecordedFailure) as error:
                    raise DataError(f"{self.path}:{line}: {_reason_of(error)}; {CHANGED}") from None
                for call in calls:
                    yield call if call.at_s is None else replace(call, at_s=call.at_s - self.start_s)

    def _row(self, file: IO[bytes] | None, offset: int) -> Any:
        if file is None:
            return self.rows[offset] if self.rows else None
        file.seek(offset)
        return _decoded(file.readline(), self.columns)


def read(path: Path, format: str | None = None, skip_bad: bool = False) -> Trace:
    """Read and check a log.  Raises DataError with the line of the first invalid row; skip_bad: skips and counts such
    rows."""
    if not path.is_file():
        raise DataError(f"no log at {path}; name a file of recorded requests")
    if (problem := unreadable(path)) is not None:
        raise DataError(problem)
    if format is not None and format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; choose from {', '.join(FORMATS)}")
    rows, columns = _array_in(path), _columns_in(path)
    name = format or _detect_format(path, rows, columns)
    trace = Trace(path, name, FORMATS[name](), rows, columns)
    offsets, lines, times = array("q"), array("q"), array("d")
    for offset, line, decode in _rows(path, rows, columns):
        try:
            calls = trace.parse(decode(), str(line))
        except RecordedFailure:
            trace.left_out["failed in the log"] += 1
            continue
        except UNREADABLE as error:
            if not skip_bad:
                raise DataError(
                    f"{path}:{line}: {_reason_of(error)} (read as {name}); correct the row, name the --format, or skip "
                    "such rows with --skip-bad"
                ) from None
            trace.left_out["not readable"] += 1
            continue
        if not calls:
            trace.left_out["nothing asked"] += 1
            continue
        offsets.append(offset)
        lines.append(line)
        times.append(math.nan if calls[0].at_s is None else calls[0].at_s)
        trace.size += len(calls)
        trace.num_synthetic += sum(call.synthetic for call in calls)
        trace.num_answers += sum(call.answer is not None for call in calls)
    if not trace.size:
        counts = "".join(f", {count} {reason}" for reason, count in trace.left_out.items())
        raise DataError(f"{path} has no calls in it{counts}; give a log of requests ({', '.join(FORMATS)})")
    timed = sum(not math.isnan(time) for time in times)
    if timed not in (0, len(times)):
        raise DataError(f"{path}: {timed} of {len(times)} rows have a time; give a time to all rows or to none")
    order = np.argsort(times, kind="stable")  # without times, the order is kept
    trace.offsets, trace.lines = (array("q", np.asarray(column)[order].tobytes()) for column in (offsets, lines))
    if timed:
        trace.has_times, trace.start_s = True, times[order[0]]
        trace.span_s = times[order[-1]] - trace.start_s
    return trace


def _reason_of(error: Exception) -> str:
    return f"no {error} in it" if isinstance(error, KeyError) else str(error) or "it failed in the log"


def _rows(
    path: Path, rows: list[Any] | None, columns: list[str] | None
) -> Iterator[tuple[int, int, Callable[[], Any]]]:
    """(offset, line, function that decodes it) of each row; lines and array entries count from 1."""
    if rows is not None:
        yield from ((offset, offset + 1, functools.partial(rows.__getitem__, offset)) for offset in range(len(rows)))
        return
    offset = 0
    try:
        with path.open("rb") as file:
            for line, text in numbered_lines(file):
                if text.strip() and (columns is None or line > 1):
                    yield offset, line, functools.partial(_decoded, text, columns)
                offset += len(text)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}; give a log of requests") from None


def _decoded(text: bytes, columns: Sequence[str] | None) -> Any:
    if columns is not None:
        cells = next(csv.reader([text.decode().rstrip("\r\n")]))
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} cells, but the first line names {len(columns)} columns")
        return dict(zip(columns, cells, strict=True))
    try:
        row = parse_json(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__} instead of an object")
    return row


def _array_in(path: Path) -> list[Any] | None:
    with path.open("rb") as file:
        start = file.read(64)
    if start[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed with gzip; unpack it first")
    if not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return None
    try:
        rows = parse_json(regular(path, MOST_TEXT).read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not JSON ({error}); give one array, or one object per line") from None
    return list(rows)


def _columns_in(path: Path) -> list[str] | None:
    """Names in the first line of a CSV file."""
    with path.open("rb") as file:
        first = file.readline(4096).decode("utf-8-sig", "replace").strip()
    return next(csv.reader([first])) if "Timestamp" in first and "Request tokens" in first else None


def _detect_format(path: Path, rows: list[Any] | None, columns: list[str] | None) -> str:
    """The format, by the first row that is an object."""
    if columns is not None:
        return "burstgpt"
    first: dict[str, Any] = {}
    for _, _, decode in _rows(path, rows, None):
        with suppress(ValueError):
            row = decode()
            if isinstance(row, dict):
                first = row
                break
    name = format_of(first)
    if name is None:
        keys = ", ".join(list(first)[:8]) or "no JSON object"
        raise DataError(f"{path}: a row has {keys}, which is no known format; name the --format: {', '.join(FORMATS)}")
    return name


def write(path: Path, calls: Iterable[Call], redact: bool = False) -> int:
    """Write calls in Outrider's format, atomically.  Returns their number.

    redact: write lengths, settings, and a keyed hash of each text, whose key is discarded.  The file shows which texts
    were equal, but not what they were.
    """
    key = secrets.token_bytes(32)
    count = 0
    try:
        with replacing(path) as part, part.open("w", encoding="utf-8") as file:
            for call in calls:
                file.write(json.dumps(_row(redacted(call, key) if redact else call)) + "\n")
                count += 1
    except OSError as error:
        raise DataError(
            f"can't write {path}: {error.strerror}; name a file in a folder that exists and can be written to"
        ) from None
    return count


def _row(call: Call) -> dict[str, Any]:
    meta = {"id": call.id, "synthetic": call.synthetic or None, "answer": call.answer}
    row = {
        "t": call.at_s, "session": call.session, "body": call.body, "expected_output_tokens": call.expected_tokens,
        "meta": {key: value for key, value in meta.items() if value is not None},
    }  # fmt: skip
    return {key: value for key, value in row.items() if value is not None}
