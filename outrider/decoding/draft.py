"""A draft is a tree of tokens under each slot's anchor; a chain is the tree with one branch.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import DrafterError


@dataclass(frozen=True)
class Draft:
    """Tokens proposed under each slot's anchor (the last committed token, not yet in the target's cache).

    Nodes stand in the order drawn, parents first (-1 is the anchor), the most promising first where the drafter may
    choose: every prefix is a draft.  Siblings are tried in order.
    `q[b, n]` is the distribution node n was drawn from, given that its elder siblings were rejected; over a reduced
    vocabulary it is 0 elsewhere; a one-hot row marks a deterministic node among sampled ones.
    `confidence[b, n]` must be known *before* node n's token was drawn; see `Policy.keep`.
    """

    tokens: Tensor
    """[B, N] int64."""
    parents: Tensor
    """[B, N] int64, on the tokens' device."""
    sizes: Tensor
    """[B] int64 on the CPU, live nodes; the rest is padding."""
    q: Tensor | None = None
    """[B, N, V] float; None = every proposal deterministic, always so at temperature 0."""
    confidence: Tensor | None = None
    """[B, N] float32 in [0, 1]."""
    branches: bool = True
    """False promises parents[b, n] = n - 1, so that masks and walks take the short way."""

    @classmethod
    def chain(cls, tokens: Tensor, sizes: Tensor, q: Tensor | None = None, confidence: Tensor | None = None) -> Draft:
        """One branch: every node is the child of the one before it.  tokens [B, N], sizes [B]."""
        return cls(tokens, _chain(*tokens.shape, tokens.device), sizes, q, confidence, branches=False)

    @classmethod
    @functools.lru_cache(1024)
    def empty(cls, slots: int, device: torch.device | str = "cpu") -> Draft:
        """Nothing proposed: the step is plain decoding."""
        nothing = torch.empty(slots, 0, dtype=torch.int64, device=device)
        return cls(nothing, nothing, torch.zeros(slots, dtype=torch.int64), branches=False)

    @classmethod
    def trees(
        cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> Draft:
        """Deterministic trees of unequal size, one a slot, in lists."""
        sizes, width = torch.tensor([len(own) for own in tokens], dtype=torch.int64), max(map(len, tokens), default=0)
        padded = [[[*row, *[idle] * (width - len(row))] for row in rows] for rows, idle in ((tokens, 0), (parents, -1))]
        ids, above = (torch.tensor(rows, dtype=torch.int64, device=device).view(len(tokens), width) for rows in padded)
        if all(list(own) == list(range(-1, len(own) - 1)) for own in parents):
            return cls.chain(ids, sizes)
        return cls(ids, above, sizes)

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """`tokens`, for walks in Python: read from the device once."""
        return self.tokens.tolist()

    @functools.cached_property
    def tree(self) -> tuple[tuple[int, ...], ...]:
        """`parents`, as what is remembered of a tree's shape is keyed by."""
        if not self.branches:
            return (tuple(range(-1, self.tokens.shape[1] - 1)),) * len(self.tokens)
        return tuple(map(tuple, self.parents.tolist()))

    @functools.cached_property
    def live(self) -> list[int]:
        """`sizes`."""
        return self.sizes.tolist()

    def checked(self, slots: int) -> Draft:
        """This draft with its shape made sure of: sizes within the columns, every parent before its child, a chain a chain.

        Raises DrafterError where the tensors' shapes don't belong together.
        """
        shape = self.tokens.shape
        shapes = [shape, self.parents.shape, *(x.shape[:2] for x in (self.q, self.confidence) if x is not None)]
        if len(shape) != 2 or any(other != shape for other in shapes) or shape[0] != slots or self.sizes.shape != (slots,):
            raise DrafterError(
                f"a draft of {slots} slots came with tokens {tuple(shape)}, parents {tuple(self.parents.shape)}, sizes "
                f"{tuple(self.sizes.shape)}; tokens, parents, q and confidence must all be [slots, nodes, ...]"
            )
        if not 0 <= min(self.live, default=0) <= max(self.live, default=0) <= shape[1]:
            return replace(self, sizes=self.sizes.clamp(0, shape[1])).checked(slots)
        if not self.branches:
            # the mask will be a chain's, so the walk must be one too
            parents = _chain(*shape, self.parents.device)
            return self if self.parents is parents else replace(self, parents=parents)
        sound = [_sound(parents) for parents in self.tree]
        if min(sound, default=shape[1]) == shape[1]:
            return self
        live = torch.tensor(sound)
        # behind an unsound parent all is padding, which must not index outside the tree either
        is_sound = torch.arange(shape[1]) < live[:, None]
        parents = self.parents.where(is_sound.to(self.parents.device), -1)
        return replace(self, parents=parents, sizes=torch.minimum(self.sizes, live))

    def first(self, keep: Tensor) -> Draft:
        """The first keep[b] nodes of every slot.  keep [B] int64 on the CPU; columns that no slot keeps are cut off."""
        if keep is self.sizes:
            return self
        # on small lists, which is several times faster than on small tensors
        sizes = [max(0, min(own, wanted)) for own, wanted in zip(self.live, keep.tolist(), strict=True)]
        width = max(sizes, default=0)
        if sizes == self.live and width == self.tokens.shape[1]:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :width],
            parents=self.parents[:, :width],
            sizes=torch.tensor(sizes, dtype=torch.int64),
            q=None if self.q is None else self.q[:, :width],
            confidence=None if self.confidence is None else self.confidence[:, :width],
        )

    def trunk(self) -> Draft:
        """The chain of eldest children, for a target that verifies no trees.

        An eldest child was drawn before its siblings, so its q is the whole law it came from.
        """
        if not self.branches:
            return self
        chain = self.only([_eldest(parents[:size]) for parents, size in zip(self.tree, self.live, strict=True)])
        return replace(chain, parents=_chain(*chain.tokens.shape, chain.tokens.device), branches=False)

    def on(self, device: torch.device) -> Draft:
        """The same draft on another device."""
        if self.tokens.device == device:
            return self
        q = None if self.q is None else self.q.to(device)
        confidence = None if self.confidence is None else self.confidence.to(device)
        return Draft(self.tokens.to(device), self.parents.to(device), self.sizes, q, confidence, self.branches)

    def only(self, kept: list[list[int]]) -> Draft:
        """These nodes of every slot, ascending and closed under parents, close together.  A chain keeps its beginning."""
        if not self.branches:
            return self.first(torch.tensor([len(nodes) for nodes in kept]))
        width = max(map(len, kept), default=0)
        device = self.tokens.device
        place = [{-1: -1} | {n: at for at, n in enumerate(nodes)} for nodes in kept]
        parents = [[place[b][above[n]] for n in kept[b]] + [-1] * (width - len(kept[b])) for b, above in enumerate(self.tree)]
        nodes = torch.tensor([[*nodes, *[0] * (width - len(nodes))] for nodes in kept], dtype=torch.int64, device=device)
        nodes = nodes.view(len(kept), width)
        slots = torch.arange(len(kept), device=device)[:, None]
        return replace(
            self,
            tokens=self.tokens[slots, nodes],
            parents=torch.tensor(parents, dtype=torch.int64, device=device).view(nodes.shape),
            sizes=torch.tensor([len(nodes) for nodes in kept], dtype=torch.int64),
            q=None if self.q is None else self.q[slots, nodes],
            confidence=None if self.confidence is None else self.confidence[slots, nodes],
        )

    def joined(self, other: Draft, most: Tensor) -> Draft:
        """The union of two drafts under the same anchors: this one's nodes, then what `other` adds to them.

        most [B] int64 on the CPU, nodes a slot.  What is drawn in `other` must be independent of what is drawn here.  A
        deterministic node of `other` whose token stands under the same parent already is that node.  A drawn one is added in
        any case and tried with its own q: left out for its token, it would break the law.  Of two equal siblings the younger
        is never kept, so what stood under it hangs under the elder.  A confidence that its draft does not know is 1: it stops
        nothing.
        """
        own = self.first(most)
        if not any(other.live):
            return own
        if not any(own.live):
            return other.first(most)
        certain, width, limits = other._certain(), own.tokens.shape[1], most.tolist()
        nodes, parents = [], []
        for b, size in enumerate(own.live):
            added, above = _union(
                own.ids[b], own.tree[b][:size], other.ids[b], other.tree[b][: other.live[b]], certain[b], limits[b]
            )
            nodes.append([*range(size), *(width + n for n in added)])
            parents.append(above)
        if sum(map(len, nodes)) == sum(own.live):
            return own
        return _beside(own, other)._taken(nodes, parents)

    def _certain(self) -> list[list[bool]]:
        """Which nodes are deterministic: no q, or one-hot at its own token."""
        if self.q is None:
            return [[True] * self.tokens.shape[1]] * len(self.tokens)
        own = self.q.gather(-1, self.tokens.clamp(0, self.q.shape[-1] - 1)[..., None])[..., 0]
        return ((own == 1) & (self.q.count_nonzero(dim=-1) == 1)).tolist()

    def _taken(self, nodes: list[list[int]], parents: list[list[int]]) -> Draft:
        """These nodes of every slot, in this order, under these parents."""
        width, device = max(map(len, nodes)), self.tokens.device
        at = torch.tensor([[*own, *[0] * (width - len(own))] for own in nodes], device=device)
        slots = torch.arange(len(nodes), device=device)[:, None]
        sizes = torch.tensor([len(own) for own in nodes], dtype=torch.int64)
        tokens, q, confidence = (None if x is None else x[slots, at] for x in (self.tokens, self.q, self.confidence))
        assert tokens is not None
        if all(own == list(range(-1, len(own) - 1)) for own in parents):
            return Draft.chain(tokens, sizes, q, confidence)
        above = torch.tensor([[*own, *[-1] * (width - len(own))] for own in parents], device=device)
        return Draft(tokens, above, sizes, q, confidence)

    def depths(self) -> Tensor:
        """Depth of every node: 0 under the anchor.  [B, N] int64."""
        return self.rows()[1][:, 1:] - 1

    def reach(self) -> list[int]:
        """How deep each slot's live nodes go; 0 where nothing was drafted."""
        if not self.branches:
            return self.live
        depths = [_ancestry(parents)[1] for parents in self.tree]
        return [max(deep[:size], default=-1) + 1 for deep, size in zip(depths, self.live, strict=True)]

    def visible(self) -> Tensor:
        """Which rows a row of the verified pass may look at: [B, N+1, N+1] bool; row 0 is the anchor, n + 1 is node n.

        A node sees the anchor, its ancestors and itself.
        """
        return self.rows()[0]

    def rows(self) -> tuple[Tensor, Tensor]:
        """`visible`, and how deep each of these rows stands, [B, N+1]: 0 for the anchor, 1 for its children."""
        slots, nodes = self.tokens.shape
        if self.branches:
            return _rows(self.tree, self.tokens.device)
        order = torch.arange(nodes + 1, device=self.tokens.device)
        return (order[:, None] >= order).expand(slots, -1, -1), order.expand(slots, -1)


def _union(
    ids: list[int], parents: Sequence[int], others: list[int], others_parents: Sequence[int], certain: list[bool], most: int
) -> tuple[list[int], list[int]]:  # fmt: skip
    """One slot's nodes of another draft that a draft has not yet, and the parents of all nodes, those at the end."""
    added, above = [], list(parents)
    known: dict[tuple[int, int], int] = {}
    for n, parent in enumerate(parents):
        known.setdefault((parent, ids[n]), n)
    place = {-1: -1}
    for n, parent in enumerate(others_parents):
        if parent not in place:
            continue
        here = place[parent], others[n]
        if not (certain[n] and here in known):
            if len(above) >= most:
                continue
            known.setdefault(here, len(above))
            above.append(here[0])
            added.append(n)
        place[n] = known[here]
    return added, above


def _beside(one: Draft, other: Draft) -> Draft:
    """The nodes of two drafts side by side, without their parents."""
    q = confidence = None
    if one.q is not None or other.q is not None:
        like = one.q if one.q is not None else other.q
        assert like is not None
        q = torch.cat([_dense(one, like), _dense(other, like)], 1)
    if one.confidence is not None or other.confidence is not None:
        known = [torch.ones_like(x.tokens, dtype=torch.float32) if x.confidence is None else x.confidence for x in (one, other)]
        confidence = torch.cat(known, 1)
    tokens = torch.cat([one.tokens, other.tokens], 1)
    return Draft(tokens, tokens, one.sizes, q, confidence)


def _dense(draft: Draft, like: Tensor) -> Tensor:
    """q [B, N, V], one-hot where nothing was drawn, and 0 for an id outside the vocabulary.  like [B, any, V]."""
    if draft.q is not None:
        return draft.q
    vocabulary = like.shape[-1]
    known = (draft.tokens >= 0) & (draft.tokens < vocabulary)
    q = like.new_zeros(*draft.tokens.shape, vocabulary)
    return q.scatter_(-1, draft.tokens.where(known, 0)[..., None], known[..., None].to(q.dtype))


@functools.lru_cache(256)
def _rows(parents: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sight [B, N+1, N+1] and depths [B, N+1] of the rows of some slots' trees."""
    found = [_ancestry(tree) for tree in parents]
    depths = [[0, *(depth + 1 for depth in own)] for _, own in found]
    return torch.stack([sees for sees, _ in found]).to(device), torch.tensor(depths, device=device)


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


@functools.lru_cache(1024)
def _ancestry(parents: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Which rows a row may look at [N+1, N+1], and every node's depth.  Most drafters grow the same tree again and again."""
    sees = torch.eye(len(parents) + 1, dtype=torch.bool)
    depths: list[int] = []
    for n, parent in enumerate(parents):
        sees[n + 1] |= sees[parent + 1]
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return sees, depths
