"""Confidences for drafters that have none, learnt while decoding: an online logistic regression.

A node's chance is estimated from what is known before its token is drawn: its depth, how often nodes of that depth were kept
lately, the chance that the path above it is kept, how many elder siblings it has, the drafter's own confidence where there is
one, and largest value and entropy of the distribution it is drawn from, which hangs on the tokens above it alone.  So policies
that stop by confidence keep the law.  Of its own token and of later nodes nothing is read.

B live slots, N drafted nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Drafter, Scores
from outrider.decoding.state import DecodeState

Features = list[float]
"""1, logit of its depth's share, log of the path above, elder siblings, raw logit, logit of q's largest, q's entropy."""
COUNT = 7


@dataclass
class Memory:
    """The drafter's own memory, what was learnt in all slots, and what was offered in the step that is open."""

    inner: Any
    estimate: Estimate
    own: Draft | None = None
    features: list[list[Features]] = field(default_factory=list)
    """By slot and node of `own`."""


class OnlineConfidence:
    """`drafter` with a confidence for every node; in all else the drafter itself.

    A confidence is the chance that a node is kept, given that its parent was and its elder siblings were not.  It begins as
    the drafter's own, or else as the largest value of q, or else as what nodes of its depth were worth.
    """

    is_confident = True
    """It says confidences that policies may stop by; so does a drafter with a trained head."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.taps, self.limit = drafter, drafter.taps, drafter.limit

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["drafter"], name)
        return (lambda memory, *rest: found(memory.inner, *rest)) if name == "fork" else found

    def allocate(self, cache: Cache) -> Memory:
        return Memory(self.drafter.allocate(cache), Estimate())

    def admit(self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        self.drafter.admit(memory.inner, rows, state, scores)

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        draft = self.drafter.propose(memory.inner, state, budget).checked(len(state.rows))
        memory.own, (known, memory.features) = draft, memory.estimate.of(draft)
        return replace(draft, confidence=torch.tensor(known, dtype=torch.float32, device=draft.tokens.device))

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        if memory.own is not None:
            memory.estimate.learn(_judged(memory.own, draft, kept, memory.features))
        memory.own = None
        self.drafter.observe(memory.inner, state, draft, kept, scores)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        self.drafter.free(memory.inner, rows)


class Estimate:
    """How likely a node is kept, by its features: weights that follow every outcome (AdaGrad, Duchi, Hazan and Singer 2011)."""

    WINDOW = 256.0
    """Tests, or steps without one, after which what was learnt has faded to 1/e: what is no longer tried looks worth a try."""
    RATE = 0.1
    GUESS, DOUBT = 0.7, 4.0
    """What the first depth is taken for, and every other for the one above it: for so many tests."""

    def __init__(self) -> None:
        self.kind = (False, False)
        """Whether the drafts at hand have confidences of their own, and whether a q: each kind has weights of its own."""
        self.begin, self.weights, self.squares = _fresh(self.kind)
        self._others: dict[tuple[bool, bool], tuple[Features, Features, Features]] = {}
        self.hits: list[float] = []
        self.tests: list[float] = []
        """By depth, fading."""

    def shares(self, depths: int) -> list[float]:
        """How often nodes of each depth were kept of late."""
        guess, found = self.GUESS, []
        for depth in range(depths):
            hits, tests = (self.hits[depth], self.tests[depth]) if depth < len(self.tests) else (0.0, 0.0)
            guess = (hits + self.DOUBT * guess) / (tests + self.DOUBT)
            found.append(guess)
        return found

    def of(self, draft: Draft) -> tuple[list[list[float]], list[list[Features]]]:
        """Confidences [B, N] of a draft's nodes, 1 behind the live ones, and the features of those that live."""
        raw = None if draft.confidence is None else draft.confidence.tolist()
        sharp = None if draft.q is None else [column.tolist() for column in _sharpness(draft.q)]
        self._turn_to((raw is not None, sharp is not None))
        shares = [_logit(share) for share in self.shares(max(draft.reach(), default=0))]
        confidences, features = [], []
        for b, parents in enumerate(draft.tree):
            depths: list[int] = []
            paths: list[float] = []
            children: dict[int, int] = {}
            own: list[Features] = []
            chances: list[float] = []
            for n, parent in enumerate(parents[: draft.live[b]]):
                depth, path = (depths[parent] + 1, paths[parent]) if parent >= 0 else (0, 0.0)
                elders = children.get(parent, 0)
                children[parent] = elders + 1
                node = [1.0, shares[depth], max(path, -8.0), math.log1p(elders), 0.0, 0.0, 0.0]
                if raw is not None:
                    node[4] = _logit(raw[b][n])
                if sharp is not None:
                    node[5:] = _logit(sharp[0][b][n]), sharp[1][b][n]
                chance = self.chance(node)
                depths.append(depth)
                paths.append(path + math.log(chance))
                own.append(node)
                chances.append(chance)
            confidences.append(chances + [1.0] * (len(parents) - len(chances)))
            features.append(own)
        return confidences, features

    def _turn_to(self, kind: tuple[bool, bool]) -> None:
        if kind != self.kind:
            self._others[self.kind] = self.begin, self.weights, self.squares
            self.begin, self.weights, self.squares = self._others.get(kind) or _fresh(kind)
            self.kind = kind

    def chance(self, node: Features) -> float:
        """Strictly between 0 and 1."""
        score = sum([weight * value for weight, value in zip(self.weights, node, strict=True)])
        return 1 / (1 + math.exp(-max(-16.0, min(16.0, score))))

    def learn(self, judged: Sequence[tuple[int, Features, bool]]) -> None:
        """Depth and features of the nodes whose turn came, and whether each was kept."""
        self._count([(depth, was_kept) for depth, _, was_kept in judged])
        for _, node, was_kept in judged:
            miss = was_kept - self.chance(node)
            for i, value in enumerate(node):
                slope = miss * value
                if slope:
                    self.squares[i] += slope * slope
                    self.weights[i] += self.RATE * slope / math.sqrt(self.squares[i])
        fade = 1 - 1 / self.WINDOW
        if not judged:
            self.weights = [begin + fade * (own - begin) for own, begin in zip(self.weights, self.begin, strict=True)]
        # squares fade too, or the weights would stop following texts that change
        self.squares = [max(1.0, fade * square) for square in self.squares]

    def _count(self, judged: Sequence[tuple[int, bool]]) -> None:
        more = 1 + max((depth for depth, _ in judged), default=-1) - len(self.tests)
        self.hits += [0.0] * more
        self.tests += [0.0] * more
        tests = [0] * len(self.tests)
        for depth, was_kept in judged:
            tests[depth] += 1
            self.hits[depth] += was_kept
        for depth, count in enumerate(tests):
            fade = (1 - 1 / self.WINDOW) ** max(1, count)
            self.hits[depth], self.tests[depth] = fade * self.hits[depth], fade * (self.tests[depth] + count)


def _fresh(kind: tuple[bool, bool]) -> tuple[Features, Features, Features]:
    """What weights begin with, the weights, and the squares of their slopes so far."""
    has_raw, is_drawn = kind
    begin = [0.0, float(not has_raw and not is_drawn), 0.0, 0.0, float(has_raw), float(not has_raw and is_drawn), 0.0]
    return begin, list(begin), [1.0] * COUNT


def _judged(own: Draft, draft: Draft, kept: Kept, features: Sequence[Sequence[Features]]) -> list[tuple[int, Features, bool]]:
    """Depth and features of every node whose turn came, and whether it was kept.

    A turn comes under a parent that was kept, after elder siblings that were not.  Where a text ended, nothing below was asked.
    """
    found = []
    for b, path in enumerate(kept.paths):
        places = _places(own, draft, b)
        parents = draft.tree[b]
        stands = [-1, *path]
        depth_of = {parent: depth for depth, parent in enumerate(stands)}
        following = dict(zip(stands, path, strict=False))
        for n in range(draft.live[b]):
            parent = parents[n]
            if n not in places or parent not in depth_of:
                continue
            if parent in following and n > following[parent]:
                continue
            if parent not in following and kept.next_tokens[b] < 0:
                continue
            found.append((depth_of[parent], features[b][places[n]], following.get(parent) == n))
    return found


def _places(own: Draft, draft: Draft, b: int) -> dict[int, int]:
    """Which node of the offered draft each verified one is: by tokens, since what was pruned may have moved them."""
    size = draft.live[b]
    if own.ids[b][:size] == draft.ids[b][:size] and own.tree[b][:size] == draft.tree[b][:size]:
        return {n: n for n in range(size)}
    offered: dict[tuple[int, int], list[int]] = {}
    for n in reversed(range(own.live[b])):
        offered.setdefault((own.tree[b][n], own.ids[b][n]), []).append(n)
    places: dict[int, int] = {-1: -1}
    for n in range(size):
        alike = offered.get((places.get(draft.tree[b][n], -2), draft.ids[b][n]))
        if alike:
            places[n] = alike.pop()
    del places[-1]
    return places


def _sharpness(q: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and entropy, in nats, of distributions [B, N, V]; what is none counts as certain.  Returns [B, N] twice."""
    q = q.float().nan_to_num(1.0).clamp(0.0, 1.0)
    return q.amax(-1), torch.special.entr(q).sum(-1).clamp(max=16.0)


def _logit(chance: float) -> float:
    """Of a chance, within reach: what is NaN is even."""
    chance = min(max(chance, 1e-4), 1 - 1e-4) if chance == chance else 0.5
    return math.log(chance / (1 - chance))
