"""Rules of the field, beside what a plan computes and what we measured: sizes, shares accepted, training, utilisation.

They are no part of a decision.  A user who has read one of them sees here whether it holds for this target, hardware
and traffic.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from outrider.drafters import method
from outrider.plan.decide import PAYS
from outrider.plan.paper.hardware import Place
from outrider.plan.paper.roofline import saturation_rows
from outrider.plan.schema import BreakEven, Row, Rule
from outrider.plan.subject import Subject

TABLE = Path(__file__).with_name("rules.yaml")
SIXTY = (0.5, 0.6)
"""Shares of drafted tokens between which the rule has drafting begin to pay."""
HALF, FULL = 0.5, 0.8
"""Utilisation below which the rule speculates, and from which on it batches."""


@functools.cache
def table() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return found


def rules(
    own: Subject, rows: Sequence[Row], points: Sequence[BreakEven], load: float, place: Place | None, chosen: Row | None
) -> tuple[Rule, ...]:
    """Every rule.  rows, points: of all loads; those at `load` count.  chosen: the row that is enabled, if one is."""
    here = [row for row in rows if row.concurrency == load]
    return (
        _rule("size", *size(own, here)),
        _rule("acceptance", *acceptance(points)),
        _rule("training", *training(own, here)),
        _rule("utilisation", *utilisation(own, load, place, chosen)),
    )


def _rule(name: Any, here: str, holds: bool | None) -> Rule:
    own = table()[name]
    values = {key: figure["value"] for key, figure in own["figures"].items()}
    files = dict.fromkeys(figure["in"][0] for figure in own["figures"].values())
    return Rule(
        name=name, says=own["says"], here=here, holds=holds, measured=own["measured"].format(**values),
        sources=tuple(f"benchmarks/results/{file}.json" for file in files),
    )  # fmt: skip


def size(own: Subject, rows: Sequence[Row]) -> tuple[str, bool | None]:
    """Weights and time of the smallest and the fastest draft; whether they are one."""
    best = {
        name: row for name, row in _best(rows).items()
        if (model := own.drafts[name].model) is not None and model.parameters
    }  # fmt: skip
    if not best:
        return "no method with weights of its own was compared", None
    share = {name: _parameters(own, name) / own.model.parameters for name in best}
    smallest, fastest = min(best, key=lambda name: share[name]), max(best, key=lambda name: _center(best[name]))
    parts = [
        f"{name}, {best[name].depth} deep, has {share[name]:.2g} of the target's weights and drafts in "
        f"{best[name].draft_s / best[name].plain_s:.2g} of a plain step: {_center(best[name]):.2f} times as fast"
        for name in dict.fromkeys((smallest, fastest))
    ]  # fmt: skip
    return "; ".join(parts), None if len(best) == 1 else smallest == fastest


def acceptance(points: Sequence[BreakEven]) -> tuple[str, bool | None]:
    """Shares of drafted tokens from which on the methods pay; whether all lie where the rule has them."""
    lowest: dict[str, tuple[float, int]] = {}
    for point in points:
        if point.acceptance is not None:
            lowest[point.method] = min(lowest.get(point.method, (2.0, 0)), (point.acceptance, point.depth))
    if not lowest:
        return "no method would pay here even if all drafted tokens were accepted", None
    ends = sorted((share, name, depth) for name, (share, depth) in lowest.items())
    first, last = (f"{share:.0%} ({name}, {depth} deep)" for share, name, depth in (ends[0], ends[-1]))
    text = f"drafting pays from {first} on" if len(ends) == 1 else f"drafting pays from {first} to {last} on"
    return text, all(SIXTY[0] <= share <= SIXTY[1] for share, _, _ in ends)


def training(own: Subject, rows: Sequence[Row]) -> tuple[str, bool | None]:
    """The fastest method that needs no training beside the fastest that does; whether none of the former pays."""
    best = _best(rows)
    needs_none = {name for name in best if method(own.methods[name].kind).cost == "lookup"}
    fastest = [
        max((row for name, row in best.items() if (name in needs_none) == free), key=_center, default=None)
        for free in (True, False)
    ]
    free, trained = fastest
    if free is None or trained is None:
        return f"no method that needs {'no' if free is None else 'a'} training was compared", None
    text = " and ".join(f"{row.method} {_center(row):.2f} times" for row in (free, trained))
    pays = (free.speedup.low or 0) > PAYS
    return f"{text} as fast, without a training and with one", not pays


def utilisation(
    own: Subject, load: float, place: Place | None, chosen: Row | None
) -> tuple[str, bool | None]:  # fmt: skip
    """Rows of a plain step over those from which on the hardware computes instead of waiting for memory."""
    if place is None:
        return "the device's speed is not known here; --hardware has it", None
    most = saturation_rows(own.model, place)
    used = load / most
    rows = f"a plain step has {load:.4g} row{'s' * (load != 1)}"
    text = f"{rows}, and this target's layers compute from {most:.0f} on: {used:.0%}"
    if HALF <= used < FULL:
        return f"{text}, between the rule's two marks", None
    return text, (used < HALF) == (chosen is not None)


def _best(rows: Sequence[Row]) -> Mapping[str, Row]:
    """The best depth of each method."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.method not in best or _center(row) > _center(best[row.method]):
            best[row.method] = row
    return best


def _center(row: Row) -> float:
    return row.speedup.center or 0.0


def _parameters(own: Subject, name: str) -> int:
    model = own.drafts[name].model
    return 0 if model is None else model.parameters
