"""What a step by load did, and what its confidences promised beside what was accepted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, islice, repeat
from typing import NamedTuple

from outrider.decoding.accept import Accepted
from outrider.policies.scheduler import columns


class Outcome(NamedTuple):
    """What a step did."""

    wanted: list[int]
    sizes: list[int]
    """Verified nodes of each slot."""
    survival: list[list[float]] | None
    accepted: Accepted
    draft_s: float
    pass_s: float
    """Seconds of all but the draft."""
    is_odd: bool
    """Its seconds are not usual."""
    is_first: bool
    """It follows plain steps."""

    @property
    def has_confidences(self) -> bool:
        """Whether it has any, and they can be probabilities."""
        own = self.survival
        return own is not None and all(0.0 <= each[-1] <= each[0] <= 1.0 for each in own if each)

    def paths(self) -> list[tuple[list[int], int]]:
        """Accepted nodes and nodes wanted, of each slot that did not end inside its block."""
        slots = zip(self.accepted.paths, self.wanted, self.accepted.next_tokens, strict=True)
        return [(path, own) for path, own, token in slots if token >= 0]

    def ends(self) -> list[tuple[int, int]]:
        """Verified and accepted nodes of every slot; -1 accepted where it ended inside its block."""
        slots = zip(self.sizes, self.accepted.paths, self.accepted.next_tokens, strict=True)
        return [(size, len(path) if token >= 0 else -1) for size, path, token in slots]


class Promises:
    """What confidences promised lately: the mean of a by node, and how much of it was accepted."""

    WINDOW, NEW_TEXT = 64.0, 16.0
    """Slots' steps after which a mean has faded to 1/e, and most that it weighs once it is in doubt."""
    COMPARED, PRIOR = 256.0, 16.0
    """Promised nodes after which the comparison has faded to 1/e, and how many its first guess, 1, counts as."""

    def __init__(self, limit: int):
        self.sums, self.weights = [0.0] * limit, [0.0] * limit
        self.accepted = self.promised = self.PRIOR

    @property
    def scale(self) -> float:
        """Accepted nodes over promised ones."""
        return self.accepted / self.promised

    def means(self) -> list[float]:
        """Mean of a by node, over slots that were to draft it; 0 where none was."""
        return [total / max(weight, 1e-9) for total, weight in zip(self.sums, self.weights, strict=True)]

    def lighten(self) -> None:
        """Old means weigh little from now on."""
        for n, weight in enumerate(self.weights):
            share = min(1.0, self.NEW_TEXT / max(weight, 1e-9))
            self.sums[n], self.weights[n] = share * self.sums[n], share * weight

    def read(self, steps: Sequence[Outcome]) -> None:
        """What steps with confidences promised, and what was accepted of what they verified."""
        survival = [own for each in steps for own in each.survival or ()]
        wanted = sorted(own for each in steps for own in each.wanted)
        for n, total in enumerate(islice(chain(columns(survival), repeat(0.0)), wanted[-1])):
            slots = len(wanted) - bisect_right(wanted, n)
            fade = (1 - 1 / self.WINDOW) ** slots
            self.sums[n] = self.sums[n] * fade + total
            self.weights[n] = self.weights[n] * fade + slots
        ends = (end for each in steps for end in each.ends())
        verified = [(sum(own[:size]), accepted) for own, (size, accepted) in zip(survival, ends, strict=True)]
        promised = sum(each for each, accepted in verified if accepted >= 0)
        fade = (1 - 1 / self.COMPARED) ** promised
        self.accepted = self.accepted * fade + sum(accepted for _, accepted in verified if accepted >= 0)
        self.promised = self.promised * fade + promised
