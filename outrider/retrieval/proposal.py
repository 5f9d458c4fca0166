"""What a memory of text proposes, and one proposal from several of them.

Sources are ranked by how specific their match is and how sure of what follows: the merge of SGLang's n-gram drafter, without
its weights to set.  What differs: one best-first tree over all sources, so that a sure one takes every node.
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
    """How likely the text goes on down to each node, by what was counted: in [0, 1], never above the parent's; empty where
    nothing was counted."""

    @classmethod
    def chain(cls, tokens: list[int]) -> Proposal:
        return cls(tokens, list(range(-1, len(tokens) - 1)), [])

    def first(self, nodes: int) -> Proposal:
        """The most promising of its nodes."""
        return self if len(self.tokens) <= nodes else Proposal(self.tokens[:nodes], self.parents[:nodes], self.shares[:nodes])


NOTHING = Proposal([], [], [])


def merged(found: Sequence[tuple[int, Proposal]], nodes: int) -> Proposal:
    """One tree of at most `nodes` nodes from several sources' match lengths and proposals, the best first.

    A source counts by the square of its match's length and by the share of its likeliest continuation, relative to the best
    source; a node counts by its share times that, the most that any source gives it.  So a source that matches half as much
    comes in only where the better one has nothing likely left.  The shares of the result are these counts.
    """
    found = [(length, proposal) for length, proposal in found if proposal.tokens]
    if len(found) < 2:
        return found[0][1].first(nodes) if found else NOTHING
    trust = [length**2 * max(proposal.shares) for length, proposal in found]
    best: dict[tuple[int, ...], float] = {}
    for weight, (_, proposal) in zip(trust, found, strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(*proposal, strict=True):
            path = (*(paths[parent] if parent >= 0 else ()), token)
            paths.append(path)
            best[path] = max(best.get(path, 0.0), share * weight / max(trust))
    # an elder node of equal count keeps its place, so parents stand before their children
    chosen = sorted(best.items(), key=lambda node: (-node[1], len(node[0])))[:nodes]
    at = {path: n for n, (path, _) in enumerate(chosen)}
    return Proposal([path[-1] for path in at], [at.get(path[:-1], -1) for path in at], [score for _, score in chosen])
