"""A search for sublayers to skip while decoding: two sets draft in turn, and the better one stays.  (SWIFT, arXiv
2410.06916.)

Differs from the paper: a set is judged by the acceptance of its drafts, not by a pass over the text's last tokens,
which would overwrite the target's keys; the cost of a pass is the weights that it reads, not a time, so that equal
texts give equal sets; new sets are variations of the best one or random, without a Gaussian process.  A set contains no
text, so the requests of all tenants share one search.  `training.fitting` searches before decoding, with times.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from outrider.targets.protocol import Skip, TargetSpec


@dataclass(slots=True)
class Tally:
    """A set's results in the current race."""

    steps: int = 0
    tokens: float = 0.0
    cost: float = 0.0
    """Cost of its passes, in passes of the whole target."""

    @property
    def rate(self) -> float:
        """Tokens per cost of one plain step."""
        return self.tokens / self.cost if self.cost else 0.0


class Search:
    """Races between the best set so far and one new set after another."""

    STEPS = 12
    """Drafted steps of either set in a race."""
    HOPELESS = 0.75
    """A new set with less than this share of the other's rate after a third of the steps has lost."""
    MARGIN = 1.02
    """The new set must be better by this factor; of equals the old one stays."""

    def __init__(
        self, spec: TargetSpec, start: Skip, possible: Skip, tries: int, runs: Callable[[Skip], bool], seed: int = 0
    ):
        """tries: new sets.  runs: whether the target runs without a set's sublayers."""
        self.best, self.left, self.runs = start, tries, runs
        self.candidate: Skip | None = None
        """The new set in the current race; None between races."""
        self.space = [(which, layer) for which in ("attention", "mlp") for layer in sorted(getattr(possible, which))]
        self.weights, self.whole = _weights(spec)
        self.tallies, self.tried, self.noise = (Tally(), Tally()), {start}, random.Random(seed)

    def next(self) -> Skip:
        """The set for the next step."""
        if self.candidate is None and self.left:
            self._begin()
        old, new = self.tallies
        return self.best if self.candidate is None or old.steps < new.steps else self.candidate

    def learn(self, skip: Skip, tokens: float, passes: int) -> None:
        """Record a step of this set: tokens committed per slot, and its drafting passes."""
        if self.candidate is None or skip not in (self.best, self.candidate):
            return  # a step of an earlier race
        old, new = self.tallies
        tally = old if skip == self.best else new
        tally.steps, tally.tokens, tally.cost = (
            tally.steps + 1,
            tally.tokens + tokens,
            tally.cost + 1 + passes * self.cost(skip),
        )
        is_hopeless = min(old.steps, new.steps) >= self.STEPS // 3 and new.rate < self.HOPELESS * old.rate
        if is_hopeless or min(old.steps, new.steps) >= self.STEPS:
            self._end()

    def cost(self, skip: Skip) -> float:
        """Cost of a drafting pass, in passes of the whole target."""
        return 1 - sum(self.weights[which] * len(getattr(skip, which)) for which in self.weights) / self.whole

    def _begin(self) -> None:
        self.tallies = Tally(), Tally()
        for _ in range(64):
            candidate = self._varied()
            if candidate in self.tried or candidate == Skip():
                continue
            self.tried.add(candidate)
            self.left -= 1
            if self.runs(candidate):
                self.candidate = candidate
                return
            if not self.left:
                return
        self.left = 0  # hardly any new sets are left

    def _end(self) -> None:
        assert self.candidate is not None
        old, new = self.tallies
        if new.rate > self.MARGIN * old.rate:
            self.best = self.candidate
        self.candidate = None
        if not self.left:
            logging.getLogger(__name__).info(
                "layer_skip now uses skip_attention %s and skip_mlp %s, the best of %d sets",
                sorted(self.best.attention), sorted(self.best.mlp), len(self.tried),
            )  # fmt: skip

    def _varied(self) -> Skip:
        """The best set with one to three sublayers changed, or in one case of four a random set."""
        chosen = {(which, layer) for which, layer in self.space if layer in getattr(self.best, which)}
        if self.noise.random() < 0.25:
            share = self.noise.uniform(0.2, 0.6)
            chosen = {place for place in self.space if self.noise.random() < share}
        else:
            chosen ^= set(self.noise.sample(self.space, min(len(self.space), self.noise.randint(1, 3))))
        return Skip(*(frozenset(layer for kind, layer in chosen if kind == which) for which in ("attention", "mlp")))


def _weights(spec: TargetSpec) -> tuple[dict[str, float], float]:
    """Weights of an attention and of an MLP, and of all layers and the head; equal if the sizes are unknown."""
    if spec.sizes is None:
        return {"attention": 1.0, "mlp": 1.0}, 2.0 * spec.layers
    sizes = spec.sizes
    attention = 2.0 * spec.hidden * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    mlp = 3.0 * spec.hidden * sizes.intermediate
    return {"attention": attention, "mlp": mlp}, spec.layers * (attention + mlp) + spec.hidden * spec.vocabulary
