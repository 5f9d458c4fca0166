"""The step of `loop` as tensors alone: draft, verify, accept, commit, observe, and the host reads none of it.

Every tensor stays where it is and is written in place, so the step can be recorded once and repeated.  Ends by token
and by length are found here; the tree is the same in every step, and near a slot's end fewer of its nodes count.  One
row of numbers a slot says what was committed, for the host to read when it likes: it may run ahead.

B slots, live or not; N nodes, V vocabulary, E ids that end a text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from outrider.decoding.accept import Walked
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.state import DecodeState, Scores


class Stays:
    """A part of the step: its tensors are written in place, and have a row for every slot."""

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in vars(self).values() if isinstance(each, Tensor)]

    def over(self, tensors: Iterable[Tensor], **changed: Any) -> Self:
        """The same part over other tensors, in the order of `tensors`."""
        there, names = copy.copy(self), [name for name, each in vars(self).items() if isinstance(each, Tensor)]
        vars(there).update(zip(names, tensors, strict=True), **changed)
        return there


@dataclass
class StaticSlots(Stays):
    """Where every slot stands."""

    anchor: Tensor
    """[B] int64, the last committed token."""
    length: Tensor
    """[B] int64, tokens before the anchor, which the target has read."""
    index: Tensor
    """[B] int64, output index of the next token."""
    left: Tensor
    """[B] int64, tokens that the text may still grow by."""
    live: Tensor
    """[B] bool."""
    seeds: Tensor
    """[B] int64."""
    seeded: Tensor
    """[B] bool, as in `Streams`."""
    temperature: Tensor
    """[B] float32; 0 is greedy."""
    has_seeded: bool = True
    """Whether some request of the batch may draft with the target's noise."""

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> StaticSlots:
        numbers = torch.zeros(5, slots, dtype=torch.int64, device=device)
        live, seeded = torch.zeros(2, slots, dtype=torch.bool, device=device)
        temperature = torch.zeros(slots, device=device)
        anchor, length, index, left, seeds = numbers
        return cls(anchor, length, index, left, live, seeds, seeded, temperature)

    @property
    def streams(self) -> Streams:
        return Streams(self.seeds, self.index, self.seeded if self.has_seeded else None)

    def enter(self, row: int, state: DecodeState) -> None:
        """Slot `row` of the state begins; its prompt was read.  Numbers are written one by one: nothing is sent."""
        request, text = state.requests[row], state.tokens[row]
        seed = request.sampling.seed
        values = (
            text[-1], len(text) - 1, len(text) - len(request.prompt), state.left_of(row), True, state.seeds[row],
            state.shared_noise and seed is not None, float(request.sampling.temperature),
        )  # fmt: skip
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor[row] = value

    def leave(self, row: int) -> None:
        self.live[row] = False


class Committed(NamedTuple):
    """What a step appended to the texts, also where they ended by it."""

    tokens: Tensor
    """[B, N+1], of which the first `counts` are real."""
    rows: Tensor
    """[B, N+1], the row of the verified pass that each was predicted by: 0, then a node's."""
    counts: Tensor
    """[B], 0 where the slot is not live."""


class StaticDrafter(Stays):
    """A drafter's part of the step; what `Drafter.static` returns.  This one drafts nothing."""

    parents: Sequence[int] = ()
    """Its tree, the same in every step."""
    varies = False
    """Whether its tree hangs on the tokens that are drafted, and has no `parents`."""
    model: Any = None
    """The module with all weights that it reads, besides the target's."""
    code: Sequence[ModuleType] = ()
    """Modules that it calls, besides those of its classes: a package of its steps is another where they change."""
    caches: Sequence[Any] = ()
    """Its own, each a `targets.static_pass.StaticCache`."""

    @property
    def nodes(self) -> int:
        """Of its trees."""
        return len(self.parents)

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        """Take over what `admit` stored of these slots' prompts."""

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Draft:
        """The whole tree under every anchor, as `fixed` makes it, of which `sizes_of` are verified."""
        nothing = slots.anchor.new_empty(slots.anchor.shape[0], 0)
        return fixed(nothing, (), nothing, torch.zeros_like(slots.anchor), None)

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        """As `Drafter.observe`; `slots` are as they were before the step."""


class StaticTarget(Protocol):
    """The target's part of the step."""

    def verify(self, slots: StaticSlots, draft: Draft) -> Scores:
        """As `Target.verify`, with the choices of its rows."""

    def keep(self, slots: StaticSlots, walked: Walked) -> None:
        """Anchor and path stay, moved together."""


class StaticRule(Protocol):
    """How drafts are drawn and judged."""

    def distribution(self, logits: Tensor, slots: StaticSlots) -> Tensor:
        """What each slot draws from, [B, ..., V], by logits [B, ..., V]."""

    def drawn(self, logits: Tensor, slots: StaticSlots, depth: int) -> tuple[Tensor, Tensor | None]:
        """A drafted token a slot [B], from logits [B, V], and the q [B, V] that it was drawn from."""

    def accept(self, draft: Draft, scores: Scores, slots: StaticSlots) -> Walked:
        """What of the draft stays."""


class StaticStep(NamedTuple):
    """One step of a batch, and what it is made of: `step` with its arguments."""

    slots: StaticSlots
    target: Any
    """A `StaticTarget`, whose tensors stay too."""
    drafter: StaticDrafter
    rule: StaticRule
    ends: Tensor
    """[E], ids that end a text."""

    def __call__(self) -> Tensor:
        return step(*self)

    @property
    def caches(self) -> list[Any]:
        return [*self.target.caches, *self.drafter.caches]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.slots.tensors, *self.target.tensors, *self.drafter.tensors]

    def over(self, tensors: Sequence[Tensor], caches: Sequence[Any]) -> StaticStep:
        """The same over other tensors and caches, in these orders."""
        rest, (own, *theirs) = iter(tensors), caches
        slots = self.slots.over(islice(rest, len(self.slots.tensors)))
        target = self.target.over(islice(rest, len(self.target.tensors)), caches=[own])
        return self._replace(slots=slots, target=target, drafter=self.drafter.over(rest, caches=theirs))


Launched = Callable[[], Mapping[int, list[int]]]
"""Waits for a step, and reads what it did to each slot, for `Outcome.read`."""


def step(
    slots: StaticSlots, target: StaticTarget, drafter: StaticDrafter, rule: StaticRule, ends: Tensor
) -> Tensor:  # fmt: skip
    """Advance every live slot by one verified step.  ends [E]: ids that end a text.

    Returns [B, N+6] int64, which `Outcome.read` reads.
    """
    draft = drafter.propose(slots, rule)
    scores = target.verify(slots, draft)
    walked = rule.accept(draft, scores, slots)
    committed, has_ended = cut(draft, walked, slots, ends)
    target.keep(slots, walked)
    drafter.observe(slots, committed, scores)
    reach = reached(draft) if drafter.varies else draft.sizes
    numbers = committed.counts, walked.counts, reach, walked.invalid, is_wrong(committed, scores).long()
    _advance(slots, committed, has_ended)
    return torch.cat([committed.tokens, torch.stack(numbers, 1)], 1)


def cut(draft: Draft, walked: Walked, slots: StaticSlots, ends: Tensor) -> tuple[Committed, Tensor]:
    """What of path and next token belongs to each text, and [B] whether it ends there."""
    (count, nodes), device = draft.tokens.shape, draft.tokens.device
    path = torch.nn.functional.pad(walked.path.clamp(min=0), (0, nodes + 1 - walked.path.shape[1]))
    order = torch.arange(nodes + 1, device=device).expand(count, -1)
    own = torch.nn.functional.pad(draft.tokens, (0, 1)).gather(1, path)
    tokens = torch.where(order == walked.counts[:, None], walked.next_tokens[:, None], own)
    is_end = (tokens[..., None] == ends).any(-1)
    ended_before = is_end.cumsum(1) - is_end.long()
    stays = (order <= walked.counts[:, None]) & (ended_before == 0) & slots.live[:, None]
    counts = stays.sum(1)
    rows = torch.nn.functional.pad(path[:, :nodes] + 1, (1, 0))
    return Committed(tokens, rows, counts), (is_end & stays).any(1) | (counts >= slots.left)


def is_wrong(committed: Committed, scores: Scores) -> Tensor:
    """[B], whether a committed token comes from logits whose largest is not finite."""
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


class Outcome(NamedTuple):
    """What a step did to one slot."""

    tokens: list[int]
    accepted: int
    """How many of the tokens were drafted, the first ones."""
    size: int
    """Nodes that were verified; how deep they went where trees differ from step to step."""
    invalid: int
    is_wrong: bool

    @classmethod
    def read(cls, row: Sequence[int]) -> Outcome:
        *tokens, committed, accepted, size, invalid, wrong = row
        return cls(tokens[:committed], min(accepted, committed), size, invalid, bool(wrong))


class NoStatic(Exception):
    """The step can't be one of tensors alone; the message says why."""


def sizes_of(slots: StaticSlots, nodes: int, known: Tensor | None = None) -> Tensor:
    """[B], how many of a draft's nodes are verified: as many as a text has room for, none where nothing is known."""
    sizes = torch.where(slots.live, (slots.left - 1).clamp(max=nodes), 0)
    return sizes if known is None else sizes * known


def reached(draft: Draft) -> Tensor:
    """[B], how deep the nodes that are verified go."""
    _, depths = draft.rows()
    order = torch.arange(draft.tokens.shape[1], device=draft.tokens.device)
    return torch.where(order < draft.sizes[:, None], depths[:, 1:], 0).amax(1)


def above(parents: Sequence[int], slots: int, device: torch.device) -> Tensor:
    """These parents in every slot, [B, N]."""
    return torch.tensor(parents, dtype=torch.int64, device=device).expand(slots, -1).contiguous()


def fixed(tokens: Tensor, parents: Sequence[int], above: Tensor, sizes: Tensor, q: Tensor | None) -> Draft:
    """The draft of a tree whose parents are known to the host and, as `above` [B, N], are on the device."""
    branches = list(parents) != list(range(-1, len(parents) - 1))
    draft = Draft(tokens, above, sizes, q, branches=branches)
    vars(draft)["tree"] = (tuple(parents),)  # every slot's
    return draft
