"""Whether a measured speed-up is plausible: a bound from the run's own step times, and how busy the machine was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.measure.record import Measured, Run, Sample
from outrider.measure.row import batches

CALM = 0.25
"""Quantile of the batches' step times that counts as undisturbed: load makes steps slower, never faster."""
TOLERANCE = 1.1
"""How far a measured speed-up may exceed the bound: prompts differ, and so do their steps."""
FIGURES = ("speedup", "speedup_range", "speedup_geomean", "speedup_of_means")
"""Fields of a row that are cleared if the speed-up is impossible."""
BUSY = 0.25
"""Share of lost time above which no speed-up is trusted."""


def trust(measured: Measured, speedup: float) -> dict[str, Any]:
    """The row's fields on whether its speed-up can be trusted; an impossible speed-up is removed."""
    samples = measured.samples
    possible = possible_speedup(samples)
    lost = [run.lost for sample in samples for run in (sample.run, sample.plain) if run.lost is not None]
    contention = float(np.mean(lost)) if lost else None
    reasons: list[str] = []
    refused: dict[str, Any] = {}
    if speedup > TOLERANCE * possible:
        reasons.append(
            f"the measured speed-up exceeds the {possible:.2f}× that its tokens per step and the times of its passes "
            "allow"
        )
        refused = dict.fromkeys(FIGURES)
    if contention is not None and contention > BUSY:
        reasons.append(f"other programs took {100 * contention:.0f} % of its time")
    if measured.processes > 1:
        reasons.append(f"{measured.processes} processes shared this machine")
    return refused | {"possible_speedup": possible, "contention": contention, "under_load": "; ".join(reasons) or None}


def possible_speedup(samples: Sequence[Sample]) -> float:
    """The speed-up expected from tokens per step and the undisturbed times of plain and drafted steps.

    It is tokens per step x T(1) / (T(n) + T(draft)), each including the loop's overhead, with prompt reading on both
    sides.  A drafted step never counts as cheaper than a plain one: its pass has the same weights and more tokens.
    """
    groups = batches(samples)
    drafted: Callable[[Sample], Run] = lambda sample: sample.run
    plain: Callable[[Sample], Run] = lambda sample: sample.plain
    plain_s = _step_s(groups, plain)
    drafted_s = max(plain_s, _step_s(groups, drafted))
    reading_s = sum(
        max(0.0, min(_reading_s(group, plain, plain_s), _reading_s(group, drafted, drafted_s))) for group in groups
    )

    def per_token(of: Callable[[Sample], Run], step_s: float) -> float:
        tokens = sum(len(of(sample).tokens) for sample in samples)
        return (reading_s + step_s * sum(_steps(group, of) for group in groups)) / tokens

    return per_token(plain, plain_s) / per_token(drafted, drafted_s)


def _steps(group: Sequence[Sample], of: Callable[[Sample], Run]) -> int:
    """Number of steps that served a batch: those of its longest run."""
    return max(of(sample).steps for sample in group)


def _step_s(groups: Sequence[Sequence[Sample]], of: Callable[[Sample], Run]) -> float:
    """Seconds of an undisturbed step."""
    means = [
        sum(run.draft_s + run.verify_s + run.other_s for run in map(of, group)) / _steps(group, of) for group in groups
    ]
    return float(np.quantile(means, CALM))


def _reading_s(group: Sequence[Sample], of: Callable[[Sample], Run], step_s: float) -> float:
    """Seconds until the first tokens of a batch, without its first steps."""
    return max(of(sample).first_s - max(1, len(of(sample).turns)) * step_s for sample in group)
