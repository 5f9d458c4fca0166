"""metrics.jsonl: a line for each logged step, and the same to the trackers of the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import TrainingError
from outrider.storage.atomic import replacing
from outrider.training.progress.trackers import Trackers

log = logging.getLogger(__name__)


class Metrics:
    """Writes metrics.jsonl, and to trackers.

    A line that the disk has no room for is written with the next one; training goes on.
    """

    def __init__(self, folder: Path, step: int, trackers: Trackers | None = None):
        self.path = folder / "metrics.jsonl"
        self.has_warned = False
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        rows = [_row(line) if line.endswith(b"\n") else None for line in lines]
        damaged = [number for number, row in enumerate(rows, 1) if row is None]
        if damaged and damaged != [len(lines)]:  # a torn last line is what a crash leaves
            log.warning(
                "%s, line %d can't be read, and %d in all; they are left out", self.path, damaged[0], len(damaged)
            )
        # steps after the checkpoint will be trained, and written, again
        valid = [(line, row) for line, row in zip(lines, rows, strict=True) if row is not None and row["step"] <= step]
        self.probes = {row["step"]: row for _, row in valid if "loss" not in row}
        """What probes found, by step."""
        try:
            if len(valid) < len(lines):
                with replacing(self.path) as part:
                    part.write_bytes(b"".join(line for line, _ in valid))
            self.file = self.path.open("ab", buffering=1 << 20)  # holds what the disk has no room for
        except OSError as error:
            advice = "it is unchanged; free some space and run again"
            raise TrainingError(f"can't write {self.path} ({error.strerror}); {advice}") from error
        self.trackers = Trackers((), {}) if trackers is None else trackers

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.trackers.finish()
        try:
            self.file.close()
        except OSError as error:
            if kind is None:
                lacks = f"{self.path} lacks its last lines, since the disk is full"
                raise TrainingError(
                    f"{lacks}; the checkpoint is intact: free some space before the next run"
                ) from error

    def write(self, values: Mapping[str, Any]) -> None:
        if "loss" not in values:
            self.probes[values["step"]] = dict(values)
        self.file.write(json.dumps(values).encode() + b"\n")
        try:
            self.file.flush()
        except OSError as error:
            if not self.has_warned:
                log.warning("can't write %s (%s); make room, its lines are written then", self.path, error.strerror)
            self.has_warned = True
        self.trackers.log(values)


class Unwritten:
    """In place of `Metrics` in the processes that write none."""

    def __init__(self, probes: Mapping[int, dict[str, Any]]):
        self.probes = dict(probes)
        """What probes found, by step."""

    def __enter__(self) -> Unwritten:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, values: Mapping[str, Any]) -> None:
        if "loss" not in values:
            self.probes[values["step"]] = dict(values)


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics; None where it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
