"""Accelerators by their data sheets, and the efficiency that programs reach in practice.  No torch."""

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
    """An accelerator according to its data sheet."""

    name: str
    memory_bytes: float
    bandwidth: float
    """Bytes per second."""
    flops: Mapping[str, float]
    """Dense floating-point operations per second, by type of number."""
    source: str


class Efficiency(NamedTuple):
    """The share of the data sheet that programs reach, and their overheads."""

    bandwidth: float
    """Share of the sheet's bandwidth."""
    matmuls: float
    """Share of the sheet's operations per second, with many rows."""
    few_matmuls: float
    """The same with few rows, whose computation hardly overlaps with reading weights."""
    training: float
    """Share of the sheet's operations per second in training."""
    layer_s: float
    """Fixed seconds of a layer with few rows."""
    many_layer_s: float
    """The same with many rows: more and smaller kernels."""
    few_bandwidth: float
    """Share of the sheet's bandwidth at which attention of few rows reads keys and values."""
    few_attention: float
    """Share of the sheet's operations per second of attention of few rows."""
    few_column_s: float
    """Seconds per token of a text and layer that attention of few rows takes, however many texts there are."""
    attention_s: float
    """Fixed seconds of attention of many rows, per layer; the next three are also for many rows."""
    matrix_attention: float
    """Share of the sheet's operations per second of attention as two matrix products."""
    many_column_s: float
    """As `few_column_s`."""
    many_bandwidth: float
    """Like `few_bandwidth`, with several rows per text."""
    step_s: float
    """Seconds of a step outside its pass: scheduling, sampling."""
    cycle_s: float
    """Additional seconds of a step that drafts."""
    eager_layer_s: float
    """Seconds of a draft's layer or choice of a token, with Python between its operations."""
    send_s: float
    """Fixed seconds of sending features or a draft to another device."""
    link_bandwidth: float
    """Bytes per second to another device."""
    exchange_s: float
    """Seconds of one exchange between accelerators that share a model; a layer has two."""
    error: float
    """Relative error of a speed-up on paper, acceptance aside."""


class Place(NamedTuple):
    """The hardware of a target: accelerators that share every layer."""

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
        """Operations per second that passes reach in this type, or in bf16 if the accelerator does not support it."""
        flops = self.accelerator.flops
        return self.devices * flops.get(kind, flops["bf16"]) * self.efficiency.matmuls

    @property
    def training_flops(self) -> float:
        """Operations per second that trainings reach."""
        return self.devices * self.accelerator.flops["bf16"] * self.efficiency.training


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def names() -> list[str]:
    """Names of all accelerators."""
    return sorted(_table()["accelerators"])


def find(name: str) -> Accelerator:
    """An accelerator by name.  Raises ConfigError for an unknown one."""
    entry = _table()["accelerators"].get(name.lower())
    if entry is None:
        raise ConfigError(
            f"unknown hardware {name!r}{nearest(name.lower(), names())}; or run --measure on the machine itself"
        )
    return _accelerator(name.lower(), entry)


def host() -> Place:
    """A server's CPU."""
    return Place(_accelerator("cpu", _table()["host"]), 1, efficiency())


def _accelerator(name: str, entry: Mapping[str, Any]) -> Accelerator:
    flops = {kind: value * 1e12 for kind, value in entry["tflops"].items()}
    return Accelerator(name, entry["memory"] * 1e9, entry["bandwidth"] * 1e9, flops, entry["source"])


def efficiency() -> Efficiency:
    """The constants, the same for all accelerators."""
    return Efficiency(**{name: float(entry["value"]) for name, entry in _table()["efficiency"].items()})


def place(name: str, count: int = 1) -> Place:
    """`count` accelerators of this name.  Raises ConfigError."""
    if count < 1:
        raise ConfigError(f"--devices must be at least 1, got {count}")
    return Place(find(name), count, efficiency())
