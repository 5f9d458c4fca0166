"""Rules by depth: acceptance of the drafts that reach it, compared with the baseline and with training.  No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from outrider.gate.figures import counts
from outrider.gate.outcome import Part, Test, silent
from outrider.gate.statistics.pairing import MatchedReports, RowPair
from outrider.report.bootstrap import Floats, normal
from outrider.report.schema import Row

FEWEST_DRAFTS = 30
"""A depth is tested if at least this many drafts reach it."""


def acceptance(comparison: MatchedReports) -> Iterator[Test | Part]:
    """Log of new/old acceptance at each depth."""
    for group in comparison.groups:
        pairs = list(group.pairs.values())
        new, old = summed([pair.new for pair in pairs]), summed([pair.old for pair in pairs])
        if new is None or old is None:
            yield silent(group.name, "a report has no acceptance by depth")
            continue
        widened = math.sqrt(_clustering(pairs, new, old))
        prompts = sum(len(pair.prompts) for pair in pairs)
        for depth in range(len(old.reached)):
            where = group.named(f"depth {depth + 1}")
            if depth >= len(new.reached) or min(new.reached[depth], old.reached[depth]) < FEWEST_DRAFTS:
                yield silent(where, f"fewer than {FEWEST_DRAFTS} drafts reach it in one of the reports")
                continue
            # half a draft more on either side, so that a share of 0 has a logarithm
            sides = [(d.accepted[depth] + 0.5, d.reached[depth] + 1.0) for d in (new, old)]
            shares = [accepted / reached for accepted, reached in sides]
            error = math.sqrt(sum(max(0.0, 1 - share) / n for share, (n, _) in zip(shares, sides, strict=True)))
            yield Test(where, normal(math.log(shares[0] / shares[1]), widened * error), prompts)


def skew(comparison: MatchedReports) -> Iterator[Test | Part]:
    """Measured acceptance minus what training predicted, at each depth."""
    for group in comparison.groups:
        pairs = list(group.pairs.values())
        measured = summed([pair.new for pair in pairs])
        predicted = _predicted([pair.new for pair in pairs])
        if measured is None or not predicted:
            missing = "what training predicted" if measured else "acceptance by depth"
            yield silent(group.name, f"the candidate's report lacks {missing}")
            continue
        widened = math.sqrt(_clustering(pairs, measured))
        before = _skews(summed([pair.old for pair in pairs]), _predicted([pair.old for pair in pairs]))
        prompts = sum(pair.new.prompts for pair in pairs)
        for depth, (expected, reached, accepted) in enumerate(zip(predicted, *measured, strict=False)):
            where = group.named(f"depth {depth + 1}")
            if expected is None:
                yield silent(where, "training predicted nothing")
            elif reached < FEWEST_DRAFTS:
                yield silent(where, f"fewer than {FEWEST_DRAFTS} drafts reach it")
            else:
                share = (accepted + 0.5) / (reached + 1)
                error = widened * math.sqrt(share * (1 - share) / reached)
                skewed = accepted / reached - expected
                eased = "no worse than the baseline" if before.get(depth, math.inf) <= skewed else ""
                yield Test(where, normal(skewed, error), prompts, eased=eased)


def _predicted(rows: Sequence[Row]) -> Sequence[float | None]:
    return next((row.predicted_by_depth for row in rows if row.predicted_by_depth), ())


def _skews(depths: Depths | None, predicted: Sequence[float | None]) -> dict[int, float]:
    """Acceptance minus its prediction, by depth."""
    sides = enumerate(zip(predicted, *depths, strict=False)) if depths else ()
    return {
        depth: n / reached - expected for depth, (expected, reached, n) in sides if expected is not None and reached
    }


class Depths(NamedTuple):
    """Drafts by depth."""

    reached: Floats
    accepted: Floats
    """At that depth and all depths before it."""


def depths_of(row: Row) -> Depths | None:
    """Drafts by depth, from the histogram if there is one, otherwise from shares and rejections.  None if the row has
    neither."""
    if row.accepted_histogram:
        deepest = max(len(row.accepted_histogram) - 1, 0)
        depths = Depths(np.zeros(deepest), np.zeros(deepest))
        for deep, steps in enumerate(row.accepted_histogram):
            for far, count in enumerate(steps):
                depths.reached[:deep] += count
                depths.accepted[: min(far, deep)] += count
        return depths
    shares = list(zip(row.accepted_by_depth, row.conditional_acceptance, row.rejections_by_depth, strict=False))
    drafts: list[tuple[float, float]] = []
    for share, conditional, rejected in shares:
        if share is None or conditional is None:
            break
        # of the drafts judged at this depth, those not accepted were rejected there
        accepted = conditional * rejected / (1 - conditional) if conditional < 1 else 0.0
        if conditional == 1 and (row.steps or 0) > 0:
            accepted = drafts[-1][1] if drafts else float(row.steps or 0)
        drafts.append((accepted / share if share else rejected, accepted))
    return Depths(*np.array(drafts).T) if drafts else None


def _clustering(pairs: Iterable[RowPair], new: Depths, old: Depths | None = None) -> float:
    """Variance of tokens per step over prompts, divided by that of as many independent steps; at least 1.

    With `old`, for the difference between the two over the same prompts.
    """
    table = np.array([values for pair in pairs for both in pair.prompts if (values := counts(*both)) is not None])
    if len(table) < 2:
        return 1.0
    influence = np.zeros(len(table))
    alone = 0.0
    for side, depths in ((0, new), (2, old)):
        if depths is not None:
            tokens, steps = table[:, side], table[:, side + 1]
            residuals = (tokens - tokens.sum() / steps.sum() * steps) / steps.sum()
            influence = influence + (residuals if side == 0 else -residuals)
            share = np.minimum(1.0, depths.accepted / steps.sum())
            weights = 2 * np.arange(len(share)) + 1
            alone += max(0.0, float((weights * share).sum() - share.sum() ** 2)) / float(steps.sum())
    return max(1.0, float((influence**2).sum()) * len(table) / (len(table) - 1) / alone) if alone else 1.0


def summed(rows: Sequence[Row]) -> Depths | None:
    """The sum over all tasks, as deep as the deepest one."""
    by_row = [depths for row in rows if (depths := depths_of(row)) is not None]
    if not by_row or len(by_row) < len(rows):
        return None
    sides = [[sum(column) for column in zip_longest(*side, fillvalue=0.0)] for side in zip(*by_row, strict=True)]
    return Depths(*map(np.array, sides))
