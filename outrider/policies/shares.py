"""A bandit that splits a step's nodes among members by their acceptance so far (CombUCB1, see `mix`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

EXPLORE = 0.1
"""Weight of a confidence bound; 0 would use only the acceptance so far, 1 has the proven regret bound."""


class Shares:
    """One slot's bandit: how often each member's n-th node was offered and accepted."""

    WINDOW = 64.0
    """Steps after which a count has faded to 1/e."""
    GUESS, DOUBT = 0.5, 2.0
    """Prior of a member's first node, and its weight in tests; the prior of every other node is the value of the
    previous node."""

    def __init__(self, limits: Sequence[int]):
        self.steps = 0.0
        self.offered = [[0.0] * limit for limit in limits]
        self.accepted = [[0.0] * limit for limit in limits]

    def split(self, most: int) -> list[int]:
        """Nodes per member: those with the highest bounds, a prefix of each member; ties go to the first member."""
        bounds = [self._bounds(part, most) for part in range(len(self.offered))]
        shares = [0] * len(bounds)
        for _ in range(most):
            best = max(range(len(bounds)), key=lambda part: bounds[part][shares[part]])
            if bounds[best][shares[best]] < 0:
                break
            shares[best] += 1
        return shares

    def _bounds(self, part: int, most: int) -> list[float]:
        """Upper confidence bounds of a member's nodes, non-increasing, and -1 after the last."""
        doubt = EXPLORE * math.sqrt(1.5 * math.log(1 + self.steps))
        guess, lowest, bounds = self.GUESS, math.inf, []
        for offered, accepted in zip(self.offered[part][:most], self.accepted[part], strict=False):
            guess = (accepted + self.DOUBT * guess) / (offered + self.DOUBT)
            lowest = min(lowest, guess + doubt / math.sqrt(offered + self.DOUBT))
            bounds.append(lowest)
        return [*bounds, -1.0]

    def learn(self, offered: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]) -> None:
        """Learn from the verified (offered) and accepted nodes of each member's draft."""
        fade = 1 - 1 / self.WINDOW
        self.steps = fade * self.steps + 1
        for counts, nodes in ((self.offered, offered), (self.accepted, accepted)):
            for part, positions in enumerate(nodes):
                counts[part] = [fade * count + (n in positions) for n, count in enumerate(counts[part])]
