"""Accelerators by their data sheets, and what programs reach of them.  No torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from outrider.config import nearest
from outrider.errors import ConfigError

TABLE = Path(__file__).with_name("hardware.yaml")


class Accelerator(NamedTuple):
    """One accelerator, as its vendor describes it."""

    name: str
    memory_bytes: float
    bandwidth: float
    """Bytes per second."""
    flops: Mapping[str, float]
    """Dense floating-point operations per second, by type of number."""
    source: str


class Efficiency(NamedTuple):
    """What programs reach of a data sheet, and what they spend beside it."""

    bandwidth: float
    """Share of the sheet's."""
    matmuls: float
    """Share of the sheet's."""
    training: float
    """Share of the sheet's products, in training."""
    layer_s: float
    """Seconds of a layer that neither bytes nor products explain."""
    step_s: float
    """Seconds of a step outside its pass: scheduling, sampling."""
    cycle_s: float
    """Seconds more of a step that drafts."""
    exchange_s: float
    """Seconds of one exchange between accelerators that share a model; a layer has two."""
    error: float
    """Share by which a speed-up on paper may be wrong, acceptance aside."""


class Place(NamedTuple):
    """Where a target runs: so many accelerators that share every layer."""

    accelerator: Accelerator
    devices: int
    efficiency: Efficiency

    @property
    def memory_bytes(self) -> float:
        return self.devices * self.accelerator.memory_bytes

    @property
    def bandwidth(self) -> float:
        """Bytes per second that passes reach."""
        return self.devices * self.accelerator.bandwidth * self.efficiency.bandwidth

    def flops(self, kind: str) -> float:
        """Operations per second that passes reach in this type, or in bf16 where the accelerator lacks it."""
        own = self.accelerator.flops
        return self.devices * own.get(kind, own["bf16"]) * self.efficiency.matmuls


@functools.cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return found


def names() -> list[str]:
    """The accelerators there are."""
    return sorted(_table()["accelerators"])


def find(name: str) -> Accelerator:
    """An accelerator by its name.  Raises ConfigError for one that is not in the table."""
    own = _table()["accelerators"].get(name.lower())
    if own is None:
        raise ConfigError(
            f"hardware {name!r} is not in the table{nearest(name.lower(), names())}; or run --measure on the "
            "machine itself"
        )
    flops = {kind: value * 1e12 for kind, value in own["tflops"].items()}
    return Accelerator(name.lower(), own["memory"] * 1e9, own["bandwidth"] * 1e9, flops, own["source"])


def efficiency() -> Efficiency:
    """The one set of constants."""
    return Efficiency(**{name: float(own["value"]) for name, own in _table()["efficiency"].items()})


def place(name: str, count: int = 1) -> Place:
    """So many accelerators of this name.  Raises ConfigError."""
    if count < 1:
        raise ConfigError(f"--devices must be at least 1, got {count}")
    return Place(find(name), count, efficiency())
