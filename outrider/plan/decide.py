"""Makes the decision, with the number that decides it.  No torch.

A method is enabled if the lower end of its speed-up is above `PAYS`, answers are long enough to make up for the time
its drafter takes to read prompts, its memory fits and the latency limits are met; the fastest such method is chosen.
If not even the upper end of any method is above `PAYS`, larger batches are the better use of the machine.  Otherwise
the interval is too wide, and the decision says which measurement would narrow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.plan.demand import Demand
from outrider.plan.schema import Decision, Row

PAYS = 1.1
"""Speed-up above which drafting is worth the effort."""
UNSURE = 0.3
"""A cost error above this is due to other programs: the usual error is a fifth on paper and a tenth on a quiet machine.
"""
LONG_ENOUGH = 3.0
"""Minimum length of an answer, as a multiple of the break-even length."""


class Choice(NamedTuple):
    """The decision and its reason."""

    decision: Decision
    because: str
    row: Row | None = None
    depths: Mapping[str, int] = {}


def decide(
    rows: Sequence[Row], demand: Demand, concurrency: float, without_acceptance: Sequence[str], error: float = 0.0
) -> Choice:
    """Decide at one load; `rows` may contain other loads, for the choice of depths.

    without_acceptance: methods whose acceptance is unknown.  error: relative error of the costs.
    """
    at_load = [row for row in rows if row.concurrency == concurrency]
    allowed = [row for row in at_load if not objection(row, demand)]
    sure = [row for row in allowed if (row.speedup.low or 0) > PAYS]
    if sure:
        # by expected speed-up; a tie goes to the shorter draft
        best = max(sure, key=lambda row: (round(row.speedup.center or 0, 3), -row.depth))
        return Choice("ENABLE", f"{_text(best)}: even the lower end is above {PAYS:g}", best, depths(rows, best.method))
    hopeful = [row for row in allowed if (row.speedup.high or 0) > PAYS]
    if hopeful:
        best = max(hopeful, key=lambda row: row.speedup.center or 0)
        return Choice("NEED DATA", f"{_text(best)}: its ends lie on both sides of {PAYS:g}; {_next(best, error)}", best)
    if without_acceptance:
        return Choice(
            "NEED DATA", f"the acceptance of {', '.join(without_acceptance)} is unknown; name a --report that has it"
        )
    if not at_load:
        return Choice("NEED DATA", "no method can be compared; name some with --method")
    best = max(allowed or at_load, key=lambda row: row.speedup.high or 0)
    reason = objection(best, demand) if not allowed else f"not even the upper end is above {PAYS:g}"
    return Choice("BATCH INSTEAD", f"{_text(best)}: {reason}", best)


def objection(row: Row, demand: Demand) -> str:
    """Why a row must not be enabled, whatever its speed-up; "" if it may be."""
    if row.fits is False:
        return f"{row.slots} texts fit beside the drafter, but {row.concurrency:.3g} are served at once"
    if row.break_even_tokens is not None and demand.new_tokens < LONG_ENOUGH * row.break_even_tokens:
        return (
            f"answers of {demand.new_tokens:.0f} tokens are shorter than {LONG_ENOUGH:g} times the "
            f"{row.break_even_tokens:.0f} tokens that reading the prompt costs"
        )
    if row.meets_slo is False:
        return f"{row.tpot_ms:.1f} ms per token are more than the limit"
    return ""


def depths(rows: Sequence[Row], method: str) -> dict[str, int]:
    """The best depth of a method by concurrent requests; 0 where plain decoding is expected to be faster."""
    depths = {}
    for load in sorted({row.concurrency for row in rows if row.method == method}):
        best = max(
            (row for row in rows if row.method == method and row.concurrency == load),
            key=lambda row: (round(row.speedup.center or 0, 3), -row.depth),
        )
        depths[f"{load:.4g}"] = best.depth if (best.speedup.center or 0) > 1 else 0
    return depths


def _text(row: Row) -> str:
    spread = f"{row.speedup.center:.2f} [{row.speedup.low:.2f}, {row.speedup.high:.2f}]"
    return f"{row.method} at depth {row.depth}: {spread} times plain decoding at concurrency {row.concurrency:.3g}"


def _next(row: Row, error: float) -> str:
    if error > UNSURE:
        return f"timed steps may be wrong by {error:.0%}: plan again with --measure while nothing else runs"
    if row.basis == "published":
        return "measure its acceptance on your own texts with `outrider evaluate`, and give its --report"
    if row.basis == "probe":
        return "replay more of the log (--probe), or time the steps with --measure"
    return "measure on more prompts, or time the steps with --measure"
