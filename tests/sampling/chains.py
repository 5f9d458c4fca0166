"""Chains drawn from q, random and hostile, for tests of the rules that judge them as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from contracts.chances import Chance, Coin
from contracts.test_acceptance_rule_enumerated import random_distribution
from decoding.drafts import V
from hypothesis import strategies as st
from torch import Tensor

from outrider.decoding.accept import Rule
from outrider.decoding.draft import Draft


def chain(nodes: int) -> list[int]:
    """Its parents."""
    return list(range(-1, nodes - 1))


def proposal_of(seed: int) -> Callable[[list[int]], Tensor]:
    """Tokens drawn so far to q of the next node."""
    distribution = random_distribution(seed + 77)
    return lambda tokens: distribution(tuple(tokens))


def as_chain(rule: Rule) -> Rule:
    """The checks build their drafts as trees; a rule for chains wants to be told that this is none."""
    return lambda draft, p, streams: rule(replace(draft, branches=False), p, streams)


class Coins:
    """A row of scripted coins [1, N], as `Coin` is one; in place of `fast.coins`."""

    def __init__(self, chance: Chance, scale: Sequence[float]):
        self.chance, self.scale = chance, scale

    @classmethod
    def of(cls, chance: Chance, nodes: int) -> Coins:
        return cls(chance, [1.0] * nodes)

    def __mul__(self, by: Tensor) -> Coins:
        return Coins(self.chance, [scale * float(own) for scale, own in zip(self.scale, by[0], strict=True)])

    def __lt__(self, threshold: Tensor) -> Tensor:
        return torch.tensor(
            [[bool(Coin(self.chance, scale) < own) for scale, own in zip(self.scale, threshold[0], strict=True)]]
        )


@st.composite
def chains(draw, hostile: bool = True):
    """A sampled chain: some ids outside, some rows of q no distribution, some zeros in p and q."""
    slots, nodes, seed = draw(st.integers(1, 4)), draw(st.integers(0, 6)), draw(st.integers(0, 2**20))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(slots, nodes + extra, V, generator=generator, dtype=dtype).mul(1.5) for extra in (1, 0))
    p[torch.rand(p.shape, generator=generator) < 0.2] = -1e9
    p, q = p.softmax(-1), q.softmax(-1)
    tokens = torch.randint(V, (slots, nodes), generator=generator)
    if hostile:
        hit = torch.rand(slots, nodes, 1, generator=generator)
        own = torch.nn.functional.one_hot(tokens, V).bool()
        q = torch.where(
            hit < 0.1, torch.nan, torch.where(hit < 0.2, q.masked_fill(own, 0.0), torch.where(hit < 0.3, 2 * q, q))
        )
        odd = torch.rand(slots, nodes, generator=generator)
        tokens = torch.where(odd < 0.1, -1, torch.where(odd < 0.2, 2**40, tokens))
    sizes = torch.tensor([draw(st.integers(0, nodes)) for _ in range(slots)])
    return Draft.chain(tokens, sizes, q), p, seed
