"""Measured step times, stored on disk so that a new process drafts well from its first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from outrider.decoding.protocols import Drafter
from outrider.storage import cache

Seconds = Mapping[tuple[int, int], float]


class RunnerSeconds(NamedTuple):
    """Seconds of the steps of one runner, plain or compiled."""

    passes: Seconds
    """Everything but the draft, by (slots, tokens per slot)."""
    drafts: Seconds
    """The draft, by (slots, nodes per slot)."""


NO_SECONDS = RunnerSeconds({}, {})


class StoredCosts:
    """The file of step times of one target and drafter, by runner."""

    def __init__(self, about: object, is_busy: Callable[[], bool] = lambda: False):
        """about: everything that the times depend on; its `repr` names the file.  is_busy: whether the machine is busy,
        so that times may be wrong; nothing is written then."""
        name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        self.path, self.is_busy = cache.folder() / "costs" / f"{name}.json", is_busy

    def read(self) -> dict[str, RunnerSeconds]:
        """Empty if the file is missing or damaged."""
        try:
            stored = json.loads(cache.read(self.path))
            return {
                runner: RunnerSeconds(_read(parts["passes"]), _read(parts["drafts"]))
                for runner, parts in stored.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, seconds: Mapping[str, RunnerSeconds]) -> None:
        """Store these, unless the machine is busy or the folder is not writable."""
        if self.is_busy():
            return
        rows = lambda table: [[*size, each] for size, each in table.items()]
        content = {
            runner: {part: rows(table) for part, table in parts._asdict().items()} for runner, parts in seconds.items()
        }
        with suppress(OSError), cache.keeping(self.path) as part:
            part.write_text(json.dumps(content), encoding="utf-8")


def _read(rows: Any) -> dict[tuple[int, int], float]:
    """Raises ValueError for invalid sizes or seconds."""
    seconds = {(int(slots), int(size)): float(each) for slots, size, each in rows}
    if not all(slots >= 1 and size >= 0 and 0 < each < 1e6 for (slots, size), each in seconds.items()):
        raise ValueError(f"expected rows with slots >= 1, size >= 0 and seconds > 0, got {rows}")
    return seconds


def cost_key(drafter: Drafter) -> tuple[object, ...]:
    """What a drafter's step times depend on: its class, sizes and number of weights, but no weight's value.  Drafters
    with equal keys can take over each other's memory."""
    parts = [part for each in vars(drafter).values() for part in (each if isinstance(each, list | tuple) else [each])]
    weights = sum(each.numel() for part in parts if isinstance(part, nn.Module) for each in part.parameters())
    members = [cost_key(part) for part in parts if isinstance(part, Drafter)]
    settings = drafter.taps, drafter.limit, drafter.hidden, drafter.confidence_before_draw, drafter.probe_rows
    return (type(drafter).__qualname__, *settings, weights, *members)
