"""Measurements so far, in a file, so that an evaluation can be resumed.

One line per batch of prompts, written when the batch is done.  The first line names what the measurements depend on:
settings, target, drafters, machine.  If any of that changed, everything is measured again and the old file is moved
aside.  Each of several processes writes its own file and reads all of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from outrider.config import flatten
from outrider.errors import DataError
from outrider.machine.contention import Contention
from outrider.measure.record import Run
from outrider.measure.tasks.names import Prompt
from outrider.measure.tasks.prompts import digest
from outrider.report.parts import LeftOut, TracedToken
from outrider.storage.json_text import parse_json

NAME = "prompts"
"""Files are called prompts.jsonl, and prompts.1.jsonl and so on for further processes."""
START_S = 600.0
"""Maximum wait for the first process to load its models."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which prompts a process measures: every `count`-th, starting at `rank`."""

    rank: int = 0
    count: int = 1


@dataclass(slots=True)
class Traced:
    """An untimed run of a prompt, token by token."""

    tokens: list[TracedToken]
    overlap: list[float]
    """sum(min(p, q)) for every judged token."""


@dataclass(slots=True)
class PromptRecord:
    """Measurements of one prompt."""

    reference: list[list[int]]
    """Output of transformers' generate in each turn."""
    generate_s: float
    plain: dict[str, Run]
    """The target alone, by temperature."""
    runs: list[Run]
    """One per entry."""
    traced: list[Traced] = field(default_factory=list)
    """One per entry; empty if the prompt was not traced."""


@dataclass(slots=True)
class Record:
    """Measurements of prompts that were served together, or why a prompt was left out."""

    task: str
    indices: list[int]
    """Numbers of the prompts, in drawing order."""
    digests: list[str]
    """`prompts.digest` of each prompt."""
    left_out: LeftOut | None = None
    prompts: list[PromptRecord] = field(default_factory=list)
    contention: list[Contention] = field(default_factory=list)
    """Of each timed run."""
    policies: list[dict[str, Any] | None] = field(default_factory=list)
    """State of each entry's policy afterwards; None if it can't be serialised."""

    def of(self, index: int) -> PromptRecord:
        return self.prompts[self.indices.index(index)]


RECORDS = TypeAdapter(Record)


class Journal:
    """Records in memory, and in files in `folder` unless it is None."""

    def __init__(
        self, folder: Path | None = None, facts: Mapping[str, Any] | None = None, rank: int = 0, again: bool = False
    ):
        """facts: what the measurements depend on.  again: ignore existing files.

        With several processes, number 0 decides which files are used; the others wait for it.  Raises DataError for a
        file that can't be read or written.
        """
        self.folder, self.rank = folder, rank
        self.records: list[Record] = []
        self.own_records: list[Record] = []
        """Records of this process and of earlier ones with its number, in the order of measurement."""
        self.changed: list[str] = []
        """Facts that differ from those of the existing file, such as `max_new_tokens 16, was 24`."""
        self._header = json.dumps({"facts": facts or {}}, sort_keys=True, default=str)
        self._read: dict[Path, int] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self._put_aside(again)
            else:
                self._wait()
            self._begin()
            self.refresh()

    @property
    def path(self) -> Path | None:
        """The file of this process."""
        if self.folder is None:
            return None
        return self.folder / (f"{NAME}.{self.rank}.jsonl" if self.rank else f"{NAME}.jsonl")

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{NAME}*.jsonl")) if self.folder is not None else []

    def _put_aside(self, again: bool) -> None:
        """Rename files with other facts, and all files if `again`."""
        for path in self._files():
            header = _header(path)
            if again or header != self._header:
                if path == self.path and not again:
                    self.changed = _differences(header, self._header)
                path.replace(path.with_suffix(".old"))

    def _wait(self) -> None:
        """Wait until the first process has put its file in place."""
        assert self.folder is not None
        until = time.monotonic() + START_S
        while _header(self.folder / f"{NAME}.jsonl") != self._header:
            if time.monotonic() > until:
                raise DataError(
                    f"the first process wrote no {self.folder / f'{NAME}.jsonl'} with these settings within "
                    f"{START_S:.0f} s; start all processes with the same command, on the same files"
                )
            time.sleep(0.1)

    def _begin(self) -> None:
        """Prepare this process's file for appending.  An incomplete last line is removed."""
        path = self.path
        assert path is not None
        try:
            if path.exists():
                content = path.read_bytes()
                whole = content[: content.rfind(b"\n") + 1]
                if len(whole) < len(content):
                    os.truncate(path, len(whole))
            if not path.exists() or not path.stat().st_size:
                self._write(self._header)
        except OSError as error:
            raise DataError(f"can't write {path}: {error.strerror}; choose a folder that can be written") from None

    def _write(self, line: str) -> None:
        assert self.path is not None
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def append(self, record: Record) -> None:
        """Add a record; it is on disk when this returns."""
        self.records.append(record)
        self.own_records.append(record)
        if self.path is not None:
            line = RECORDS.dump_json(record).decode()
            self._write(line)
            self._read[self.path] = self._read.get(self.path, 0) + len(line.encode()) + 1

    def refresh(self) -> None:
        """Read what other processes have written since the last call."""
        for path in self._files():
            before = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(before)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            if not whole or (not before and whole.partition(b"\n")[0].decode() != self._header):
                continue
            self._read[path] = before + len(whole)
            for line in whole.splitlines()[not before :]:
                record = _record(line, path)
                self.records.append(record)
                if path == self.path:
                    self.own_records.append(record)

    def by_index(self, task: str, prompts: Sequence[Prompt]) -> dict[int, Record]:
        """The record of each prompt of a task that was measured or left out, by the prompt's index."""
        records = (record for record in self.records if record.task == task and is_of(record, prompts))
        return {index: record for record in records for index in record.indices}


def is_of(record: Record, prompts: Sequence[Prompt]) -> bool:
    """Whether a record's prompts equal these at its indices."""
    numbered = zip(record.indices, record.digests, strict=True)
    return all(index < len(prompts) and digest(prompts[index]) == expected for index, expected in numbered)


def first(records: Mapping[int, Record], most: int, count: int) -> tuple[list[int], bool]:
    """The first `most` measured prompts of `count`, and whether no prompt before the last of them is missing."""
    measured: list[int] = []
    for index in range(count):
        if len(measured) == most:
            break
        if index not in records:
            return measured, False
        if records[index].left_out is None:
            measured.append(index)
    return measured, True


def _header(path: Path) -> str:
    """The first line of a file; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            return file.readline().decode(errors="replace").rstrip("\n")
    except OSError:
        return ""


def _record(line: bytes, path: Path) -> Record:
    try:
        return RECORDS.validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise DataError(
            f"{path} has a line that can't be read ({problem}); delete the file and measure again"
        ) from None


def _differences(header: str, expected: str) -> list[str]:
    try:
        before = flatten(parse_json(header)["facts"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["its first line can't be read"]
    now = flatten(parse_json(expected)["facts"])
    keys: Iterable[str] = sorted(before.keys() | now.keys())
    return [
        f"{key} {now.get(key)!r:.60}, was {before.get(key)!r:.60}" for key in keys if before.get(key) != now.get(key)
    ]
