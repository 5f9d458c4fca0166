"""Proposals of text indexes, and how several are merged.

Sources are weighted by the length of their match and the probability of the continuation, as in SGLang's n-gram
drafter.  Differences: while decoding, it is counted how often a source was right at such a length and probability, and
one best-first tree grows over all sources, so that a confident source can take every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    """A tree under the end of a text: parents first, the most promising nodes first, so every prefix is a tree."""

    tokens: list[int]
    parents: list[int]
    """-1 is the end of the text."""
    shares: list[float]
    """Estimated probability that the text continues down to each node: in [0, 1], never above the parent's; empty if
    unknown."""

    @classmethod
    def chain(cls, tokens: list[int]) -> Proposal:
        return cls(tokens, list(range(-1, len(tokens) - 1)), [])

    def first(self, nodes: int) -> Proposal:
        """The first, most promising nodes of this proposal."""
        if len(self.tokens) <= nodes:
            return self
        return Proposal(self.tokens[:nodes], self.parents[:nodes], self.shares[:nodes])


NOTHING = Proposal([], [], [])


class SourceProposal(NamedTuple):
    """One source's proposal for a text."""

    source: str
    length: int
    """Length of its match in tokens."""
    proposal: Proposal

    @property
    def kind(self) -> tuple[str, int, int]:
        """The key of its trust: source, match length and probability, the latter two in a few bins."""
        return self.source, (self.length**2).bit_length(), int(4 * self.proposal.shares[0])


class Trust:
    """How often a source's most likely continuation was right, relative to its shares; by `SourceProposal.kind`."""

    FADE = 0.995

    def __init__(self) -> None:
        self.counts: dict[tuple[object, ...], tuple[float, float]] = {}
        """Number of times it was right, and the sum of its shares, with exponential decay."""

    def learn(self, proposals: Sequence[SourceProposal], token: int) -> None:
        """Learn that `token` came next when these were proposed."""
        for proposal in proposals:
            for kind in (proposal.kind, proposal.kind[:2]):
                right, promised = self.counts.get(kind, (0.0, 0.0))
                was_right = proposal.proposal.tokens[0] == token
                self.counts[kind] = self.FADE * right + was_right, self.FADE * promised + proposal.proposal.shares[0]

    def of(self, proposal: SourceProposal) -> float:
        """Near 1 if the shares are right.  A new kind starts with the trust of the same source and length, a new length
        with its square."""
        trust = proposal.length**2 / (proposal.length**2 + 8)
        for kind in (proposal.kind[:2], proposal.kind):
            right, promised = self.counts.get(kind, (0.0, 0.0))
            trust = (right + trust) / (promised + 1)
        return trust


def merge_proposals(proposals: Sequence[SourceProposal], nodes: int, trust: Trust | None = None) -> Proposal:
    """One tree of at most `nodes` nodes from several sources, best first.  Shares are averaged, weighted by trust to
    the fourth power.

    So the most trusted source almost decides alone.  On the demo's texts the first power gives 2.31 tokens per step,
    the fourth 2.46, the tenth 2.42.
    """
    proposals = [each for each in proposals if each.proposal.tokens]
    if len(proposals) < 2:
        return proposals[0].proposal.first(nodes) if proposals else NOTHING
    weights = [(trust or Trust()).of(each) ** 4 for each in proposals]
    shares: dict[tuple[int, ...], float] = {}
    for weight, each in zip(weights, proposals, strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(*each.proposal, strict=True):
            path = (*(paths[parent] if parent >= 0 else ()), token)
            paths.append(path)
            shares[path] = shares.get(path, 0.0) + share * weight / sum(weights)
    # on a tie the shallower comes first, so that parents precede their children
    chosen = sorted(shares.items(), key=lambda node: (-node[1], len(node[0])))[:nodes]
    at = {path: n for n, (path, _) in enumerate(chosen)}
    return Proposal([path[-1] for path in at], [at.get(path[:-1], -1) for path in at], [share for _, share in chosen])
