"""What steps took on this machine, kept from one process to the next: a new one drafts well from its first step on."""

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


class Known(NamedTuple):
    """What steps of one runner take."""

    passes: Seconds
    """Of all but the draft, by slots and tokens of each."""
    drafts: Seconds
    """By slots and nodes of each."""


NOTHING = Known({}, {})


class KeptCosts:
    """A file of what is known of the steps of one target and drafter, by runner."""

    def __init__(self, about: object, is_busy: Callable[[], bool] = lambda: False):
        """about: all that seconds depend on, as shown by `repr`.  is_busy: whether they may be wrong now; then nothing
        is kept."""
        name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        self.path, self.is_busy = cache.folder() / "costs" / f"{name}.json", is_busy

    def read(self) -> dict[str, Known]:
        """Nothing where there is no file, or a damaged one."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            return {runner: Known(_read(own["passes"]), _read(own["drafts"])) for runner, own in stored.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, known: Mapping[str, Known]) -> None:
        """Keep this, unless the machine is busy or the folder can't be written."""
        if self.is_busy():
            return
        rows = lambda seconds: [[*size, each] for size, each in seconds.items()]
        content = {
            runner: {part: rows(seconds) for part, seconds in own._asdict().items()} for runner, own in known.items()
        }
        with suppress(OSError), cache.keeping(self.path) as part:
            part.write_text(json.dumps(content), encoding="utf-8")


def _read(rows: Any) -> dict[tuple[int, int], float]:
    """Raises ValueError for what seconds can't be."""
    found = {(int(slots), int(size)): float(each) for slots, size, each in rows}
    if not all(slots >= 1 and size >= 0 and 0 < each < 1e6 for (slots, size), each in found.items()):
        raise ValueError(f"slots from 1, sizes from 0 and seconds above 0 are kept, got {rows}")
    return found


def shape_of(drafter: Drafter) -> tuple[object, ...]:
    """What a drafter's seconds depend on, whatever it learnt; equal where one can take over what another stores of its
    slots."""
    held = [part for each in vars(drafter).values() for part in (each if isinstance(each, list | tuple) else [each])]
    weights = sum(each.numel() for part in held if isinstance(part, nn.Module) for each in part.parameters())
    members = [shape_of(part) for part in held if isinstance(part, Drafter)]
    own = drafter.taps, drafter.limit, drafter.hidden, drafter.confidence_before_draw, drafter.probe_rows
    return (type(drafter).__qualname__, *own, weights, *members)
