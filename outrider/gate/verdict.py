"""May this draft ship?  Compares two reports of the same prompts and gives one verdict with its reasons.  No torch.

A gate must stop what got worse and nothing else.  Figures are compared prompt by prompt, and prompts are resampled.
All statistical tests of all rules share one probability of a false alarm (Holm).  One more test covers all tasks
together: nine tasks of 22 prompts show a loss of 3 % only together.  A loss stops the gate if the corrected interval of
new/old lies below 1 and its center is below the tolerance; it leads to a warning if only the uncorrected interval does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import DataError
from outrider.gate.outcome import Decision, Finding, GateOutcome, Part, Test, Verdict, silent
from outrider.gate.policy import TIMED, Policy
from outrider.gate.rules import findings
from outrider.gate.statistics.noise import (
    alike_pair,
    noise_notes,
    noise_of,
    prompts_needed,
    speed_logs,
    spread,
    widen,
    widening,
)
from outrider.gate.statistics.pairing import MatchedReports, compare
from outrider.report.bootstrap import Interval, holm
from outrider.report.schema import Report

LOSSES = (0.01, 0.02, 0.03)


def gate(
    new: Report, old: Report, policy: Policy | None = None, *, alike: Sequence[tuple[Report, Report]] = (),
    allow_other_machine: bool = False,
) -> GateOutcome:  # fmt: skip
    """Judge a candidate's report against a baseline's.  alike: pairs of reports of the same draft, which show the
    noise.

    DataError if the two can't be compared because targets, prompts or machines differ.
    """
    policy = policy or Policy()
    comparison = compare(new, old, policy.shared)
    others = comparison.differences
    if others and not allow_other_machine:
        raise DataError(
            f"the reports come from different machines or settings ({'; '.join(others)}); measure both on the same "
            "machine, or leave out times with --allow-other-machine"
        )
    sigma = spread(speed_logs(comparison, policy))
    noise = noise_of([alike_pair(a, b, new, policy, allow_other_machine) for a, b in alike], policy)
    widened = widening(noise, sigma)
    rules = [widen(rule, widened) if rule.rule in TIMED else rule for rule in findings(comparison, policy)]
    tail = (1 - policy.level) / 2
    chances = [test.estimate.chance_of(0.0) for rule in rules for test in rule.tests]
    allowed = iter(holm(chances, policy.false_stops))
    # acceptance falls when drafts get deeper; that is not a loss if tokens per step rose significantly
    paces = [test for rule in rules if rule.rule == "tokens per step" for test in rule.tests if test.is_whole]
    is_faster_paced = bool(paces) and all(test.estimate.bound(tail) > 0 for test in paces)
    judged = [_judged(rule, [next(allowed) for _ in rule.tests], tail) for rule in rules]
    judged = [
        finding.eased()
        if finding.limit.action == "warn" or (is_faster_paced and finding.rule == "acceptance by depth")
        else finding
        for finding in judged
    ]
    excused = [*_set_aside(new, rules, policy), *(TIMED if others else ())]
    largest_sigma = max(filter(None, (sigma, noise.sigma if noise else None)), default=None)
    tail_of_one = policy.false_stops / max(1, len(chances))
    needed = [(loss, prompts_needed(largest_sigma, loss, tail_of_one)) for loss in LOSSES] if largest_sigma else []
    too_few = "" if "speed" in excused else _too_few(comparison, policy, largest_sigma, tail_of_one)
    decision, headline = _together(judged, policy, excused, too_few)
    notes = (*comparison.notes, *noise_notes(noise, sigma, widened))
    return GateOutcome(decision, tuple(judged), headline, notes, len(chances), largest_sigma, widened, tuple(needed))


def _too_few(comparison: MatchedReports, policy: Policy, sigma: float | None, tail: float) -> str:
    """Why there are too few prompts to detect the loss of speed that must not pass; empty if there are enough."""
    if policy.detectable_loss is None or not sigma:
        return ""
    fewest = min(sum(len(pair.prompts) for pair in group.pairs.values()) for group in comparison.groups)
    needed = prompts_needed(sigma, policy.detectable_loss, tail)
    if fewest >= needed:
        return ""
    loss = f"{policy.detectable_loss:.0%}"
    return f"{fewest} prompts can't show a loss of speed of {loss}, about {needed:,} can (noise {sigma:.1%} per prompt)"


def _judged(rule: Finding, allowed: Sequence[float], tail: float) -> Finding:
    """The rule with each test replaced by a part."""
    parts = [_part(rule, test, share, tail) for test, share in zip(rule.tests, allowed, strict=True)]
    return replace(rule, tests=(), parts=(*parts, *rule.parts) or (silent("", "nothing to compare"),))


def _part(rule: Finding, test: Test, allowed: float, tail: float) -> Part:
    """It is a loss if the interval lies below 0 and its center below the tolerance."""
    estimate = test.estimate
    is_ratio = rule.unit == "new/old"
    limit = rule.limit.tolerated
    lowest = -limit if not is_ratio else -math.log1p(limit) if rule.rises else math.log1p(-limit)
    alone = estimate.interval(tail)
    corrected = estimate.interval(allowed)
    is_past = estimate.center < lowest
    is_sure = is_past and corrected.high < 0
    is_likely = is_past and alone.high < 0
    verdict: Verdict = "stop" if is_sure and not test.eased else "warn" if is_likely else "pass"

    def shown(interval: Interval) -> Interval:
        """An interval of log ratios as ratios new/old, smaller end first."""
        if not is_ratio:
            return interval
        ratios = [math.exp(-value if rule.rises else value) for value in interval]
        return Interval(ratios[0], min(ratios[1:]), max(ratios[1:]))

    figure = shown(alone)
    text = f"{rule.what} {_change(rule, figure.center)} ({_change(rule, figure.low)} to {_change(rule, figure.high)})"
    if is_past:
        beyond = f"{100 * limit:.2g} {'%' if is_ratio else 'points'} tolerated"
        doubt = "" if is_sure else "significant alone but not among all tests" if is_likely else "may be noise"
        text = ", ".join(filter(None, (text, beyond, doubt, test.eased)))
    return Part(test.where, verdict, text, figure.center, figure, shown(corrected), test.prompts)


def _change(rule: Finding, value: float) -> str:
    return f"{100 * (value - 1):+.1f} %" if rule.unit == "new/old" else f"{100 * value:+.1f} points"


def _together(
    findings: Sequence[Finding], policy: Policy, excused: Sequence[str], too_few: str
) -> tuple[Decision, str]:  # fmt: skip
    """The overall decision and its reason in one sentence.  too_few: why the prompts don't suffice for a pass."""
    stops, warnings, silent = (
        [f for f in findings if f.verdict == which] for which in ("stop", "warn", "not measured")
    )
    holes = [(finding, part) for finding in findings for part in finding.parts if part.is_hole]
    is_required = lambda finding: finding.rule in policy.required and finding.rule not in excused
    short = [(f.rule, f.reason) for f in silent if is_required(f) and all(part.is_short for part in f.parts)]
    missing = [(f.rule, f.reason) for f in silent if is_required(f) and not all(part.is_short for part in f.parts)]
    missing += [(f.rule, f"{p.where}: {p.reason}") for f, p in holes if is_required(f)]
    stops += warnings if policy.warnings_stop else []
    unsaid = f"; not measured: {', '.join(finding.rule for finding in silent)}" if silent else ""
    if stops:
        more = f"; and by {', '.join(finding.rule for finding in stops[1:])}" if len(stops) > 1 else ""
        return "stop", f"STOP by {stops[0].rule}: {stops[0].reason}{more}{unsaid}"
    if missing:
        return "stop", f"STOP: {missing[0][0]} is required and was not measured: {missing[0][1]}{unsaid}"
    if short or too_few:
        why = f"{short[0][0]} is required, and {short[0][1]}" if short else too_few
        return "underpowered", f"UNDERPOWERED: {why}; measure more prompts (evaluate.prompts){unsaid}"
    if warnings:
        return "warn", f"PASS with warnings by {', '.join(finding.rule for finding in warnings)}{unsaid}"
    return "pass", f"PASS: no rule found a loss{unsaid}"


def _set_aside(new: Report, rules: Sequence[Finding], policy: Policy) -> list[str]:
    """Rules that the policy turns off, which need not be measured."""
    off: list[str] = [rule.rule for rule in rules if rule.limit.action == "off"]
    is_lossy = policy.lossy_rule == "allow" and all(row.lossless is False for row in new.rows)
    return [*off, "exactness"] if is_lossy else off
