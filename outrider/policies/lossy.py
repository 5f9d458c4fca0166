"""Rules that change the output on purpose: they accept drafted tokens that are likely enough, not those of the
acceptance rule.

Never used by default: `named.judge` returns one only with allow_lossy, and the judge measures its distance from the
target's distribution for the report.  Here are what every such rule is to its judge, and those that look at p alone;
`relay`, `scorer` and `counterfactual` have files of their own.  Typical acceptance: Medusa (arXiv 2401.10774); relaxed
top-k: a drafted token is accepted if it is among the target's k likeliest.  In a tree the longest path that passes is
accepted, of two as long the likelier.  Unlike Medusa's code, the token after it is drawn from p, not the likeliest, and
the first drafted token is tested like the others.

At temperature 0 p is one-hot, so neither of these two accepts a token that the acceptance rule would reject.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.errors import ConfigError
from outrider.policies.take_over import node_distances, own_rows
from outrider.sampling.fast import Chain, outside
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.prefix import processed


class Verified(NamedTuple):
    """What a rule knows of a step besides its draft and p."""

    rows: Sequence[int]
    """Slots of the B live texts."""
    texts: Sequence[list[int]]
    """Prompt and committed tokens of each; the last one is the anchor."""
    logits: Tensor
    """[B, N+1, V] after penalties, bans and processors; -inf where a token is impossible."""


class LossyRule:
    """What a lossy rule is to its judge: it accepts drafted tokens, and says how far from p that is.

    A rule overrides `__call__` and `distances`; one that remembers its texts overrides the other hooks too, in the
    order in which they are called.
    """

    name: str
    """With its numbers, for reports; `named.judge` makes the same rule of it where its settings are texts and
    numbers."""

    def allocate(self, target: Any, cache: Any) -> None:
        """As `Judge.allocate`, for a rule with passes of its own."""

    def admit(self, row: int, request: Request) -> None:
        """A new text in this slot.  Raises ConfigError for one that the rule can't judge."""

    def free(self, row: int) -> None: ...

    def begin(self, verified: Verified) -> None:
        """The step that is judged next."""

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        """What is accepted by p [B, N+1, V].  The next token may be a drafted one, so that the target adds none."""
        raise NotImplementedError

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        """[B, D] float64, at least as wide as the longest path and its next token: total variation from p of each
        emitted token of this step, in order; exact, or more on average."""
        raise NotImplementedError

    def observe(self, accepted: Accepted, texts: Sequence[list[int]]) -> None:
        """What was committed of it, and all tokens of each live text."""

    def figures(self) -> dict[str, float]:
        """What it bought, and what it cost besides the distance."""
        return {}


@dataclass(frozen=True)
class Lossy(LossyRule):
    """A rule of p alone: accept the longest path of tokens that pass, then draw from p.  q is not used."""

    name: str
    passes: Callable[[Tensor], Tensor]
    """p [..., V] to the tokens that may be accepted, [..., V] bool."""

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        """p [B, N+1, V].  Ids outside the vocabulary never pass and are counted as invalid; q is not used."""
        known, index = own_rows(draft, p.shape[-1])
        paths = _longest(draft, known & self.passes(p)[index], p[index])
        slots, rows, counts = torch.tensor(
            [(b, path[-1] + 1 if path else 0, len(path)) for b, path in enumerate(paths)], device=p.device
        ).T
        following = streams.draw(p[slots, rows], counts, Purpose.TARGET)
        return Accepted(paths, following.tolist(), outside(draft, p.shape[-1]))

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        return tv_distance(self, draft, p, accepted)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Lossy:
    """Accept a token x where p(x) > min(epsilon, delta exp(-H(p))), H in nats: a lower threshold where p is spread
    out."""
    if not (0 < epsilon <= 1 and delta > 0 and math.isfinite(delta)):
        raise ConfigError(
            f"typical: epsilon must be above 0 and at most 1, and delta above 0, got {epsilon} and {delta}"
        )

    def passes(p: Tensor) -> Tensor:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        return p > (delta * (-entropy).exp()).clamp(max=epsilon)

    return Lossy(f"typical(epsilon={epsilon:g}, delta={delta:g})", passes)


def relaxed(k: int = 2) -> Lossy:
    """Accept a token that is among the target's k likeliest or equals the k-th, never one of probability 0."""
    if k < 1:
        raise ConfigError(f"relaxed: k must be at least 1, got {k}")

    def passes(p: Tensor) -> Tensor:
        return (p >= p.topk(min(k, p.shape[-1]), -1).values[..., -1:]) & (p > 0)

    return Lossy(f"relaxed(k={k})", passes)


RULES: Mapping[str, Callable[..., Lossy]] = {"relaxed": relaxed, "typical": typical}
"""By name, the function that makes each rule of p alone from its numbers."""


class LossyJudge(SamplingJudge):
    """Judges by a lossy rule, and measures its distance from the target's distribution."""

    rule: LossyRule

    def __init__(self, rule: LossyRule):
        super().__init__(rule)
        self.tokens = 0
        """Tokens emitted, over all slots and steps."""
        self.passes = 0
        """Verified steps, counted for each slot: passes of the target that these tokens took."""
        self.total = 0.0
        """Sum of their distances: an upper bound of the total variation between a text's distribution and the
        target's."""
        self.tv_distance: dict[int, float] = {}
        """By slot: sum of the distances of the last step's tokens."""
        self._last = torch.empty(0, 0)

    def allocate(self, target: Any, cache: Any) -> None:
        self.rule.allocate(target, cache)

    def admit(self, row: int, request: Request, ends: frozenset[int], device: torch.device) -> None:
        super().admit(row, request, ends, device)
        self.rule.admit(row, request)

    def free(self, row: int) -> None:
        super().free(row)
        self.rule.free(row)

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        logits = self._logits = processed(scores.logits, draft, self.prefixes)
        p = self.distribution(logits)
        self.rule.begin(Verified(state.rows, [state.tokens[row] for row in state.rows], logits))
        accepted = self.rule(draft, p, state.streams)
        self._last = self.rule.distances(draft, p, accepted)
        return accepted

    def observe(self, accepted: Accepted, texts: list[list[int]], scores: Scores) -> Mapping[int, Exception]:
        errors = super().observe(accepted, texts, scores)
        self.rule.observe(accepted, texts)
        self.passes += len(texts)
        for b, (row, _) in enumerate(self._requests):
            count = accepted.counts[b] + (accepted.next_tokens[b] >= 0)
            self.tv_distance[row] = float(self._last[b, :count].sum())
            self.total += self.tv_distance[row]
            self.tokens += count
        return errors

    @property
    def distance(self) -> float:
        """Mean total variation per emitted token, in [0, 1]; 0 before the first."""
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def figures(self) -> dict[str, float]:
        """What the rule cost and what it bought: the distance, tokens per step, passes saved against one pass a token,
        and what the rule itself counts."""
        bought = {"tokens_per_step": self.tokens / max(1, self.passes), "passes_saved": self.tokens - self.passes}
        return {"distance": self.distance, **bought, **self.rule.figures()}


def tv_distance(rule: Lossy, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
    """Total variation between what the rule emits and p, at every position of this step.  [B, D] float64, 0 elsewhere.

    At each position: between the distribution of the token emitted there, given all text before it, and p.  A chain
    drawn from q has a closed form: it emits e = q where that passes, and p with the rest of the mass: sum |e - p| / 2.
    For a deterministic draft e is one-hot at an accepted token: 1 - p(x).  Both are exact.  For a tree of sampled nodes
    the accepted tokens are taken as given, which on average overestimates, never underestimates.  A token drawn from p
    after the draft adds 0.

    Averaged over texts that the rule wrote, the sum over a text bounds the total variation between the rule's
    distribution of the whole text and the target's; divided by tokens it is the distance per emitted token.
    """
    if draft.q is None or draft.branches or draft.q.shape[-1] != p.shape[-1]:
        return _taken_as_given(draft, p, accepted)
    chain, exact = Chain.of(draft, p), p[:, :-1]
    drafted = chain.q * rule.passes(exact)
    emitted = drafted + (1 - drafted.sum(-1, keepdim=True)) * exact
    place = torch.arange(chain.live.shape[1], device=p.device)
    was_reached = chain.live & (place <= torch.tensor(accepted.counts, device=p.device)[:, None])
    return (emitted - exact).abs().sum(-1).double() / 2 * was_reached


def _taken_as_given(draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
    """Distance of the accepted tokens from p as if nothing else could have been drafted: 1 - p(x).  [B, D]."""
    strays = node_distances(draft, p, is_by_q=False)
    path = padded(accepted.paths, -1, p.device)
    return strays.gather(1, path.clamp(min=0)) * (path >= 0)


def _longest(draft: Draft, may_stay: Tensor, p_own: Tensor) -> list[list[int]]:
    """Each slot's longest path of nodes that may stay; of two as long the likelier, then the elder.  may_stay, p_own
    [B, N]."""
    paths = []
    slots = zip(draft.tree, draft.live, may_stay.tolist(), p_own.double().log().tolist(), strict=True)
    for parents, size, stays, logs in slots:
        found: dict[int, tuple[int, float, list[int]]] = {-1: (0, 0.0, [])}
        for n in range(size):
            if stays[n] and parents[n] in found:
                depth, likelihood, path = found[parents[n]]
                found[n] = depth + 1, likelihood + logs[n], [*path, n]
        paths.append(max(found.values(), key=lambda each: each[:2])[2])
    return paths
