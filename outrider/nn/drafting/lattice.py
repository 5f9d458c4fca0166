"""A lattice: the likeliest candidates of every drafted row, scored in pairs with those of the previous row.

One pass gives the candidates of all rows at once; a score for every pair of neighbours says which of them fit together
(DFlash 2, Inco AI 2026; LiLiCorr, arXiv 2608.20530).  The draft is one path, chosen left to right, or a tree whose
branches are conditioned on their own parents.  It does not search for the best whole path: what counts is the length of
the accepted prefix.

Differs from the published methods: they walk one path, and their trees, if any, use the rows' own probabilities,
whatever was drafted before.

B slots, K rows of a block, k candidates of a row, N nodes, W nodes of a level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.nn.drafting.trees import Expand
from outrider.sampling.distribution import wide

Choose = Callable[[Tensor, int], Tensor]
"""(scores of one row's candidates [B, k], row) → the number of the chosen one, [B]."""


class Candidates(NamedTuple):
    """The likeliest tokens of rows, in descending order."""

    logits: Tensor
    """[..., k]."""
    ids: Tensor
    """[..., k] int64."""
    rest: Tensor
    """[...], logsumexp of the logits of all other tokens; -inf if there are none."""

    @classmethod
    def of(cls, logits: Tensor, k: int) -> Candidates:
        """logits [..., V]."""
        best = logits.topk(k, -1)
        whole, held = wide(logits).logsumexp(-1), wide(best.values).logsumexp(-1)
        # capped at 1: rounding may make the part larger than the whole
        share = (held - whole).exp().clamp(max=1.0)
        return cls(best.values, best.indices, whole + torch.log1p(-share))


class Lattice(NamedTuple):
    """Candidates of K rows, and how well each follows those of the previous row."""

    ids: Tensor
    """[B, K, k] int64."""
    first: Tensor
    """[B, k], scores of row 0's candidates, after the anchor."""
    pairs: Tensor
    """[B, K - 1, k, k], scores of row t + 1's candidates (last) after row t's (third)."""
    rest: Tensor
    """[B, K], the weight of all other tokens of a row, as in `Candidates`."""

    @property
    def depth(self) -> int:
        return self.ids.shape[1]

    def after(self, row: int, parents: Tensor) -> Tensor:
        """Scores [B, W, k] of a row's candidates after candidates [B, W] of the previous row; row 0 follows the
        anchor."""
        if not row:
            return self.first[:, None].expand(-1, parents.shape[1], -1)
        return self.pairs[:, row - 1].gather(1, parents[..., None].expand(-1, -1, self.ids.shape[2]))

    def tokens(self, row: int, chosen: Tensor) -> Tensor:
        """Ids of a row's candidates [B, W]."""
        return self.ids[:, row].gather(1, chosen)


def log_shares(scores: Tensor, rest: Tensor) -> Tensor:
    """log q [..., k] of candidates from their scores, if all other tokens together have weight exp(rest) [...]."""
    scores = wide(scores)
    return scores - torch.logaddexp(scores.logsumexp(-1), rest.to(scores))[..., None]


def walk(lattice: Lattice, choose: Choose) -> tuple[Tensor, Tensor]:
    """One path, left to right: the number [B, K] of each row's candidate, and the scores [B, K, k] it was chosen by.

    The q of a sampled token is the softmax of its row's scores, conditioned on the tokens before it, and 0 outside the
    candidates.
    """
    chosen, scores = [], []
    at = torch.zeros_like(lattice.ids[:, 0, :1])
    for row in range(lattice.depth):
        scores.append(lattice.after(row, at)[:, 0])
        at = choose(scores[-1], row)[:, None]
        chosen.append(at)
    return torch.cat(chosen, 1), torch.stack(scores, 1)


def likeliest(scores: Tensor, row: int) -> Tensor:
    """A `Choose` without noise; the first on a tie."""
    return scores.argmax(-1)


def confidence(scores: Tensor, rest: Tensor) -> Tensor:
    """[..., K] float32, the probability of each row's best candidate, from the scores of a walk [..., K, k].

    It depends only on the tokens before the row, so a draft may be ended based on it.
    """
    return log_shares(scores, rest).amax(-1).exp().float()


# ── trees ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def best_first(lattice: Lattice, nodes: int) -> tuple[Tensor, Tensor]:
    """The `nodes` likeliest paths as one tree, in descending order: tokens and parents, [B, N].

    A path's probability is the product of q along it, each given its parent.  A child is never likelier than its
    parent, and on a tie the shallower comes first, so every prefix is the best tree of its size.  Nothing is copied
    to the host.
    """
    k = lattice.ids.shape[2]
    at = torch.zeros_like(lattice.ids[:, 0, :1])
    above, node_numbers = torch.zeros_like(at, dtype=wide(lattice.first).dtype), torch.full_like(at, -1)
    levels, begin = [], 0
    for row in range(min(lattice.depth, nodes)):
        log_q = log_shares(lattice.after(row, at), lattice.rest[:, row, None])
        scores, order = _ranked((above[..., None] + log_q).flatten(1), nodes - row)
        parent, at = order // k, order % k
        levels.append((scores, lattice.tokens(row, at), node_numbers.gather(1, parent)))
        node_numbers = torch.arange(begin, begin + order.shape[1], device=order.device).expand_as(order)
        above, begin = scores, begin + order.shape[1]
    scores, tokens, parents = (torch.cat(level, 1) for level in zip(*levels, strict=True))
    _, order = _ranked(scores, nodes)
    # new index of each candidate; one that is dropped has no children that stay
    new_index = torch.zeros_like(tokens).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    parents = parents.gather(1, order)
    return tokens.gather(1, order), new_index.gather(1, parents.clamp(min=0)).where(parents >= 0, -1)


def number_of_nodes(nodes: int, depth: int, k: int) -> int:
    """How many nodes `best_first` returns for a lattice of `depth` rows."""
    total, width = 0, 1
    for row in range(min(depth, nodes)):
        width = min(nodes - row, width * k)
        total += width
    return min(nodes, total)


def _ranked(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The highest scores [B, <= most] and their indices; ties keep their order."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :most], order[:, :most]


def expand(lattice: Lattice, spread: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Expand]:
    """The inputs of `trees.drawn`: logits [B, V] after the anchor, and the `Expand` for nodes of a tree.

    spread: scores [B, W, k] and ids [B, W, k] → logits [B, W, V], -inf elsewhere.
    """

    def logits(row: int, parents: Tensor) -> Tensor:
        scores = lattice.after(row, parents)
        return spread(scores, lattice.ids[:, row, None].expand_as(scores))

    def after(tree: Draft, new: int) -> Tensor:
        tokens = tree.tokens[:, -new:, None]
        # a token outside the candidates (only possible for a node with probability 0) gets the first one's scores
        return logits(tree.depth, (tokens == lattice.ids[:, tree.depth - 1, None]).long().argmax(-1))

    return logits(0, torch.zeros_like(lattice.ids[:, 0, :1]))[:, 0], after


def spread(scores: Tensor, ids: Tensor, size: int) -> Tensor:
    """Scores [..., k] of tokens `ids` [..., k] as logits [..., size], -inf elsewhere."""
    everywhere = scores.new_full((*scores.shape[:-1], size), -torch.inf)
    return everywhere.scatter(-1, ids, scores)
