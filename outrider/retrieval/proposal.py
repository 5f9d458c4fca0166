"""Proposals of text indexes, and one proposal merged from several.

Sources are weighted by the length of their match and the probability of what follows, as in SGLang's n-gram drafter.
What differs: how often a source with such a match and such a probability was right is counted while decoding; and one
best-first tree grows over all sources, so that a sure source can have every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    """A tree under a text's end, parents first, the most promising first: every prefix is a tree."""

    tokens: list[int]
    parents: list[int]
    """-1 is the text's end."""
    shares: list[float]
    """Estimated probability that the text continues down to each node: in [0, 1], never above the parent's; empty where
    nothing was counted."""

    @classmethod
    def chain(cls, tokens: list[int]) -> Proposal:
        return cls(tokens, list(range(-1, len(tokens) - 1)), [])

    def first(self, nodes: int) -> Proposal:
        """This proposal with its most promising nodes alone."""
        return (
            self
            if len(self.tokens) <= nodes
            else Proposal(self.tokens[:nodes], self.parents[:nodes], self.shares[:nodes])
        )


NOTHING = Proposal([], [], [])


class Found(NamedTuple):
    """One source's proposal for a text."""

    source: str
    length: int
    """Tokens that match."""
    proposal: Proposal

    @property
    def kind(self) -> tuple[str, int, int]:
        """On what trust in it depends: the source, its match length and its probability, each in a few bins."""
        return self.source, (self.length**2).bit_length(), int(4 * self.proposal.shares[0])


class Trust:
    """How often a source's likeliest continuation was right, relative to its shares; by `Found.kind`."""

    FADE = 0.995

    def __init__(self) -> None:
        self.counts: dict[tuple[object, ...], tuple[float, float]] = {}
        """Number of times it was right, and the sum of its shares; both fade with every test."""

    def learn(self, found: Sequence[Found], token: int) -> None:
        """Learn that this token followed what these sources proposed."""
        for one in found:
            for kind in (one.kind, one.kind[:2]):
                right, promised = self.counts.get(kind, (0.0, 0.0))
                was_right = one.proposal.tokens[0] == token
                self.counts[kind] = self.FADE * right + was_right, self.FADE * promised + one.proposal.shares[0]

    def of(self, one: Found) -> float:
        """Near 1 where the shares are right.  A new kind starts from the source's others of its length, a new length
        from its square."""
        trust = one.length**2 / (one.length**2 + 8)
        for kind in (one.kind[:2], one.kind):
            right, promised = self.counts.get(kind, (0.0, 0.0))
            trust = (right + trust) / (promised + 1)
        return trust


def merged(found: Sequence[Found], nodes: int, trust: Trust | None = None) -> Proposal:
    """One tree of at most `nodes` nodes from several sources, best first; shares are averaged by trust to the fourth
    power.

    So the most trusted source nearly decides alone.  On texts of the demo the first power gives 2.31 tokens per step,
    the fourth 2.46, the tenth 2.42.
    """
    found = [one for one in found if one.proposal.tokens]
    if len(found) < 2:
        return found[0].proposal.first(nodes) if found else NOTHING
    weights = [(trust or Trust()).of(one) ** 4 for one in found]
    shares: dict[tuple[int, ...], float] = {}
    for weight, one in zip(weights, found, strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(*one.proposal, strict=True):
            path = (*(paths[parent] if parent >= 0 else ()), token)
            paths.append(path)
            shares[path] = shares.get(path, 0.0) + share * weight / sum(weights)
    # of equals the shallower first, so that parents come before their children
    chosen = sorted(shares.items(), key=lambda node: (-node[1], len(node[0])))[:nodes]
    at = {path: n for n, (path, _) in enumerate(chosen)}
    return Proposal([path[-1] for path in at], [at.get(path[:-1], -1) for path in at], [share for _, share in chosen])
