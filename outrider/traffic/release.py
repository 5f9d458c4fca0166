"""What a report predicts for a drafter in production: tokens per step, with an interval.  No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.errors import DataError
from outrider.report import bootstrap
from outrider.report.bootstrap import Interval
from outrider.report.schema import Report, Row

LEVEL, SIGMAS = 0.99, 2.576
"""Confidence level of the release's interval.  Wider than the report's 95 %: a release outside its interval would raise
alarms forever."""
FEWEST_PROMPTS = 8
SELDOM = 0.02
"""Maximum share of steps without a draft for a drafter to count as always drafting."""


class Release(NamedTuple):
    """What a report predicts for a drafter in production."""

    drafter: str
    temperature: float
    prompts: int
    tokens_per_step: Interval
    spread: float
    """Variance of tokens - tokens_per_step × steps, per step, over whole prompts; an upper estimate."""
    prompt_spread: float
    """Standard deviation of the same over one prompt."""
    by_depth: tuple[Interval, ...] = ()
    """[k]: share of the drafts of which at least k + 1 tokens were accepted."""
    always_drafts: bool = False
    """Whether all but a few steps had a draft; False if the report does not show it."""
    other_temperatures: tuple[float, ...] = ()
    """Further temperatures at which the report has rows of the drafter."""

    @property
    def description(self) -> str:
        """Drafter, temperature and number of prompts."""
        others = (
            f"; the report also has temperature {_listed(self.other_temperatures)}" if self.other_temperatures else ""
        )
        return f"{self.drafter} at temperature {self.temperature:g}, {self.prompts} prompts{others}"

    def json(self) -> dict[str, Any]:
        """The prediction, to be stored with measurements."""
        return {
            "drafter": self.drafter, "temperature": self.temperature, "prompts": self.prompts,
            "tokens_per_step": self.tokens_per_step._asdict(),
            "by_depth": [interval._asdict() for interval in self.by_depth],
        }  # fmt: skip


def release_of(report: Report, drafter: str | None = None, temperature: float | None = None) -> Release:
    """What `report` predicts for `drafter` at `temperature`, over all its tasks.  The default is its lead row, which
    was shown to be exact and is at temperature 0 if that was measured.

    Raises DataError if the report has no such drafter, no row at that temperature, or too few prompts for an interval.
    """
    rows, lead = _rows_at(report, drafter, temperature)
    others = {row.temperature for row in rows if row.drafter == lead.drafter} - {lead.temperature}
    rows = [row for row in rows if (row.drafter, row.temperature) == (lead.drafter, lead.temperature)]
    pairs = [(float(p.tokens), float(p.steps)) for row in rows for p in row.per_prompt if p.tokens and p.steps]
    if len(pairs) < FEWEST_PROMPTS:
        raise DataError(
            f"the report measured {lead.drafter} at temperature {lead.temperature:g} on {len(pairs)} prompts; an "
            f"interval needs at least {FEWEST_PROMPTS}, and a few hundred to detect a drop of 10 %; measure again with "
            "evaluate.prompts=400"
        )
    tokens, steps = np.array(pairs).T
    center = bootstrap.ratio_of_totals(list(tokens), list(steps), level=LEVEL)
    variance = float(np.mean((tokens - center.center * steps) ** 2))
    # plus twice the standard error of a variance, and a floor: a few prompts may be similar by chance
    spread = max(variance / float(steps.mean()) * (1 + 2 * math.sqrt(2 / len(pairs))), (center.center - 1) / 4, 0.05)
    prompt_spread = math.sqrt(spread * float(steps.mean()))
    # resampling a hundred prompts, few of them extreme, gives intervals with 96 % coverage, not 99 %
    half = SIGMAS * math.sqrt(spread / float(steps.sum()))
    middle, low, high = center
    wide = Interval(middle, min(low, middle - half), max(high, middle + half))
    return Release(
        lead.drafter, lead.temperature, len(pairs), wide, spread, prompt_spread, _depths(rows, spread),
        _always_drafts(rows), tuple(sorted(others)),
    )  # fmt: skip


def _rows_at(report: Report, drafter: str | None, temperature: float | None) -> tuple[list[Row], Row]:
    """The measured rows of `drafter` at every temperature, and the lead row at `temperature`."""
    rows = [row for row in report.rows if drafter in (None, row.drafter) and row.tokens_per_step is not None]
    if not rows:
        drafters = ", ".join(sorted({row.drafter for row in report.rows}))
        if not drafters:
            raise DataError("the report has no rows; give the report of a measured drafter")
        raise DataError(
            f"the report has no measured rows of {drafter or drafters}; choose from {drafters}, or name another report"
        )
    matches = tuple(row for row in rows if temperature in (None, row.temperature))
    lead = report.model_copy(update={"rows": matches}).lead
    if lead is None:
        of = "" if drafter is None else f" of {drafter}"
        raise DataError(
            f"the report has no row{of} at temperature {temperature:g}; choose from "
            f"{_listed({row.temperature for row in rows})}, or measure again with that evaluate.temperatures"
        )
    return rows, lead


def _listed(temperatures: Collection[float]) -> str:
    return ", ".join(f"{temperature:g}" for temperature in sorted(temperatures))


def _always_drafts(rows: Sequence[Row]) -> bool:
    every = sum(sum(map(sum, row.accepted_histogram)) for row in rows)
    without = sum(sum(row.accepted_histogram[0]) for row in rows if row.accepted_histogram)
    # the last step of an answer may have no room for a draft
    return every > 0 and all(row.accepted_histogram for row in rows) and without <= SELDOM * every


def _depths(rows: Sequence[Row], spread: float) -> tuple[Interval, ...]:
    """Intervals of acceptance at each depth, as servers count it: a share of all drafts, including short ones.

    A report has no depths per prompt, so these intervals are wider than those of independent drafts by the same factor
    as the interval of tokens per step.
    """
    counts: dict[int, int] = {}
    for row in rows:
        for drafted in row.accepted_histogram[1:]:
            for accepted, count in enumerate(drafted):
                counts[accepted] = counts.get(accepted, 0) + count
    drafts = sum(counts.values())
    if not drafts:
        return ()
    mean = sum(accepted * count for accepted, count in counts.items()) / drafts
    independent = sum((accepted - mean) ** 2 * count for accepted, count in counts.items()) / drafts
    widening = max(1.0, spread / independent) if independent else 1.0
    intervals = []
    for depth in range(1, max(counts) + 1):
        share = sum(count for accepted, count in counts.items() if accepted >= depth) / drafts
        half = SIGMAS * math.sqrt(max(share * (1 - share), 1 / drafts) * widening / drafts)
        intervals.append(Interval(share, max(0.0, share - half), min(1.0, share + half)))
    return tuple(intervals)
