"""Noise of speeds, estimated from reports of the same draft (A/A), and how many prompts are needed to detect a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from outrider.errors import ConfigError, DataError
from outrider.gate.figures import speed_log
from outrider.gate.outcome import Finding
from outrider.gate.policy import Policy
from outrider.gate.statistics.pairing import MatchedReports, bare_name, compare
from outrider.report.bootstrap import Floats
from outrider.report.compare import differences
from outrider.report.schema import Report

POWER = 0.8


class Noise(NamedTuple):
    """How much reports of the same draft differ."""

    sigma: float
    """Standard deviation of the log of new/old speed over prompts."""
    between: float | None
    """Distance between whole runs relative to what their prompts predict; None for fewer than three pairs."""
    pairs: int


def neighbours(paths: str) -> list[tuple[Report, Report]]:
    """The reports of `A.json,B.json,…`, each paired with the previous one.  ConfigError for fewer than two."""
    named = [path.strip() for path in paths.split(",") if path.strip()]
    if len(named) < 2:
        raise ConfigError(f"--aa must name two or more reports of the same draft, such as A.json,B.json, got {paths!r}")
    reports = [Report.load(path) for path in named]
    return list(zip(reports[1:], reports[:-1], strict=True))


def alike_pair(one: Report, other: Report, new: Report, policy: Policy, allow_other_machine: bool) -> MatchedReports:
    """An A/A pair, matched.  DataError if its target or machine is not the candidate's, or if it has two drafters."""
    for report in (one, other):
        same = bare_name(report.target) == bare_name(new.target)
        strange = [] if same else [f"target {report.target}, not {new.target}"]
        if new.fingerprint and report.fingerprint and not allow_other_machine:
            strange += differences(new.fingerprint, report.fingerprint)
        if strange:
            raise DataError(
                f"a report of --aa can't show the candidate's noise, since it differs ({'; '.join(strange)}); measure "
                "it with the same target and machine, or leave it out"
            )
    comparison = compare(one, other, policy.shared)
    mixed = [
        pair for group in comparison.groups for pair in group.pairs.values() if pair.new.drafter != pair.old.drafter
    ]
    if mixed:
        raise DataError(
            f"a pair of --aa has two drafters, {mixed[0].new.drafter} and {mixed[0].old.drafter}; give two reports of "
            "the same one"
        )
    return comparison


def noise_of(comparisons: Sequence[MatchedReports], policy: Policy) -> Noise | None:
    """Estimated from A/A comparisons; None if they have no speeds."""
    sigmas, strays = [], []
    for logs in (speed_logs(comparison, policy) for comparison in comparisons):
        sigma = spread(logs)
        if sigma is not None:
            sigmas.append(sigma)
            every = np.concatenate(logs)
            strays.append(float(every.mean()) * math.sqrt(len(every)) / sigma if sigma else 0.0)
    if not sigmas:
        return None
    # one or two pairs don't show how much runs differ
    between = math.sqrt(float(np.mean(np.square(strays)))) if len(strays) >= 3 else None
    return Noise(math.sqrt(float(np.mean(np.square(sigmas)))), between, len(sigmas))


def spread(logs: Sequence[Floats]) -> float | None:
    """Standard deviation within arrays, each around its own mean; None for too few values."""
    freedom = sum(map(len, logs)) - len(logs)
    return (
        math.sqrt(sum(float(((values - values.mean()) ** 2).sum()) for values in logs) / freedom)
        if freedom > 0
        else None
    )


def prompts_needed(sigma: float, loss: float, tail: float) -> int:
    """Number of prompts that detect a loss with 80 % power, given an interval with `tail` beyond either end."""
    reach = float(ndtri(1 - tail) + ndtri(POWER))
    return max(2, math.ceil((reach * sigma / -math.log1p(-loss)) ** 2))


def speed_logs(comparison: MatchedReports, policy: Policy) -> list[Floats]:
    """Log of new/old speed over prompts, an array per row with at least two."""
    pairs = [pair for group in comparison.groups for pair in group.pairs.values()]
    logs_by_row = [[log[0] for both in pair.prompts if (log := speed_log(*both, policy)) is not None] for pair in pairs]
    return [np.array(logs) for logs in logs_by_row if len(logs) > 1]


def widening(noise: Noise | None, sigma: float | None) -> float:
    """How much noisier A/A runs are than this comparison's own prompts, as a factor of at least 1."""
    if noise is None:
        return 1.0
    return max(1.0, noise.sigma / sigma if sigma else 1.0) * max(1.0, noise.between or 1.0)


def widen(rule: Finding, times: float) -> Finding:
    """The rule with the intervals of its tests made `times` as wide."""
    tests = [replace(test, estimate=replace(test.estimate, widening=times)) for test in rule.tests]
    return replace(rule, tests=tuple(tests))


def noise_notes(noise: Noise | None, sigma: float | None, widened: float) -> list[str]:
    """What A/A reports showed, in one sentence; empty without them."""
    if noise is None:
        return []
    here = "" if sigma is None else f", {sigma:.3f} here"
    between = "" if noise.between is None else f"; whole runs differ {noise.between:.1f} times as much as that predicts"
    done = f"intervals of times are {widened:.2f} times as wide" if widened > 1 else "no interval is widened"
    pairs = f"{noise.pairs} pair{'s' if noise.pairs != 1 else ''} of runs"
    return [f"A/A: {pairs}, standard deviation {noise.sigma:.3f} per prompt{here}{between}; {done}."]
