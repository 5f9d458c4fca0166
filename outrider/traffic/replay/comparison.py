"""Compares texts of two servers: how many are equal, and where the first unequal ones differ.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

EXAMPLES = 20


@dataclass
class TextComparison:
    """Texts compared so far."""

    compared: int = 0
    equal: int = 0
    first_differences: tuple[tuple[str, int], ...] = ()
    """(id of the call, index of the first differing character) of the first few."""

    def take(self, name: str, one: str, other: str) -> int | None:
        """Add a pair.  Returns the index of the first character that differs; None if the texts are equal."""
        at = first_difference(one, other)
        self.compared += 1
        self.equal += at is None
        if at is not None and len(self.first_differences) < EXAMPLES:
            self.first_differences += ((name, at),)
        return at


def first_difference(one: str, other: str) -> int | None:
    """Index of the first character that differs; None if the texts are equal."""
    return None if one == other else next(i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b)
