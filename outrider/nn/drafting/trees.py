"""Trees of drafters that read their own tokens: a beam of the likeliest paths, or sampled siblings in a fixed shape.

Both go down level by level and need one function of the drafter: the logits after nodes that it has not read yet
(`Expand`).  The beam is EAGLE-2's (arXiv 2406.16858): read the likeliest nodes, then rank all candidates; its nodes are
deterministic.  Sampled siblings follow SpecInfer (arXiv 2305.09781) with replacement and Sequoia (arXiv 2402.12374)
without.

Differs from the papers: every prefix of the nodes is the draft of that budget, so a policy may cut anywhere.

B live slots, N drafted nodes, V vocabulary; C candidates, E nodes read, W nodes read in one level.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.decoding.draft import Draft, padded
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import DecodeState
from outrider.sampling.distribution import log_probs

Path = tuple[int, ...]
"""Ranks of a node and of its ancestors, from the anchor down."""
Expand = Callable[[Draft, int], Tensor]
"""(tree, new) → the logits [B, new, V] after the last `new` nodes of `tree`.

`tree` holds all nodes read so far in the order of the calls.  The new ones come last and have the same depth: 0 in the
first call, one more in each later call.  So keys or hidden states may be stored between calls and looked up by
`tree.parents`, or the whole tree read again under `tree.rows()`.  Leaves are never read.
"""


def beam(first: Tensor, expand: Expand, budget: Tensor, *, width: int, depth: int) -> Draft:
    """The likeliest paths, without noise.  first [B, V], logits after the anchor; budget [B] int64 on the CPU.

    At every depth the `width` likeliest nodes are read, and each has its `width` best tokens as candidates.  Of all
    candidates of `depth` levels, the likeliest are kept (by the product of q along their path), in descending order.  A
    child is never likelier than its parent and on a tie the shallower comes first, so every prefix is the best tree of
    its size.
    """
    tokens, parents = likeliest(first, expand, int(budget.max()), width=width, depth=depth)
    return Draft(tokens, parents, budget.clamp(max=tokens.shape[1]))


def likeliest(first: Tensor, expand: Expand, most: int, *, width: int, depth: int) -> tuple[Tensor, Tensor]:
    """The `most` likeliest nodes as in `beam`: tokens and parents, [B, N].  Nothing is copied to the host."""
    # a node that is deeper or ranks lower has at least `most` likelier nodes before it
    width, depth = min(width, most), min(depth, most)
    scores, tokens = _best(first, width)
    parents = at = torch.full_like(tokens, -1)
    tree = _nothing(tokens)
    offered, begin = [(scores, tokens, parents)], 0
    for _ in range(1, depth):
        leading, chosen = _ranked(scores, width)
        read, new = tree.tokens.shape[1], chosen.shape[1]
        tree = _joined(tree, tokens.gather(1, chosen), at.gather(1, chosen))
        deeper, following = _best(expand(tree, new), width)
        children = deeper.shape[-1]
        parents = (begin + chosen).repeat_interleave(children, 1)
        at = torch.arange(read, read + new, device=at.device).repeat_interleave(children).expand_as(parents)
        begin += scores.shape[1]
        scores, tokens = (leading[..., None] + deeper).flatten(1), following.flatten(1)
        offered.append((scores, tokens, parents))
    scores, tokens, parents = (torch.cat(level, 1) for level in zip(*offered, strict=True))
    _, order = _ranked(scores, most)
    # new index of each candidate; one that is dropped has no children that stay
    index = torch.zeros_like(tokens).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    above = parents.gather(1, order)
    return tokens.gather(1, order), index.gather(1, above.clamp(min=0)).where(above >= 0, -1)


def number_of_likeliest(most: int, *, width: int, depth: int) -> int:
    """How many nodes `likeliest` returns."""
    width, depth = min(width, most), min(depth, most)
    return min(most, width + (depth - 1) * width * width)


def _best(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """log q and ids [..., <= width] of the likeliest tokens.  logits [..., V]."""
    values, ids = log_probs(logits).topk(min(width, logits.shape[-1]), -1)
    return values, ids


def _ranked(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The highest scores [B, <= most] and their indices; ties keep their order, parents before children."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :most], order[:, :most]


def _nothing(tokens: Tensor) -> Draft:
    """A tree without nodes in B slots, as of tokens [B, W]."""
    return Draft.grown(tokens[:, :0], tokens[:, :0], torch.zeros(tokens.shape[0], dtype=torch.int64), 0)


def _joined(tree: Draft, tokens: Tensor, parents: Tensor) -> Draft:
    """The tree with one more level.  tokens, parents [B, W]."""
    tokens, parents = torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, parents], 1)
    return Draft.grown(tokens, parents, torch.full((tokens.shape[0],), tokens.shape[1]), tree.depth + 1)


def _columns(values: Tensor, at: Sequence[int]) -> Tensor:
    """values [B, W, ...] at these indices, [B, C, ...]; no index is copied to a device."""
    return torch.stack([values[:, i] for i in at], 1)


def shape(width: int, depth: int, nodes: int) -> tuple[int, ...]:
    """Parents of a tree to sample: up to `nodes` nodes, `width` children per node and `depth` levels, most promising
    first.

    The shape does not depend on any token.  A node costs 1, plus 2 for every earlier sibling: a second child is about
    as likely to be accepted as a first child two levels deeper (see `block_drafter.sibling_tree`).
    """
    parents: list[int] = []
    queue = [(1, 0, -1, 1)]
    while queue and len(parents) < nodes:
        cost, elders, parent, deep = heapq.heappop(queue)
        if elders + 1 < width:
            heapq.heappush(queue, (cost + 2, elders + 1, parent, deep))
        if deep < depth:
            heapq.heappush(queue, (cost + 1, 0, len(parents), deep + 1))
        parents.append(parent)
    return tuple(parents)


def sampled(
    first: Tensor, expand: Expand, budget: Tensor, state: DecodeState, *, parents: Sequence[int],
    replacement: bool = False,
) -> Draft:  # fmt: skip
    """Sample every node of a fixed tree.  first [B, V], logits after the anchor; budget [B] int64 on the CPU.

    Siblings are sampled from the same q; without `replacement`, from the residual of q after the earlier siblings.  If
    no probability is left, as at temperature 0, a sibling is the likeliest token not yet used, and its q is one-hot.
    Slots with a seed use the target's own noise in every branch, so they sample (nearly) what the target would.
    """
    parents = parents[: int(budget.max())]
    tokens, q = drawn(first, expand, parents, state.judge.distribution, state.streams, replacement)
    return Draft.fixed(tokens, parents, budget.clamp(max=len(parents)), q)


def drawn(
    first: Tensor, expand: Expand, parents: Sequence[int], distribution: Callable[[Tensor], Tensor], streams: Streams,
    replacement: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every node as in `sampled`: tokens [B, N] and the q [B, N, V] that each was sampled from.  Nothing is copied to
    the host.

    distribution: logits [B, W, V] → the distributions [B, W, V] that slots sample from.
    """
    q: dict[int, Tensor] = {}

    def draw(logits: Tensor, depth: int, nodes: list[int], above: list[int]) -> list[Tensor]:
        tokens, level_q = _siblings(logits, distribution(logits), above, streams, depth, replacement)
        q.update(zip(nodes, level_q, strict=True))
        return tokens

    tokens = _grown(first, expand, parents, draw)
    return tokens, torch.stack([q[n] for n in range(len(parents))], 1)


def _siblings(
    logits: Tensor, whole: Tensor, above: Sequence[int], streams: Streams, depth: int, replacement: bool
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Children of one level's nodes: tokens [B] and the q [B, V] that each was sampled from.

    logits, whole [B, W, V]: the level's logits and distributions; above [C]: the parent of each child, among W.
    """
    ranks = [above[:i].count(parent) for i, parent in enumerate(above)]
    inner = torch.arange(logits.shape[1], device=logits.device)[None]
    taken = [*torch.zeros_like(logits, dtype=torch.bool).unbind(1)]
    choices: dict[int, tuple[Tensor, Tensor]] = {}
    for rank in range(1 + max(ranks)):
        at = [i for i, node_rank in enumerate(ranks) if node_rank == rank]
        parents = [above[i] for i in at]
        q = _columns(whole, parents)
        if rank:
            elders = torch.stack([taken[w] for w in parents], 1)
            q = _left(q, _columns(logits, parents), elders, streams, replacement)
        # with replacement siblings are independent draws, otherwise first and second of the same race
        salt = _columns(inner, parents)[0] + rank * logits.shape[1] * replacement
        tokens = streams.draw(q, depth, Purpose.DRAFT, salt)
        choices |= zip(at, zip(tokens.unbind(1), q.unbind(1), strict=True), strict=True)
        for i, w in zip(at, parents, strict=True):
            taken[w] = taken[w].scatter(-1, choices[i][0][:, None], True)
    tokens_of, q_of = zip(*(choices[i] for i in range(len(above))), strict=True)
    return [*tokens_of], [*q_of]


def _left(whole: Tensor, logits: Tensor, taken: Tensor, streams: Streams, replacement: bool) -> Tensor:
    """The distribution of further siblings after tokens were `taken`: all [B, C, V]."""
    rest = whole.masked_fill(taken, 0.0)
    mass = rest.sum(-1, keepdim=True)
    left = rest / mass.clamp(min=1e-30)
    if replacement:
        # with the target's noise, a second draw from the same q would only repeat the first
        left = whole if streams.seeded is None else torch.where(streams.seeded[:, None, None], left, whole)
    runner_up = logits.masked_fill(taken, -torch.inf).argmax(-1, keepdim=True)
    return torch.where(mass > 1e-30, left, torch.zeros_like(left).scatter_(-1, runner_up, 1.0))


def _grown(
    first: Tensor, expand: Expand, parents: Sequence[int],
    choose: Callable[[Tensor, int, list[int], list[int]], Sequence[Tensor]],
) -> Tensor:  # fmt: skip
    """Tokens [B, N] of a fixed tree, level by level.

    choose: (logits [B, W, V] after the previous level's inner nodes, depth, nodes, the parent of each among W) → the
    tokens [B] of each of these nodes.
    """
    tokens: dict[int, Tensor] = {}
    numbers = torch.arange(-1, len(parents), device=first.device).expand(first.shape[0], -1)
    logits, tree, order = first[:, None], _nothing(numbers), [-1]
    inner, depth = [-1], 0
    while nodes := [n for n, parent in enumerate(parents) if parent in inner]:
        tokens |= zip(nodes, choose(logits, depth, nodes, [inner.index(parents[n]) for n in nodes]), strict=True)
        inner, depth = [n for n in nodes if n in parents], depth + 1
        if inner:
            above = _columns(numbers, [order.index(parents[n]) for n in inner])  # `numbers` starts at -1
            order += inner
            tree = _joined(tree, torch.stack([tokens[n] for n in inner], 1), above)
            logits = expand(tree, len(inner))
    return torch.stack([tokens[n] for n in range(len(parents))], 1)


class RankTree:
    """A fixed tree by ranks: every node has a rank among the logits after its parent, and every prefix is a draft.

    paths: for each node the ranks from the anchor down to it, parents first; (0, 2) is the third choice after the
    first.
    """

    def __init__(self, paths: tuple[Path, ...]):
        self.paths = paths
        at = {path: n for n, path in enumerate(paths)} | {(): -1}
        self.parents = [at[path[:-1]] for path in paths]
        self.depths = torch.tensor([len(path) - 1 for path in paths])
        self.ranks = torch.tensor([path[-1] for path in paths])
        self.width = 1 + int(self.ranks.max())
        self.is_chain = self.parents == list(range(-1, len(paths) - 1))

    @property
    def indices(self) -> Tensor:
        """[N], each node's index into the `width` likeliest tokens of all depths, flattened."""
        return self.depths * self.width + self.ranks

    def first(self, nodes: int) -> RankTree:
        """The tree of the first nodes."""
        return self if nodes >= len(self.paths) else _cut(self.paths[:nodes])

    def choices(self, logits: Tensor) -> Tensor:
        """Tokens [B, N] from logits [B, D, V] of every depth, if those do not depend on drafted tokens."""
        depths = self.depths.to(logits.device, non_blocking=True)
        ranks = self.ranks.to(logits.device, non_blocking=True)
        return logits.topk(self.width, -1).indices[:, depths, ranks]

    def draft(self, tokens: Tensor, budget: Tensor, q: Tensor | None = None) -> Draft:
        """The draft with these tokens, [B, N]."""
        sizes = budget.clamp(max=len(self.paths))
        if self.is_chain:
            return Draft.chain(tokens, sizes, q)
        return Draft.fixed(tokens, self.parents, sizes, q)


_cut = functools.lru_cache(256)(RankTree)


def ranked(first: Tensor, expand: Expand, tree: RankTree) -> Tensor:
    """Tokens [B, N] of a tree by ranks, without noise.  Nothing is copied to the host.  first [B, V], logits after the
    anchor."""

    def best(logits: Tensor, depth: int, nodes: list[int], above: list[int]) -> list[Tensor]:
        ranks = [tree.paths[n][-1] for n in nodes]
        leading = logits.topk(1 + max(ranks), -1).indices
        return [leading[:, w, rank] for w, rank in zip(above, ranks, strict=True)]

    return _grown(first, expand, tree.parents, best)


def path(tree: Draft, new: int) -> list[Tensor]:
    """Tokens [B, new] of each depth on the paths from the anchor to the last nodes, which all have the same depth."""
    at = torch.arange(tree.tokens.shape[1] - new, tree.tokens.shape[1], device=tree.tokens.device)
    at = at.expand(tree.tokens.shape[0], -1)
    tokens: list[Tensor] = []
    for _ in range(tree.depth):
        tokens.insert(0, tree.tokens.gather(1, at))
        at = tree.parents.gather(1, at)
    return tokens


def paths(tree: Draft, texts: Sequence[list[int]]) -> list[list[int]]:
    """The nodes along each text as far as they match it, whatever the target accepted."""
    paths = []
    for tokens, parents, text in zip(tree.ids, tree.tree, texts, strict=True):
        path: list[int] = []
        for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if len(path) < len(text) and token == text[len(path)] and parent == (path[-1] if path else -1):
                path.append(n)
        paths.append(path)
    return paths


def of_lists(
    tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> Draft:
    """A draft of deterministic trees from lists, one per slot."""
    ids, sizes = padded(tokens, 0, device), torch.tensor([len(nodes) for nodes in tokens], dtype=torch.int64)
    if all(list(nodes) == list(range(-1, len(nodes) - 1)) for nodes in parents):
        return Draft.chain(ids, sizes)
    return Draft(ids, padded(parents, -1, device), sizes)
