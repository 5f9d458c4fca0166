"""metrics.jsonl: a line for each logged step, and the same to TensorBoard where that is installed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.atomic import replacing
from outrider.errors import TrainingError

log = logging.getLogger(__name__)


class Metrics:
    """Writes metrics.jsonl, and to TensorBoard where that is installed.

    A line that the disk has no room for is written with the next one; training goes on.
    """

    def __init__(self, folder: Path, step: int):
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
            wanted = "it is unchanged; free some space and run again"
            raise TrainingError(f"can't write {self.path} ({error.strerror}); {wanted}") from error
        self.board = _tensorboard(folder)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.board is not None:
            self.board.close()
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
        for name, value in values.items() if self.board is not None else ():
            if isinstance(value, int | float) and name != "step":
                self.board.add_scalar(f"train/{name}", value, values["step"])


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics; None where it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder / "tensorboard")
