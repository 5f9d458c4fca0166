"""Answers of two servers side by side: how many are equal, and where the first that are not begin to differ.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.report.bootstrap import Interval

EXAMPLES = 20


@dataclass
class Compared:
    """Texts compared so far."""

    compared: int = 0
    equal: int = 0
    first_differences: tuple[tuple[str, int], ...] = ()
    """(id of the call, place of the first character that differs) of the first few."""

    def take(self, name: str, one: str, other: str) -> int | None:
        """Add a pair.  Returns the place of the first character that differs; None where all are equal."""
        at = first_difference(one, other)
        self.compared += 1
        self.equal += at is None
        if at is not None and len(self.first_differences) < EXAMPLES:
            self.first_differences += ((name, at),)
        return at


@dataclass(frozen=True)
class Beside:
    """A server, compared with the first one."""

    url: str
    ratios: Mapping[str, Interval]
    """Of the mean TTFT, TPOT and E2E, this server / the first, with 95 % intervals."""
    answers: Compared | None
    """Of the calls that both answered."""


def first_difference(one: str, other: str) -> int | None:
    """Place of the first character that differs; None where all are equal."""
    if one == other:
        return None
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
