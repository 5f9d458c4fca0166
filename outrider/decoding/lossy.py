"""Rules that change the output on purpose: they keep drafted tokens that are likely enough, not those that the law keeps.

Never reached by default: `find` hands one out only to who says allow_lossy, and a `Meter` measures how far it strayed, so
that a report can say it.  Typical acceptance: Medusa (arXiv 2401.10774); relaxed top-k: a drafted token stays if it is among
the target's k likeliest.  Of a tree the longest path that passes is kept, the likelier of two as long.  Unlike in Medusa's
code the token behind it is drawn from p, not the likeliest, and the first drafted token is tested as the others are.

At temperature 0 p is one-hot, so that neither rule can keep a token that the law would not.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.decoding.accept import Verdict, _is_distribution, accept
from outrider.decoding.draft import Draft
from outrider.decoding.sampling import Purpose, Streams
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lossy:
    """A rule for the loop: keep the longest path of tokens that pass, then draw from p.  q is not read."""

    name: str
    """With its numbers, for reports."""
    passes: Callable[[Tensor], Tensor]
    """p [..., V] to which tokens may stay, [..., V] bool."""

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Verdict:
        """p [B, N+1, V].  Ids outside the vocabulary never pass, and are counted as unlawful; a q is not looked at."""
        known = (draft.tokens >= 0) & (draft.tokens < p.shape[-1])
        slots, rows, tokens = _places(draft, known)
        may_stay = known & self.passes(p)[slots, rows, tokens]
        paths = _longest(draft, may_stay, p[slots, rows, tokens])
        accepted = [len(path) for path in paths]
        deepest = max(accepted, default=0)
        padded = [path + [-1] * (deepest - len(path)) for path in paths]
        path = torch.tensor(padded, dtype=torch.int64, device=p.device).view(len(paths), deepest)
        last = torch.tensor([[-1, *path][-1] for path in paths], dtype=torch.int64, device=p.device)
        kept = torch.tensor(accepted, dtype=torch.int64, device=p.device)
        following = streams.draw(p[slots[:, 0], last + 1], kept, Purpose.TARGET)
        return Verdict(path, kept, following, (~known & _live(draft)).sum(-1))


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Lossy:
    """Keep a token x where p(x) > min(epsilon, delta exp(-H(p))), H in nats: what is likely, and more where little is sure."""
    if not (0 < epsilon <= 1 and delta > 0 and math.isfinite(delta)):
        raise ConfigError(f"typical: epsilon {epsilon} must lie in (0, 1] and delta {delta} above 0")

    def passes(p: Tensor) -> Tensor:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        least: Tensor = (delta * (-entropy).exp()).clamp(max=epsilon)
        return p > least

    return Lossy(f"typical(epsilon={epsilon:g}, delta={delta:g})", passes)


def relaxed(k: int = 2) -> Lossy:
    """Keep a token that is among the target's k likeliest; equals of the k-th too, never one of probability 0."""
    if k < 1:
        raise ConfigError(f"relaxed: k {k} keeps nothing; give 1 or more")

    def passes(p: Tensor) -> Tensor:
        return (p >= p.topk(min(k, p.shape[-1]), -1).values[..., -1:]) & (p > 0)

    return Lossy(f"relaxed(k={k})", passes)


RULES: Mapping[str, Callable[..., Lossy]] = MappingProxyType({"relaxed": relaxed, "typical": typical})
"""By name, what makes each rule from its numbers."""


def find(name: str, allow_lossy: bool = False) -> Callable[..., Lossy]:
    """What makes the lossy rule of this name.  Raises ConfigError for an unknown name, and unless allow_lossy is True."""
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, 1, 0.4)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"unknown lossy rule '{name}'; there are {', '.join(sorted(RULES))}{hint}")
    if allow_lossy is not True:
        raise ConfigError(
            f"rule '{name}' changes what the target would write, and allow_lossy is {allow_lossy!r}; "
            "set allow_lossy: true to have it, or leave the rule out for exact output"
        )
    return RULES[name]


def choose(name: str | None, allow_lossy: bool = False) -> Meter | Callable[[Draft, Tensor, Streams], Verdict]:
    """The law itself where no rule is named; else the lossy rule of this name, with its own numbers, under a meter."""
    if name is not None:
        return Meter(find(name, allow_lossy)())
    if allow_lossy:
        logging.getLogger(__name__).warning("allow_lossy has no effect without a rule: the output is exact")
    return accept


# ── how far from the law ──────────────────────────────────────────────────────────────────────────────────────────────


class Meter:
    """A lossy rule that keeps account of its distance from the law while it is used in the loop.

    Its sums count tokens that the loop cuts off behind an end like the others; `strayed` tells them apart.
    """

    def __init__(self, rule: Lossy):
        self.rule = rule
        self.tokens = 0
        """Tokens emitted, over all slots and steps."""
        self.total = 0.0
        """Sum of their distances; no text's law is further from the target's, in total variation, than this sum over it."""
        self.last = torch.empty(0, 0)
        """[B, D] the last step's distances, slot by slot and place by place."""

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Verdict:
        verdict = self.rule(draft, p, streams)
        self.last = distance(self.rule, draft, p, verdict)
        self.total += float(self.last.sum())
        self.tokens += int(verdict.accepted.sum()) + len(verdict.accepted)
        return verdict

    @property
    def distance(self) -> float:
        """Mean total variation per emitted token, in [0, 1]; 0 before the first."""
        return self.total / self.tokens if self.tokens else 0.0

    def strayed(self, b: int, tokens: int) -> float:
        """Sum of the distances of slot b's first `tokens` tokens of the last step."""
        return float(self.last[b, :tokens].sum())


def distance(rule: Lossy, draft: Draft, p: Tensor, verdict: Verdict) -> Tensor:
    """Total variation between what the rule emits and p, at every place this step filled.  [B, D] float64, 0 elsewhere.

    At each place: between the law of the token emitted there, given all text before it, and p.  In closed form for a chain
    drawn from q, which emits e = q where it passes, and p with what is left of 1: sum |e - p| / 2.  For a deterministic draft
    e is one-hot at a kept token: 1 - p(x).  Both are exact.  For a tree of sampled nodes the kept tokens are taken as given,
    which on average is too much, never too little.  A token drawn from p behind the draft adds 0.

    Averaged over texts that the rule wrote, the sum over a text bounds the total variation between the rule's law of the
    whole text and the target's; divided by tokens it is the distance per emitted token.
    """
    if draft.q is None or draft.branches or draft.q.shape[-1] != p.shape[-1]:
        return _taken_as_given(draft, p, verdict)
    known = (draft.tokens >= 0) & (draft.tokens < p.shape[-1])
    tokens = draft.tokens.where(known, 0)
    one_hot = torch.zeros_like(draft.q, dtype=p.dtype).scatter_(-1, tokens[..., None], known[..., None].to(p.dtype))
    lawful = known & _is_distribution(draft.q, tokens)
    law = p[:, :-1]
    drafted = torch.where(lawful[..., None], draft.q.to(p.dtype), one_hot) * rule.passes(law)
    emitted = drafted + (1 - drafted.sum(-1, keepdim=True)) * law
    place = torch.arange(tokens.shape[1], device=tokens.device)
    was_reached = _live(draft) & (place <= verdict.accepted.to(place.device)[:, None])
    return (emitted - law).abs().sum(-1).double() / 2 * was_reached


def _taken_as_given(draft: Draft, p: Tensor, verdict: Verdict) -> Tensor:
    """Distance of the kept tokens from p as if nothing else could have been drafted: 1 - p(x).  [B, D]."""
    known = (draft.tokens >= 0) & (draft.tokens < p.shape[-1])
    slots, rows, tokens = _places(draft, known)
    strays = 1 - p[slots, rows, tokens].double()
    path = verdict.path.to(p.device)
    return strays.gather(1, path.clamp(min=0)) * (path >= 0)


def _places(draft: Draft, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where every node's probability stands in p: slot [B, 1], its parent's row [B, N] and its token [B, N]."""
    slots = torch.arange(len(draft.tokens), device=draft.tokens.device)[:, None]
    return slots, (draft.parents + 1).clamp(0, draft.tokens.shape[1]), draft.tokens.where(known, 0)


def _live(draft: Draft) -> Tensor:
    """[B, N] whether a node is more than padding."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.sizes.to(draft.tokens.device)[:, None]


def _longest(draft: Draft, may_stay: Tensor, p_own: Tensor) -> list[list[int]]:
    """Each slot's longest path of nodes that may stay; of two as long the likelier, then the elder.  Both [B, N]."""
    rows = zip(draft.parents.tolist(), draft.sizes.tolist(), may_stay.tolist(), p_own.double().log().tolist(), strict=True)
    paths = []
    for parents, size, stays, logs in rows:
        found = {-1: (0, 0.0)}
        for n in range(size):
            if stays[n] and parents[n] in found:
                depth, likelihood = found[parents[n]]
                found[n] = (depth + 1, likelihood + logs[n])
        at = max(found, key=lambda n: found[n])
        path: list[int] = []
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        paths.append(path)
    return paths
