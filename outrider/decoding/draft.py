"""A draft is a tree of tokens under each slot's anchor; a chain is a tree with one branch.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import DrafterError


@dataclass(frozen=True)
class Draft:
    """Tokens proposed under each slot's anchor (the last committed token, not yet in the target's cache).

    Parents come before their children (-1 is the anchor), the most promising nodes first, so every prefix is a draft.
    Siblings are tried in order.  `q[b, n]` is the distribution node n was drawn from, given that its earlier siblings
    were rejected.  A q over a reduced vocabulary is 0 elsewhere; a one-hot row marks a deterministic node among
    sampled ones.
    """

    tokens: Tensor
    """[B, N] int64."""
    parents: Tensor
    """[B, N] int64, on the tokens' device."""
    sizes: Tensor
    """[B] int64 on the CPU, number of nodes per slot; the rest is padding."""
    q: Tensor | None = None
    """[B, N, V] float; None if every node is deterministic, as at temperature 0."""
    confidence: Tensor | None = None
    """[B, N] float32 in [0, 1]: probability that a node is accepted if its parent is; see `Policy`."""
    branches: bool = True
    """False guarantees parents[b, n] = n - 1, which allows faster masks and walks."""
    origin: Tensor | None = None
    """[B, N] int64, each node's number in the drafter's proposal before any cuts; None if unchanged."""

    @classmethod
    def chain(cls, tokens: Tensor, sizes: Tensor, q: Tensor | None = None, confidence: Tensor | None = None) -> Draft:
        """A chain: every node is the child of the one before it.  tokens [B, N], sizes [B]."""
        return cls(tokens, _chain(*tokens.shape, tokens.device), sizes, q, confidence, branches=False)

    @classmethod
    def fixed(cls, tokens: Tensor, parents: Sequence[int], sizes: Tensor, q: Tensor | None = None) -> Draft:
        """The same tree for every slot.  Its parents are given on the host, so they are never read from the device."""
        draft = cls(tokens, to_device(parents, tokens.device).expand(len(tokens), -1), sizes, q)
        vars(draft)["tree"] = (tuple(parents),) * len(tokens)
        return draft

    @classmethod
    def grown(cls, tokens: Tensor, parents: Tensor, sizes: Tensor, depth: int) -> Draft:
        """Trees of at most `depth` levels whose parents [B, N] are only on the device; no q."""
        draft = cls(tokens, parents, sizes)
        vars(draft)["depth"] = depth
        return draft

    @classmethod
    @functools.lru_cache(1024)
    def empty(cls, slots: int, device: torch.device | str = "cpu") -> Draft:
        """A draft without nodes: a step of plain decoding."""
        nothing = torch.empty(slots, 0, dtype=torch.int64, device=device)
        return cls(nothing, nothing, torch.zeros(slots, dtype=torch.int64), branches=False)

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """`tokens` as lists, read from the device once."""
        return self.tokens.tolist()

    def read_with(self, chosen: Tensor) -> list[list[int]]:
        """`chosen` [B, N+1] int64 as lists, read from the device together with the draft's ids to wait only once."""
        nodes = self.tokens.shape[1]
        if "ids" in vars(self) or self.tokens.device != chosen.device:
            return chosen.tolist()
        both = torch.cat([self.tokens, chosen], 1).tolist()
        vars(self)["ids"] = [row[:nodes] for row in both]
        return [row[nodes:] for row in both]

    @functools.cached_property
    def tree(self) -> tuple[tuple[int, ...], ...]:
        """`parents` as tuples, read from the device once."""
        if not self.branches:
            return (tuple(range(-1, self.tokens.shape[1] - 1)),) * len(self.tokens)
        return tuple(map(tuple, self.parents.tolist()))

    @functools.cached_property
    def depth(self) -> int:
        """Levels of the deepest tree."""
        return max((1 + max(node_depths(parents), default=-1) for parents in {*self.tree}), default=0)

    @functools.cached_property
    def live(self) -> list[int]:
        """`sizes` as a list."""
        return self.sizes.tolist()

    def each(self, change: Callable[[Tensor], Tensor]) -> Draft:
        """Apply `change` to every tensor [B, N, ...] of the draft."""
        q, confidence, origin = (None if x is None else change(x) for x in (self.q, self.confidence, self.origin))
        tokens, parents = change(self.tokens), change(self.parents)
        return replace(self, tokens=tokens, parents=parents, q=q, confidence=confidence, origin=origin)

    def checked(self, slots: int) -> Draft:
        """This draft made valid: sizes within the columns, every parent before its child, and chains with the parents
        of a chain.  Raises DrafterError if it is not a Draft or its tensors have wrong types or shapes."""
        if not isinstance(self, Draft):  # check the return value of `propose` with `Draft.checked(returned, slots)`
            raise DrafterError(
                f"propose must return a Draft of {slots} slots, got {type(self).__name__}; return Draft.empty to "
                f"propose no tokens"
            )
        ids, others = (self.tokens, self.parents, self.sizes), (x for x in (self.q, self.confidence) if x is not None)
        shapes = [x.shape if isinstance(x, Tensor) and x.dtype == torch.int64 else () for x in ids]
        shape = (slots, *shapes[0][1:2])
        if len(shape) != 2 or shapes != [shape, shape, (slots,)] or any(x.shape[:2] != shape for x in others):
            types = [f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in ids]
            raise DrafterError(
                f"a draft of {slots} slots has tokens {types[0]}, parents {types[1]}, sizes {types[2]}; tokens and "
                "parents must be int64 [slots, nodes], sizes int64 [slots], q and confidence [slots, nodes, ...]"
            )
        # a chain gets the mask of a chain, so its parents must match
        parents = self.parents if self.branches else _chain(*shape, self.parents.device)
        num_valid = [_num_valid(tree) for tree in self.tree] if self.branches else [shape[1]] * slots
        sizes = [max(0, min(pair)) for pair in zip(self.live, num_valid, strict=True)]
        if min(num_valid, default=shape[1]) < shape[1]:
            # nodes from the first invalid parent on are padding, which must not index outside the tree either
            is_valid = torch.arange(shape[1]) < torch.tensor(num_valid)[:, None]
            parents = parents.where(is_valid.to(parents.device), -1)
        if sizes == self.live and parents is self.parents:
            return self
        return replace(self, parents=parents, sizes=torch.tensor(sizes, dtype=torch.int64))

    def first(self, keep: Tensor) -> Draft:
        """The first keep[b] nodes of every slot.  keep [B] int64 on the CPU.  Columns that no slot uses are dropped."""
        if keep is self.sizes:
            return self
        # small lists are several times faster than small tensors
        sizes = [max(0, min(size, most)) for size, most in zip(self.live, keep.tolist(), strict=True)]
        width = max(sizes, default=0)
        if sizes == self.live and width == self.tokens.shape[1]:
            return self
        return replace(self.each(lambda x: x[:, :width]), sizes=torch.tensor(sizes, dtype=torch.int64))

    def first_children(self, b: int) -> Sequence[int]:
        """A path of slot b: the anchor's first child, that node's first child, and so on."""
        return _first_children(self.tree[b][: self.live[b]]) if self.branches else range(self.live[b])

    def trunk(self) -> Draft:
        """The chain of first children, for a target that can't verify trees.  Their q depends on no siblings, so it
        stays correct."""
        if not self.branches:
            return self
        return self.only([self.first_children(b) for b in range(len(self.tokens))])

    def only(self, remaining: Sequence[Sequence[int]]) -> Draft:
        """Only these nodes of every slot.  They must be ascending and include their parents; a chain keeps a prefix."""
        if not self.branches:
            return self.first(torch.tensor([len(nodes) for nodes in remaining]))
        places = [{-1: -1} | {n: at for at, n in enumerate(nodes)} for nodes in remaining]
        parents = [[places[b][tree[n]] for n in remaining[b]] for b, tree in enumerate(self.tree)]
        return self.select(remaining, parents)

    def select(self, nodes: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Draft:
        """These nodes of every slot, in this order, under these parents."""
        device = self.tokens.device
        at = padded(nodes, 0, device)
        slots = torch.arange(len(nodes), device=device)[:, None]
        selected = self.each(lambda x: x[slots, at])
        branches = any(list(tree) != list(range(-1, len(tree) - 1)) for tree in parents)
        return replace(
            selected,
            parents=padded(parents, -1, device) if branches else _chain(*at.shape, device),
            sizes=torch.tensor([len(each) for each in nodes]),
            branches=branches,
            origin=at if selected.origin is None else selected.origin,
        )

    def reach(self) -> list[int]:
        """Depth of each slot's draft; 0 if it is empty."""
        if not self.branches:
            return self.live
        trees = zip(self.tree, self.live, strict=True)
        return [max(_ancestry(parents)[1][:size], default=-1) + 1 for parents, size in trees]

    def rows(self) -> tuple[Tensor, Tensor]:
        """Attention mask [B, N+1, N+1] bool and depth [B, N+1] of the rows of the verified pass: row 0 is the anchor,
        at depth 0; row n + 1 is node n, which attends to the anchor, its ancestors and itself."""
        slots, nodes = self.tokens.shape
        if not self.branches:
            return chain_rows(slots, nodes + 1, self.tokens.device)
        if "depth" in vars(self) and "tree" not in vars(self):
            return self._device_rows
        return _rows(self.tree, self.tokens.device)

    @functools.cached_property
    def _device_rows(self) -> tuple[Tensor, Tensor]:
        """`rows` of trees made by `grown`, without reading their parents on the host."""
        return device_rows(self.parents, self.depth)


def chain_rows(slots: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Like `Draft.rows`, for chains; `rows` includes the anchor."""
    order = torch.arange(rows, device=device)
    return (order[:, None] >= order).expand(slots, -1, -1), order.expand(slots, -1)


def device_rows(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Like `Draft.rows`, for trees of at most `depth` levels, without reading parents [B, N] on the host."""
    above = torch.nn.functional.pad(parents + 1, (1, 0))
    order = torch.arange(above.shape[1], device=above.device)
    at, depths = order.expand(above.shape[0], -1), torch.zeros_like(above)
    mask = at[..., None] == order
    for _ in range(depth):
        depths, at = depths + (at > 0), above.gather(1, at)
        mask = mask | (at[..., None] == order)
    return mask, depths


def to_device(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """These numbers as a tensor on a device, copied without blocking the host."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def padded(rows: Sequence[Sequence[int]], idle: int, device: torch.device | str = "cpu") -> Tensor:
    """Lists of unequal length as one tensor [B, longest] int64, padded with `idle`."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[idle] * (width - len(row))] for row in rows]
    return to_device(filled, device).view(len(rows), width)


@functools.lru_cache(256)
def _rows(parents: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    masks, depths = zip(*map(_ancestry, parents), strict=True)
    row_depths = [[0, *(depth + 1 for depth in tree)] for tree in depths]
    mask = torch.stack(masks)
    return mask.to(device, non_blocking=True), to_device(row_depths, device)


@functools.lru_cache(256)
def _chain(slots: int, nodes: int, device: torch.device) -> Tensor:
    """Parents of chains, [B, N]."""
    return torch.arange(-1, nodes - 1, device=device).expand(slots, -1)


@functools.lru_cache(1024)
def _num_valid(parents: tuple[int, ...]) -> int:
    """Number of nodes before the first whose parent is not an earlier node."""
    return next((n for n, parent in enumerate(parents) if not -1 <= parent < n), len(parents))


@functools.lru_cache(1024)
def _first_children(parents: tuple[int, ...]) -> list[int]:
    """The first child of the anchor, that node's first child, and so on."""
    path = [-1]
    for n, parent in enumerate(parents):
        if parent == path[-1]:
            path.append(n)
    return path[1:]


def node_depths(parents: Sequence[int]) -> list[int]:
    """Number of ancestors of each node, the anchor excluded."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@functools.lru_cache(1024)
def _ancestry(parents: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Attention mask [N+1, N+1] of one tree's rows, and every node's depth.  Cached, since most drafters reuse the same
    tree."""
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for n, parent in enumerate(parents):
        mask[n + 1] |= mask[parent + 1]
    return mask, node_depths(parents)
