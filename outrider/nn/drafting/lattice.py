"""A lattice: the likeliest candidates of every drafted row, scored in pairs with those of the row before.

One pass gives the candidates of all rows at once; a score for every pair of neighbours says which of them fit together
(DFlash 2, Inco AI 2026; LiLiCorr, arXiv 2608.20530).  Drafted from it is one path, left to right, or a tree whose
branches are each conditional on their own parents.  The best whole path is not looked for: what counts is how long a
beginning is accepted.

Differs from the published methods: they walk one path, and their trees, where there are any, are of the rows' own
probabilities, whatever was drafted before.

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
"""(scores of one row's candidates [B, k], row) to the number of the chosen one, [B]."""


class Candidates(NamedTuple):
    """The likeliest tokens of rows, in descending order."""

    logits: Tensor
    """[..., k]."""
    ids: Tensor
    """[..., k] int64."""
    rest: Tensor
    """[...], logsumexp of the logits of all other tokens; -inf where there are none."""

    @classmethod
    def of(cls, logits: Tensor, k: int) -> Candidates:
        """logits [..., V]."""
        best = logits.topk(k, -1)
        whole, held = wide(logits).logsumexp(-1), wide(best.values).logsumexp(-1)
        # at most 1: rounding may make the part larger than the whole
        share = (held - whole).exp().clamp(max=1.0)
        return cls(best.values, best.indices, whole + torch.log1p(-share))


class Lattice(NamedTuple):
    """Candidates of K rows, and how well each follows those of the row before."""

    ids: Tensor
    """[B, K, k] int64."""
    first: Tensor
    """[B, k], scores of row 0's candidates, after the anchor."""
    pairs: Tensor
    """[B, K - 1, k, k]: of row t's candidates (third) those of row t + 1 after them (last)."""
    rest: Tensor
    """[B, K], as in `Candidates`: what the other tokens count beside a row's candidates."""

    @property
    def depth(self) -> int:
        return self.ids.shape[1]

    def after(self, row: int, parents: Tensor) -> Tensor:
        """Scores [B, W, k] of a row's candidates after these [B, W] of the row before; before row 0 is the anchor."""
        if not row:
            return self.first[:, None].expand(-1, parents.shape[1], -1)
        return self.pairs[:, row - 1].gather(1, parents[..., None].expand(-1, -1, self.ids.shape[2]))

    def tokens(self, row: int, chosen: Tensor) -> Tensor:
        """Ids of a row's candidates [B, W]."""
        return self.ids[:, row].gather(1, chosen)


def log_shares(scores: Tensor, rest: Tensor) -> Tensor:
    """log q [..., k] of candidates by their scores, where all other tokens together weigh exp(rest) [...]."""
    scores = wide(scores)
    return scores - torch.logaddexp(scores.logsumexp(-1), rest.to(scores))[..., None]


def walk(lattice: Lattice, choose: Choose) -> tuple[Tensor, Tensor]:
    """One path, left to right: the number of each row's candidate [B, K], and the scores that it was chosen by [B, K,
    k].

    A drawn token's q is the distribution of its row's scores: it is conditional on the tokens before it, and 0 outside
    the candidates.
    """
    chosen, scores = [], []
    at = torch.zeros_like(lattice.ids[:, 0, :1])
    for row in range(lattice.depth):
        scores.append(lattice.after(row, at)[:, 0])
        at = choose(scores[-1], row)[:, None]
        chosen.append(at)
    return torch.cat(chosen, 1), torch.stack(scores, 1)


def likeliest(scores: Tensor, row: int) -> Tensor:
    """The `Choose` without noise; the first of equals."""
    return scores.argmax(-1)


def confidence(scores: Tensor, rest: Tensor) -> Tensor:
    """[..., K] float32, how likely each row's best candidate is, from the scores of a walk [..., K, k].

    It depends on the tokens before the row alone, so a draft may end by it.
    """
    return log_shares(scores, rest).amax(-1).exp().float()


# ── trees ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def best_first(lattice: Lattice, nodes: int) -> tuple[Tensor, Tensor]:
    """The `nodes` likeliest paths as one tree, in descending order: tokens and parents, [B, N].

    A path's probability is the product of q along it, each node's given its own parent.  A child is never likelier than
    its parent, and of equals the shallower comes first, so every prefix is a tree, and the best of its size.  The host
    reads nothing.
    """
    k = lattice.ids.shape[2]
    at = torch.zeros_like(lattice.ids[:, 0, :1])
    above, held = torch.zeros_like(at, dtype=wide(lattice.first).dtype), torch.full_like(at, -1)
    levels, begin = [], 0
    for row in range(min(lattice.depth, nodes)):
        own = log_shares(lattice.after(row, at), lattice.rest[:, row, None])
        scores, order = _ranked((above[..., None] + own).flatten(1), nodes - row)
        parent, at = order // k, order % k
        levels.append((scores, lattice.tokens(row, at), held.gather(1, parent)))
        held = torch.arange(begin, begin + order.shape[1], device=order.device).expand_as(order)
        above, begin = scores, begin + order.shape[1]
    scores, tokens, parents = (torch.cat(level, 1) for level in zip(*levels, strict=True))
    _, order = _ranked(scores, nodes)
    # where each candidate comes to stand; what does not stay has no children that do
    place = torch.zeros_like(tokens).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    parents = parents.gather(1, order)
    return tokens.gather(1, order), place.gather(1, parents.clamp(min=0)).where(parents >= 0, -1)


def number_of_nodes(nodes: int, depth: int, k: int) -> int:
    """How many nodes `best_first` returns for a lattice of `depth` rows."""
    total, width = 0, 1
    for row in range(min(depth, nodes)):
        width = min(nodes - row, width * k)
        total += width
    return min(nodes, total)


def _ranked(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The highest scores [B, <= most] and their indices; equals keep their order."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :most], order[:, :most]


def expand(lattice: Lattice, spread: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Expand]:
    """What `trees.drawn` asks for: logits [B, V] after the anchor, and after nodes of a tree.

    spread: scores [B, W, k] of these candidates [B, W, k] as logits [B, W, V], -inf elsewhere.
    """

    def logits(row: int, parents: Tensor) -> Tensor:
        scores = lattice.after(row, parents)
        return spread(scores, lattice.ids[:, row, None].expand_as(scores))

    def after(tree: Draft, new: int) -> Tensor:
        tokens = tree.tokens[:, -new:, None]
        # of a token that is no candidate, which only a node without probability has, the first one's scores
        return logits(tree.depth, (tokens == lattice.ids[:, tree.depth - 1, None]).long().argmax(-1))

    return logits(0, torch.zeros_like(lattice.ids[:, 0, :1]))[:, 0], after


def spread(scores: Tensor, ids: Tensor, size: int) -> Tensor:
    """Scores [..., k] of these tokens [..., k] as logits [..., size], -inf elsewhere."""
    everywhere = scores.new_full((*scores.shape[:-1], size), -torch.inf)
    return everywhere.scatter(-1, ids, scores)
