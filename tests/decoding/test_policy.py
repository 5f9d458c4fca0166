"""Adaptive against a simulated clock: seconds from a formula, acceptance from a seeded coin; nothing here sleeps.

Seeds are fixed, so a run that passed passes again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from outrider.decoding import policy as policies
from outrider.decoding.accept import Verdict
from outrider.decoding.sampling import Sampling
from outrider.decoding.state import DecodeState, Request, Timing

LIMIT = 8
Chances = Callable[[int], Sequence[float]]
"""Of a slot: the chance of each node to be kept, given that the one before it was."""


class Clock:
    """Seconds of a pass over so many rows and of a draft so deep, with noise and now and then an outlier."""

    def __init__(self, free_rows: float, per_row: float, draft: float, start: float = 0.0, noise: float = 0.0):
        self.free_rows, self.per_row, self.draft, self.start, self.noise = free_rows, per_row, draft, start, noise
        self.random = random.Random(1)

    def seconds(self, rows: float, depth: int) -> tuple[float, float]:
        """Draft and pass, without noise: a pass is flat up to `free_rows`, then grows (the roofline)."""
        return (self.start + self.draft * depth if depth else 0.0), 1.0 + self.per_row * max(0.0, rows - self.free_rows)

    def timing(self, rows: int, depth: int) -> tuple[Timing, float]:
        exact = self.seconds(rows, depth)
        noisy = [part * self.random.uniform(1 - self.noise, 1 + self.noise) for part in exact]
        return Timing(draft=noisy[0], verify=0.9 * noisy[1], other=0.1 * noisy[1]), sum(exact)


class World:
    """Slots that accept by their chances, and a clock; what a policy does in it is played step by step."""

    def __init__(self, slots: int, clock: Clock, chances: Chances, *, ragged: bool = False, seed: int = 0):
        self.clock, self.chances, self.ragged = clock, chances, ragged
        self.random = random.Random(seed)
        self.state = DecodeState(slots, 10**9)
        for row in range(slots):
            self.state.admit(row, Request([1, 2], 10**8, Sampling()))
        self.budgets: list[list[int]] = []
        self.tokens, self.elapsed = [0], [0.0]

    def play(self, policy: policies.Policy, steps: int) -> World:
        for _ in range(steps):
            sizes = torch.minimum(policy.budget(self.state), self.state.room).clamp(0, LIMIT)
            kept = [self._kept(row, size) for row, size in zip(self.state.rows, sizes.tolist(), strict=True)]
            self.state.reached = sizes.tolist()
            timing, exact = self.clock.timing(self.rows(sizes), int(sizes.max()))
            policy.observe(self.state, sizes, verdict(kept), timing)
            self.budgets.append(sizes.tolist())
            self.tokens.append(self.tokens[-1] + sum(kept) + len(kept))
            self.elapsed.append(self.elapsed[-1] + exact)
        return self

    def rows(self, sizes: torch.Tensor) -> int:
        return len(sizes) + int(sizes.sum()) if self.ragged else len(sizes) * (1 + int(sizes.max()))

    def rate(self, last: int) -> float:
        """Committed tokens per second of the last steps."""
        return (self.tokens[-1] - self.tokens[-1 - last]) / (self.elapsed[-1] - self.elapsed[-1 - last])

    def best_fixed(self) -> float:
        """Expected tokens per second of the best fixed budget, 0 included."""
        return max(self._expected(nodes) for nodes in range(LIMIT + 1))

    def _expected(self, nodes: int) -> float:
        live = len(self.state.rows)
        kept = sum(float(torch.tensor(self.chances(row)[:nodes]).cumprod(0).sum()) for row in self.state.rows)
        return (live + kept) / sum(self.clock.seconds(live * (1 + nodes), nodes))

    def _kept(self, row: int, size: int) -> int:
        chances = self.chances(row)
        return next((n for n in range(size) if self.random.random() >= chances[n]), size)


def verdict(kept: Sequence[int]) -> Verdict:
    path = torch.tensor([[n if n < count else -1 for n in range(max(kept))] for count in kept]).view(len(kept), max(kept))
    return Verdict(path, torch.tensor(kept), torch.zeros(len(kept), dtype=torch.int64), torch.zeros(len(kept)))


def alike(chance: float, fall: float = 1.0) -> Chances:
    return lambda row: [chance * fall**n for n in range(LIMIT)]


CLOCKS = {
    "free rows, cheap drafts": lambda noise=0.0: Clock(64, 0.01, 0.02, noise=noise),
    "dear drafts": lambda noise=0.0: Clock(64, 0.01, 0.25, noise=noise),
    "dear rows": lambda noise=0.0: Clock(4, 0.05, 0.02, noise=noise),
    "a parallel drafter": lambda noise=0.0: Clock(16, 0.02, 0.0, start=0.3, noise=noise),
}
