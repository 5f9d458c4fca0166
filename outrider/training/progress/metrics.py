"""metrics.jsonl: one line per logged step, which also goes to the trackers of the run."""

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
    """Writes metrics to metrics.jsonl and to trackers.

    If the disk is full, a line is written together with the next one, and training continues.
    """

    def __init__(self, folder: Path, step: int, trackers: Trackers | None = None):
        self.path = folder / "metrics.jsonl"
        self.has_warned = False
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        rows = [_row(line) if line.endswith(b"\n") else None for line in lines]
        damaged = [number for number, row in enumerate(rows, 1) if row is None]
        if damaged and damaged != [len(lines)]:  # a crash leaves a truncated last line
            log.warning(
                "%s, line %d can't be read (%d such lines in all); they are left out",
                self.path,
                damaged[0],
                len(damaged),
            )
        # steps after the checkpoint will be trained and written again
        valid = [(line, row) for line, row in zip(lines, rows, strict=True) if row is not None and row["step"] <= step]
        self.probes = {row["step"]: row for _, row in valid if "loss" not in row}
        """Results of probes, by step."""
        try:
            if len(valid) < len(lines):
                with replacing(self.path) as part:
                    part.write_bytes(b"".join(line for line, _ in valid))
            self.file = self.path.open("ab", buffering=1 << 20)  # the buffer holds lines while the disk is full
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
                lacks = f"{self.path} lacks its last lines because the disk is full"
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
                log.warning(
                    "can't write %s (%s); free some space, its lines will be written then", self.path, error.strerror
                )
            self.has_warned = True
        self.trackers.log(values)


class Unwritten:
    """Replaces `Metrics` in processes that write no metrics."""

    def __init__(self, probes: Mapping[int, dict[str, Any]]):
        self.probes = dict(probes)
        """Results of probes, by step."""

    def __enter__(self) -> Unwritten:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, values: Mapping[str, Any]) -> None:
        if "loss" not in values:
            self.probes[values["step"]] = dict(values)


def _row(line: bytes) -> dict[str, Any] | None:
    """A parsed line of metrics; None if it is invalid."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
