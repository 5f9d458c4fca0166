"""The decision: rules in order, each with the number that decides it.  No torch.

1. Without traffic, nothing can be decided.  2. A method pays where the lower end of its speed-up is above `PAYS`, its
answers are long enough for its reading of prompts, its memory fits and the limits are met: the fastest is enabled.
3. Where not even the upper end of any reaches `PAYS`, more requests in a batch are the better use of the machine.
4. Else the interval is too wide, and what would narrow it is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.plan.demand import Demand
from outrider.plan.schema import Decision, Row

PAYS = 1.1
"""Speed-up from which on drafting is worth its trouble."""
UNSURE = 0.3
"""Error of costs that is due to other programs: on paper it is a fifth, on a quiet machine about a tenth."""
LONG_ENOUGH = 3.0
"""Break-even lengths that an answer must have."""


class Choice(NamedTuple):
    """What to do, and why."""

    decision: Decision
    because: str
    row: Row | None = None
    depths: Mapping[str, int] = {}


def decide(
    rows: Sequence[Row], demand: Demand, concurrency: float, unknown: Sequence[str], error: float = 0.0
) -> Choice:
    """The choice on rows of one load and others.

    unknown: methods whose acceptance is not known.  error: share by which costs may be wrong.
    """
    here = [row for row in rows if row.concurrency == concurrency]
    allowed = [row for row in here if not objection(row, demand)]
    sure = [row for row in allowed if (row.speedup.low or 0) > PAYS]
    if sure:
        # the methods that surely pay, by what is expected of them; a tie goes to the shorter draft
        best = max(sure, key=lambda row: (round(row.speedup.center or 0, 3), -row.depth))
        return Choice("ENABLE", f"{_text(best)}: even the lower end is above {PAYS:g}", best, depths(rows, best.method))
    hopeful = [row for row in allowed if (row.speedup.high or 0) > PAYS]
    if hopeful:
        best = max(hopeful, key=lambda row: row.speedup.center or 0)
        return Choice("NEED DATA", f"{_text(best)}: its ends lie on both sides of {PAYS:g}; {_next(best, error)}", best)
    if unknown:
        return Choice("NEED DATA", f"the acceptance of {', '.join(unknown)} is not known; name a --report that has it")
    if not here:
        return Choice("NEED DATA", "no method was given that can be judged; name some with --method")
    best = max(allowed or here, key=lambda row: row.speedup.high or 0)
    why = objection(best, demand) if not allowed else f"not even the upper end is above {PAYS:g}"
    return Choice("BATCH INSTEAD", f"{_text(best)}: {why}", best)


def objection(row: Row, demand: Demand) -> str:
    """Why a row may not be enabled, whatever its speed-up; empty where nothing speaks against it."""
    if row.fits is False:
        return f"{row.slots} texts fit beside the drafter, and {row.concurrency:.3g} are served at once"
    if row.break_even_tokens is not None and demand.new_tokens < LONG_ENOUGH * row.break_even_tokens:
        return (
            f"answers of {demand.new_tokens:.0f} tokens are shorter than {LONG_ENOUGH:g} times the "
            f"{row.break_even_tokens:.0f} that reading the prompt costs"
        )
    if row.meets_slo is False:
        return f"{row.tpot_ms:.1f} ms a token are more than the limit"
    return ""


def depths(rows: Sequence[Row], method: str) -> dict[str, int]:
    """The best depth of a method by requests at once; 0 where plain decoding is expected to be faster."""
    found = {}
    for load in sorted({row.concurrency for row in rows if row.method == method}):
        best = max(
            (row for row in rows if row.method == method and row.concurrency == load),
            key=lambda row: (round(row.speedup.center or 0, 3), -row.depth),
        )
        found[f"{load:.4g}"] = best.depth if (best.speedup.center or 0) > 1 else 0
    return found


def _text(row: Row) -> str:
    spread = f"{row.speedup.center:.2f} [{row.speedup.low:.2f}, {row.speedup.high:.2f}]"
    return f"{row.method} at depth {row.depth}: {spread} times plain decoding at {row.concurrency:.3g} at once"


def _next(row: Row, error: float) -> str:
    if error > UNSURE:
        return f"timed steps may be wrong by {error:.0%}: plan again, with --measure, while nothing else runs"
    if row.basis == "published":
        return "measure its acceptance on your own texts (`outrider evaluate`), and name that --report"
    if row.basis == "probe":
        return "replay more of the log (--probe), or time the steps with --measure"
    return "measure on more prompts, or time the steps with --measure"
