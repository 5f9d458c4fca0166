"""A draft is a tree of tokens under each slot's anchor; a chain is the tree with one branch.

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
    Siblings are tried in order.  `q[b, n]` is the distribution node n was drawn from, given that its elder siblings
    were rejected; over a reduced vocabulary it is 0 elsewhere; a one-hot row marks a deterministic node among sampled
    ones.
    """

    tokens: Tensor
    """[B, N] int64."""
    parents: Tensor
    """[B, N] int64, on the tokens' device."""
    sizes: Tensor
    """[B] int64 on the CPU, number of live nodes; the rest is padding."""
    q: Tensor | None = None
    """[B, N, V] float; None = every proposal deterministic, always so at temperature 0."""
    confidence: Tensor | None = None
    """[B, N] float32 in [0, 1]: probability that a node is accepted, given that its parent is; see `Policy`."""
    branches: bool = True
    """False promises parents[b, n] = n - 1, so that masks and walks have a fast path."""
    origin: Tensor | None = None
    """[B, N] int64, each node's number in the drafter's own proposal, however it was cut; None where unchanged."""

    @classmethod
    def chain(cls, tokens: Tensor, sizes: Tensor, q: Tensor | None = None, confidence: Tensor | None = None) -> Draft:
        """One branch: every node is the child of the one before it.  tokens [B, N], sizes [B]."""
        return cls(tokens, _chain(*tokens.shape, tokens.device), sizes, q, confidence, branches=False)

    @classmethod
    def fixed(cls, tokens: Tensor, parents: Sequence[int], sizes: Tensor, q: Tensor | None = None) -> Draft:
        """One tree for every slot, whose parents are known here: nobody reads them from a device."""
        draft = cls(tokens, sent(parents, tokens.device).expand(len(tokens), -1), sizes, q)
        vars(draft)["tree"] = (tuple(parents),) * len(tokens)
        return draft

    @classmethod
    def grown(cls, tokens: Tensor, parents: Tensor, sizes: Tensor, depth: int) -> Draft:
        """Trees of `depth` levels at most, whose parents [B, N] only the device knows; no q."""
        draft = cls(tokens, parents, sizes)
        vars(draft)["depth"] = depth
        return draft

    @classmethod
    @functools.lru_cache(1024)
    def empty(cls, slots: int, device: torch.device | str = "cpu") -> Draft:
        """No nodes: the step is plain decoding."""
        nothing = torch.empty(slots, 0, dtype=torch.int64, device=device)
        return cls(nothing, nothing, torch.zeros(slots, dtype=torch.int64), branches=False)

    @functools.cached_property
    def ids(
        self,
    ) -> list[list[int]]:  # `tokens`, as `tree` is `parents` and `live` is `sizes`: read from the device once
        return self.tokens.tolist()

    def read_with(self, chosen: Tensor) -> list[list[int]]:
        """`chosen` [B, N+1] int64 as lists, read from the device together with the draft's own ids: one wait."""
        nodes = self.tokens.shape[1]
        if "ids" in vars(self) or self.tokens.device != chosen.device:
            return chosen.tolist()
        both = torch.cat([self.tokens, chosen], 1).tolist()
        vars(self)["ids"] = [row[:nodes] for row in both]
        return [row[nodes:] for row in both]

    @functools.cached_property
    def tree(self) -> tuple[tuple[int, ...], ...]:
        if not self.branches:
            return (tuple(range(-1, self.tokens.shape[1] - 1)),) * len(self.tokens)
        return tuple(map(tuple, self.parents.tolist()))

    @functools.cached_property
    def depth(self) -> int:
        """Levels of the deepest tree."""
        return max((1 + max(node_depths(own), default=-1) for own in {*self.tree}), default=0)

    @functools.cached_property
    def live(self) -> list[int]:
        return self.sizes.tolist()

    def each(self, change: Callable[[Tensor], Tensor]) -> Draft:
        """Apply a change to every tensor [B, N, ...] of the draft."""
        q, confidence, origin = (None if x is None else change(x) for x in (self.q, self.confidence, self.origin))
        tokens, parents = change(self.tokens), change(self.parents)
        return replace(self, tokens=tokens, parents=parents, q=q, confidence=confidence, origin=origin)

    def checked(self, slots: int) -> Draft:
        """This draft, made valid: sizes within the columns, every parent before its child, a chain a chain.
        Raises DrafterError for what is not a Draft, and for tensors whose types or shapes don't fit together."""
        if not isinstance(self, Draft):  # what `propose` returned is checked by `Draft.checked(returned, slots)`
            raise DrafterError(
                f"propose must return a Draft of {slots} slots, got {type(self).__name__}; for no tokens return "
                f"Draft.empty"
            )
        ids, others = (self.tokens, self.parents, self.sizes), (x for x in (self.q, self.confidence) if x is not None)
        shapes = [x.shape if isinstance(x, Tensor) and x.dtype == torch.int64 else () for x in ids]
        shape = (slots, *shapes[0][1:2])
        if len(shape) != 2 or shapes != [shape, shape, (slots,)] or any(x.shape[:2] != shape for x in others):
            given = [f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in ids]
            raise DrafterError(
                f"a draft of {slots} slots has tokens {given[0]}, parents {given[1]}, sizes {given[2]}; tokens and "
                f"parents "
                "must be int64 tensors [slots, nodes], sizes int64 [slots], q and confidence [slots, nodes, ...]"
            )
        # a chain gets a chain's mask, so its parents must be a chain too
        parents = self.parents if self.branches else _chain(*shape, self.parents.device)
        sound = [_sound(tree) for tree in self.tree] if self.branches else [shape[1]] * slots
        sizes = [max(0, min(pair)) for pair in zip(self.live, sound, strict=True)]
        if min(sound, default=shape[1]) < shape[1]:
            # everything from an unsound parent on is padding, which must not index outside the tree either
            is_sound = torch.arange(shape[1]) < torch.tensor(sound)[:, None]
            parents = parents.where(is_sound.to(parents.device), -1)
        if sizes == self.live and parents is self.parents:
            return self
        return replace(self, parents=parents, sizes=torch.tensor(sizes, dtype=torch.int64))

    def first(self, keep: Tensor) -> Draft:
        """The first keep[b] nodes of every slot.  keep [B] int64 on the CPU; columns that no slot needs are cut off."""
        if keep is self.sizes:
            return self
        # small lists are several times faster than small tensors
        sizes = [max(0, min(own, wanted)) for own, wanted in zip(self.live, keep.tolist(), strict=True)]
        width = max(sizes, default=0)
        if sizes == self.live and width == self.tokens.shape[1]:
            return self
        return replace(self.each(lambda x: x[:, :width]), sizes=torch.tensor(sizes, dtype=torch.int64))

    def eldest(self, b: int) -> Sequence[int]:
        """A slot's eldest path: the anchor's first child, its first child, and so on."""
        return _eldest(self.tree[b][: self.live[b]]) if self.branches else range(self.live[b])

    def trunk(self) -> Draft:
        """The chain of eldest children, for a target that verifies no trees; their q depends on no siblings, so it
        stays true."""
        if not self.branches:
            return self
        return self.only([self.eldest(b) for b in range(len(self.tokens))])

    def only(self, remaining: Sequence[Sequence[int]]) -> Draft:
        """Only these nodes of every slot, which are ascending and closed under parents.  A chain must retain its
        beginning."""
        if not self.branches:
            return self.first(torch.tensor([len(nodes) for nodes in remaining]))
        place = [{-1: -1} | {n: at for at, n in enumerate(nodes)} for nodes in remaining]
        return self.taken(remaining, [[place[b][above[n]] for n in remaining[b]] for b, above in enumerate(self.tree)])

    def taken(self, nodes: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Draft:
        """These nodes of every slot, in this order, under these parents."""
        device = self.tokens.device
        at, slots = padded(nodes, 0, device), torch.arange(len(nodes), device=device)[:, None]
        taken = self.each(lambda x: x[slots, at])
        branches = any(list(own) != list(range(-1, len(own) - 1)) for own in parents)
        above = padded(parents, -1, device) if branches else _chain(*at.shape, device)
        sizes, origin = torch.tensor([len(own) for own in nodes]), at if taken.origin is None else taken.origin
        return replace(taken, parents=above, sizes=sizes, branches=branches, origin=origin)

    def reach(self) -> list[int]:
        """How deep each slot's live nodes go; 0 where nothing was drafted."""
        if not self.branches:
            return self.live
        trees = zip(self.tree, self.live, strict=True)
        return [max(_ancestry(parents)[1][:size], default=-1) + 1 for parents, size in trees]

    def rows(self) -> tuple[Tensor, Tensor]:
        """Attention mask [B, N+1, N+1] bool and depth [B, N+1] of the rows of the verified pass: row 0 is the anchor,
        at depth 0; row n + 1 is node n, which attends to the anchor, its ancestors and itself."""
        slots, nodes = self.tokens.shape
        if self.branches:
            is_known = "tree" in vars(self) or "depth" not in vars(self)
            return _rows(self.tree, self.tokens.device) if is_known else self._device_rows
        return chain_rows(slots, nodes + 1, self.tokens.device)

    @functools.cached_property
    def _device_rows(self) -> tuple[Tensor, Tensor]:
        """`rows` of trees of which the host knows the depth alone; see `grown`."""
        return device_rows(self.parents, self.depth)


def chain_rows(slots: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """As `Draft.rows`, of chains of so many rows, the first included."""
    order = torch.arange(rows, device=device)
    return (order[:, None] >= order).expand(slots, -1, -1), order.expand(slots, -1)


def device_rows(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """As `Draft.rows`, of trees of `depth` levels at most, whose parents [B, N] the host does not know."""
    above = torch.nn.functional.pad(parents + 1, (1, 0))
    order = torch.arange(above.shape[1], device=above.device)
    at, depths = order.expand(above.shape[0], -1), torch.zeros_like(above)
    mask = at[..., None] == order
    for _ in range(depth):
        depths, at = depths + (at > 0), above.gather(1, at)
        mask = mask | (at[..., None] == order)
    return mask, depths


def sent(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of these numbers on a device, which the host does not wait for."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def padded(rows: Sequence[Sequence[int]], idle: int, device: torch.device | str = "cpu") -> Tensor:
    """Lists of unequal length as one tensor [B, longest] int64, `idle` after their ends."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[idle] * (width - len(row))] for row in rows]
    return sent(filled, device).view(len(rows), width)


@functools.lru_cache(256)
def _rows(parents: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    found = [_ancestry(tree) for tree in parents]
    depths = [[0, *(depth + 1 for depth in own)] for _, own in found]
    mask = torch.stack([sees for sees, _ in found])
    return mask.to(device, non_blocking=True), sent(depths, device)


@functools.lru_cache(256)
def _chain(slots: int, nodes: int, device: torch.device) -> Tensor:
    """Parents of chains, [B, N]."""
    return torch.arange(-1, nodes - 1, device=device).expand(slots, -1)


@functools.lru_cache(1024)
def _sound(parents: tuple[int, ...]) -> int:
    """How many nodes, from the first on, have a parent before them."""
    return next((n for n, parent in enumerate(parents) if not -1 <= parent < n), len(parents))


@functools.lru_cache(1024)
def _eldest(parents: tuple[int, ...]) -> list[int]:
    """The first child of the anchor, its first child, and so on."""
    path = [-1]
    for n, parent in enumerate(parents):
        if parent == path[-1]:
            path.append(n)
    return path[1:]


def node_depths(parents: Sequence[int]) -> list[int]:
    """How many nodes lie above each node of a tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@functools.lru_cache(1024)
def _ancestry(parents: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Mask [N+1, N+1] of one tree's rows, and every node's depth.  Cached, since most drafters repeat the same tree."""
    sees = torch.eye(len(parents) + 1, dtype=torch.bool)
    for n, parent in enumerate(parents):
        sees[n + 1] |= sees[parent + 1]
    return sees, node_depths(parents)
