"""A rule before its verdict: noisy figures that wait for each other, and parts that are judged at once.  No torch."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.gate.outcome import Part, Unit
from outrider.gate.policy import Limit, Policy, Rule
from outrider.report.bootstrap import Estimate


@dataclass(frozen=True, slots=True)
class Test:
    """One noisy figure.  Its estimate is oriented so that below 0 is a loss: a log ratio, or a difference."""

    __test__ = False  # for pytest, which takes a class of this name for its own

    where: str
    estimate: Estimate
    prompts: int
    is_whole: bool = False
    """Over all tasks of a drafter at a temperature."""
    eased: str = ""
    """Why a loss only warns; empty where it stops."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A rule and what was found; how many tests there are in all decides what a test may say."""

    rule: Rule
    measures: str
    unit: Unit
    limit: Limit
    found: tuple[Test | Part, ...]
    rises: bool = False
    """More is worse."""
    what: str = ""
    """What the reason calls it; the rule's name without."""

    @property
    def tests(self) -> list[Test]:
        return [one for one in self.found if isinstance(one, Test)]

    @property
    def parts(self) -> list[Part]:
        return [one for one in self.found if isinstance(one, Part)]


def silent(where: str, reason: str, is_hole: bool = False) -> Part:
    """A part of which nothing is known, and why."""
    return Part(where, "not measured", reason, is_hole=is_hole)


def too_few(where: str, count: int, policy: Policy) -> Part:
    """A part that has prompts, and not enough of them."""
    return silent(where, f"{count} prompt{'s are' if count != 1 else ' is'} too few, {policy.least_prompts} are needed")
