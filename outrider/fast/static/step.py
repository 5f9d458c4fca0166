"""The step of `loop` with tensors only, in the order: verify, accept, commit, observe, propose the next draft.

All tensors are written in place, so the step can be recorded once and replayed.  Between two steps the pending draft is
in `StaticDraft`: the host reads one row of numbers per slot, with what was committed and drafted, and a policy decides
how much of the draft the next step verifies.  End tokens and length limits are handled here too.

B slots, live or not; N nodes of a draft, n of them verified, V vocabulary, E ids that end a text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from outrider.decoding.accept import AcceptedTensors
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.state import DecodeState, Scores


class StaticPart:
    """A part of the step, whose tensors are written in place and have a row for every slot."""

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in vars(self).values() if isinstance(each, Tensor)]

    def over(self, tensors: Iterable[Tensor], **changed: Any) -> Self:
        """The same part over other tensors, in the order of `tensors`."""
        there, names = copy.copy(self), [name for name, each in vars(self).items() if isinstance(each, Tensor)]
        vars(there).update(zip(names, tensors, strict=True), **changed)
        return there


@dataclass
class StaticSlots(StaticPart):
    """The state of every slot."""

    anchor: Tensor
    """[B] int64, the last committed token."""
    length: Tensor
    """[B] int64, tokens before the anchor, which the target has read."""
    index: Tensor
    """[B] int64, output index of the next token."""
    left: Tensor
    """[B] int64, number of tokens by which the text may still grow."""
    live: Tensor
    """[B] bool."""
    seeds: Tensor
    """[B] int64."""
    seeded: Tensor
    """[B] bool, as in `Streams`."""
    temperature: Tensor
    """[B] float32; 0 is greedy."""
    top_k: Tensor
    """[B] int64; 0 cuts nothing."""
    top_p: Tensor
    """[B] float32."""
    min_p: Tensor
    """[B] float32."""
    has_seeded: bool = True
    """Whether any live request may draft with the target's noise."""

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> StaticSlots:
        anchor, length, index, left, seeds, top_k = torch.zeros(6, slots, dtype=torch.int64, device=device)
        live, seeded = torch.zeros(2, slots, dtype=torch.bool, device=device)
        temperature, top_p, min_p = torch.zeros(3, slots, device=device)
        return cls(anchor, length, index, left, live, seeds, seeded, temperature, top_k, top_p, min_p)

    @property
    def streams(self) -> Streams:
        return Streams(self.seeds, self.index, self.seeded if self.has_seeded else None)

    def enter(self, row: int, state: DecodeState) -> None:
        """Start slot `row` of the state, whose prompt has been read.  Values are written one by one, without a
        transfer."""
        request, text = state.requests[row], state.tokens[row]
        sampling = request.sampling
        values = (
            text[-1], len(text) - 1, len(text) - len(request.prompt), state.left_of(row), True, state.seeds[row],
            state.shared_noise and sampling.seed is not None, float(sampling.temperature), sampling.top_k,
            sampling.top_p, sampling.min_p,
        )  # fmt: skip
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor[row] = value

    def leave(self, row: int) -> None:
        self.live[row] = False


class Committed(NamedTuple):
    """What a step appended to the texts, including those that it ended."""

    tokens: Tensor
    """[B, N+1], of which the first `counts` are real."""
    rows: Tensor
    """[B, N+1], the row of the verified pass that predicted each: 0, then a node's."""
    counts: Tensor
    """[B], 0 for slots that are not live."""


class Proposed(NamedTuple):
    """A drafter's whole tree under every anchor."""

    tokens: Tensor
    """[B, N]."""
    sizes: Tensor
    """[B], how many of the first nodes may be verified; see `sizes_of`."""
    q: Tensor | None = None
    """[B, N, V], as in `Draft`."""
    confidence: Tensor | None = None
    """[B, N], as in `Draft`."""
    parents: Tensor | None = None
    """[B, N], of a tree that varies."""


class StaticDraft(StaticPart):
    """The pending draft of every slot."""

    def __init__(self, slots: int, drafter: StaticDrafter, vocabulary: int, device: torch.device, dtype: torch.dtype):
        """drafter: the drafter's part.  vocabulary, dtype: those of the distributions that nodes are sampled from."""
        self.drafter = drafter
        self.tokens = torch.zeros(slots, drafter.nodes, dtype=torch.int64, device=device)
        """[B, N]."""
        self.sizes = torch.zeros(slots, dtype=torch.int64, device=device)
        """[B], how many nodes are verified: those that the drafter proposes, or fewer if the host decides so."""
        self.confidence = torch.zeros(slots, drafter.nodes if drafter.has_confidence else 0, device=device)
        """[B, N] float32, or [B, 0]."""
        self.parents = parents_tensor(drafter.parents, slots, device)
        """[B, N], or [B, 0]."""
        if drafter.varies:
            self.parents = torch.full_like(self.tokens, -1)
        if drafter.has_q:
            self.q = torch.zeros(slots, drafter.nodes, vocabulary, device=device, dtype=dtype)
            """[B, N, V], if nodes are sampled."""

    def draft(self, nodes: int) -> Draft:
        """The first `nodes` of every slot; all of them if that number is a dynamic size."""
        n = nodes if isinstance(nodes, int) else self.drafter.nodes
        tokens, parents = self.tokens[:, :n], self.parents[:, :n]
        if self.drafter.varies:
            return Draft.grown(tokens, parents, self.sizes, min(self.drafter.depth, n))
        q: Tensor | None = getattr(self, "q", None)
        return fixed(tokens, self.drafter.parents[:n], parents, self.sizes, None if q is None else q[:, :n])

    def hold(self, proposed: Proposed) -> None:
        """Store a new draft."""
        self.tokens.copy_(proposed.tokens)
        self.sizes.copy_(proposed.sizes)
        if proposed.parents is not None:
            self.parents.copy_(proposed.parents)
        if proposed.q is not None:
            self.q.copy_(proposed.q)
        if proposed.confidence is not None and self.drafter.has_confidence:
            self.confidence.copy_(proposed.confidence)


class StaticDrafter(StaticPart):
    """A drafter's part of the step; what `Drafter.static` returns.  The base class drafts nothing."""

    parents: Sequence[int] = ()
    """Its tree, the same in every step."""
    varies, depth = False, 0
    """Whether its tree depends on the drafted tokens and has no `parents`; if so, its number of levels."""
    has_q, has_confidence = False, False
    """Whether its nodes are sampled from distributions, which are part of its drafts; whether it has confidences."""
    model: Any = None
    """The module with all weights that it reads, besides the target's."""
    borrowed: Sequence[Any] = ()
    """Modules created by `model` from the target's weights, which are not part of it."""
    code: Sequence[ModuleType] = ()
    """Python modules that it calls, besides those of its classes; the key of a package depends on their source."""
    caches: Sequence[Any] = ()
    """Its own caches, each a `fast.static.target.StaticCache`."""

    @property
    def nodes(self) -> int:
        """Number of nodes in its trees."""
        return len(self.parents)

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        """Load these slots from the drafter's memory, even in the middle of a text."""

    def leave(self, rows: Sequence[int], state: DecodeState) -> None:
        """Store these slots in the drafter's memory, with what was observed since."""

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        """The whole tree under every anchor."""
        return Proposed(slots.anchor.new_empty(slots.anchor.shape[0], 0), torch.zeros_like(slots.anchor))

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        """Like `Drafter.observe`; `slots` are as they were before the step."""


class StaticTarget(Protocol):
    """The target's part of the step."""

    def verify(self, slots: StaticSlots, draft: Draft, nodes: int) -> Scores:
        """Like `Target.verify`, for the first `nodes` of the draft, with the choices of its rows."""

    def keep(self, slots: StaticSlots, walked: AcceptedTensors) -> None:
        """Keep anchor and path in the cache, in contiguous columns."""


class StaticRule(Protocol):
    """How drafts are sampled and judged."""

    def distribution(self, logits: Tensor, slots: StaticSlots) -> Tensor:
        """The distribution of each slot, [B, ..., V], from logits [B, ..., V]."""

    def drawn(self, logits: Tensor, slots: StaticSlots, depth: int) -> tuple[Tensor, Tensor | None]:
        """A drafted token per slot [B], from logits [B, V], and the q [B, V] that it was sampled from."""

    def accept(self, draft: Draft, scores: Scores, slots: StaticSlots) -> AcceptedTensors:
        """The accepted part of the draft."""


class StaticStep(NamedTuple):
    """One step of a batch: `step` with its arguments."""

    slots: StaticSlots
    draft: StaticDraft
    target: Any
    """A `StaticTarget` and `StaticPart`."""
    drafter: StaticDrafter
    rule: StaticRule
    ends: Tensor
    """[E], ids that end a text."""

    def __call__(self, nodes: int) -> Tensor:
        return step(*self, nodes)

    @property
    def caches(self) -> list[Any]:
        return [*self.target.caches, *self.drafter.caches]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.slots.tensors, *self.draft.tensors, *self.target.tensors, *self.drafter.tensors]

    def over(self, tensors: Sequence[Tensor], caches: Sequence[Any]) -> StaticStep:
        """The same over other tensors and caches, in these orders."""
        rest, (target_cache, *drafter_caches) = iter(tensors), caches
        slots = self.slots.over(islice(rest, len(self.slots.tensors)))
        draft = self.draft.over(islice(rest, len(self.draft.tensors)))
        target = self.target.over(islice(rest, len(self.target.tensors)), caches=[target_cache])
        drafter = self.drafter.over(rest, caches=drafter_caches)
        draft.drafter = drafter
        return self._replace(slots=slots, draft=draft, target=target, drafter=drafter)


def step(
    slots: StaticSlots, waiting: StaticDraft, target: StaticTarget, drafter: StaticDrafter, rule: StaticRule,
    ends: Tensor, nodes: int,
) -> Tensor:  # fmt: skip
    """Advance every live slot by one verified step, and draft for the next.

    nodes: maximum number of verified nodes of a draft; no slot of `waiting` has more.  ends [E]: ids that end a text.
    Returns [B, ...] int64, for `SlotResult.read`.
    """
    draft = waiting.draft(nodes)
    scores = target.verify(slots, draft, nodes)
    walked = rule.accept(draft, scores, slots)
    committed, has_ended = cut(draft, walked, scores, slots, ends)
    target.keep(slots, walked)
    drafter.observe(slots, committed, scores)
    path = torch.nn.functional.pad(walked.path, (0, drafter.nodes - walked.path.shape[1]))
    numbers = committed.counts, walked.counts, walked.next_tokens, walked.invalid, is_wrong(committed, scores).long()
    _advance(slots, committed, has_ended)
    waiting.hold(drafter.propose(slots, rule))
    return torch.cat([path, torch.stack(numbers, 1), drafted(waiting)], 1)


def drafted(waiting: StaticDraft) -> Tensor:
    """[B, ...] int64, the draft for the host: sizes, tokens, and parents and confidences if they vary."""
    parts = [waiting.sizes[:, None], waiting.tokens]
    if waiting.drafter.varies:
        parts.append(waiting.parents)
    if waiting.drafter.has_confidence:
        parts.append((waiting.confidence.double() * SURE).round().long())
    return torch.cat(parts, 1)


SURE = 2**30
"""A confidence of 1 in these integers."""


def cut(
    draft: Draft, walked: AcceptedTensors, scores: Scores, slots: StaticSlots, ends: Tensor
) -> tuple[Committed, Tensor]:  # fmt: skip
    """The part of path and next token that belongs to each text, and [B] whether it ends there."""
    assert scores.choice is not None
    (count, nodes), device = draft.tokens.shape, draft.tokens.device
    path = torch.nn.functional.pad(walked.path.clamp(min=0), (0, nodes + 1 - walked.path.shape[1]))
    order = torch.arange(nodes + 1, device=device).expand(count, -1)
    path_tokens = torch.nn.functional.pad(draft.tokens, (0, 1)).gather(1, path)
    tokens = torch.where(order == walked.counts[:, None], walked.next_tokens[:, None], path_tokens)
    is_end = (tokens[..., None] == ends).any(-1)
    ended_before = is_end.cumsum(1) - is_end.long()
    stays = (order <= walked.counts[:, None]) & (ended_before == 0) & slots.live[:, None]
    counts = stays.sum(1)
    last = torch.arange(scores.choice.shape[1], device=device)[-1]  # entries after a path may be any node
    rows = torch.nn.functional.pad(path[:, :nodes] + 1, (1, 0)).minimum(last)
    return Committed(tokens, rows, counts), (is_end & stays).any(1) | (counts >= slots.left)


def is_wrong(committed: Committed, scores: Scores) -> Tensor:
    """[B], whether a committed token comes from logits whose largest value is not finite."""
    assert scores.choice is not None
    order = torch.arange(committed.rows.shape[1], device=committed.rows.device)
    choices = scores.choice.gather(1, committed.rows)
    return ((choices < 0) & (order < committed.counts[:, None])).any(1)


def _advance(slots: StaticSlots, committed: Committed, has_ended: Tensor) -> None:
    counts = committed.counts
    last = committed.tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    slots.anchor.copy_(torch.where(counts > 0, last, slots.anchor))
    slots.length.add_(counts)
    slots.index.add_(counts)
    slots.left.sub_(counts)
    slots.live.logical_and_(~has_ended)


class PendingDraft(NamedTuple):
    """A slot's pending draft, as the host reads it."""

    size: int
    """Number of nodes that the drafter proposes."""
    tokens: list[int]
    parents: Sequence[int]
    confidence: list[float] | None

    @classmethod
    def read(cls, row: Sequence[int], drafter: StaticDrafter) -> PendingDraft:
        """From a row of `drafted`."""
        n, (size, *rest) = drafter.nodes, row
        parents = rest[n : 2 * n] if drafter.varies else drafter.parents
        sure = [each / SURE for each in rest[-n:]] if drafter.has_confidence and n else None
        return cls(size, rest[:n], parents, sure)


class SlotResult(NamedTuple):
    """The result of a step for one slot."""

    path: list[int]
    """Accepted nodes."""
    committed: int
    """Number of tokens that belong to its text."""
    next_token: int
    invalid: int
    is_wrong: bool
    """Whether a token was committed from logits that are not finite."""
    drafted: PendingDraft

    @classmethod
    def read(cls, row: Sequence[int], drafter: StaticDrafter) -> SlotResult:
        """From a row of what `step` returns."""
        n = drafter.nodes
        committed, count, following, invalid, wrong = row[n : n + 5]
        return cls(
            list(row[:count]), committed, following, invalid, bool(wrong), PendingDraft.read(row[n + 5 :], drafter)
        )


def sizes_of(slots: StaticSlots, nodes: int, is_ready: Tensor | None = None) -> Tensor:
    """[B], how many of a draft's nodes are verified: as many as a text has room for, or none if not `is_ready` [B]."""
    sizes = torch.where(slots.live, (slots.left - 1).clamp(max=nodes), 0)
    return sizes if is_ready is None else sizes * is_ready


def parents_tensor(parents: Sequence[int], slots: int, device: torch.device) -> Tensor:
    """These parents in every slot, [B, N]."""
    return torch.tensor(parents, dtype=torch.int64, device=device).expand(slots, -1).contiguous()


def fixed(tokens: Tensor, parents: Sequence[int], above: Tensor, sizes: Tensor, q: Tensor | None) -> Draft:
    """The draft of a tree whose parents are on the host and, as `above` [B, N], on the device."""
    branches = list(parents) != list(range(-1, len(parents) - 1))
    draft = Draft(tokens, above, sizes, q, branches=branches)
    vars(draft)["tree"] = (tuple(parents),)  # every slot's
    return draft
