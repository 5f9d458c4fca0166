"""What served drafters share: features that wait to be read, and the one way to draw a draft's tokens.

B live slots, N drafted nodes, V vocabulary, C features that wait.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider import packed
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import trees
from outrider.nn.draft_model import DraftModel
from outrider.targets.protocol import Target


class FeatureBuffer:
    """What the target said of every slot's tokens and the drafter has not read yet, in order."""

    MOST = 256
    """Passes that are held as they came; a slot's share of them is taken once it is asked for, so that nothing is copied for a
    text that ends before."""

    def __init__(self, slots: int, taps: int, target: Target, dtype: torch.dtype):
        """taps: hidden states that are a feature of one token."""
        self._parts: list[list[Tensor]] = [[] for _ in range(slots)]
        self._passed: list[tuple[int, list[int], Tensor, Accepted]] = []
        """Number of a verified pass, its slots, features [B, N+1, ...], and what was kept of it."""
        self._count, self._begins = 0, [0] * slots
        """Passes so far, and how many there were when each slot was freed."""
        self._none = torch.empty(0, taps, target.spec.hidden, device=target.device, dtype=dtype)

    def admit(self, rows: Sequence[int], features: Tensor, lengths: Sequence[int]) -> None:
        """Of a prompt's chunk, features [R, S, ...], right-padded."""
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            self._parts[row].append(features[b, :length].to(self._none))

    def observe(self, rows: list[int], features: Tensor, accepted: Accepted) -> None:
        """Of the old anchor and of what was kept after it, features [B, N+1, ...] of the verified pass."""
        self._passed.append((self._count, rows, features, accepted))
        self._count += 1
        if len(self._passed) > self.MOST:
            self._share_out()

    def count(self, row: int) -> int:
        """How many wait."""
        self._share_out()
        return sum(map(len, self._parts[row]))

    def _share_out(self) -> None:
        """Give each slot its part of the passes that are held; plain ones of the same slots as one."""
        passed, self._passed = self._passed, []
        for (rows, width), group in itertools.groupby(passed, lambda each: (each[1], each[2].shape[1])):
            alike = list(group)
            if width == 1:
                whole = torch.cat([features for _, _, features, _ in alike], 1).to(self._none)
                for b, row in enumerate(rows):
                    self._parts[row].append(whole[b, max(0, self._begins[row] - alike[0][0]) :])
                continue
            for number, _, features, accepted in alike:
                for b in (b for b, row in enumerate(rows) if number >= self._begins[row]):
                    row, at = rows[b], accepted.rows(b)
                    is_straight = at == list(range(len(at)))
                    self._parts[row].append((features[b, : len(at)] if is_straight else features[b, at]).to(self._none))

    def take(self, rows: Sequence[int], most: Sequence[int] | None = None) -> tuple[Tensor, list[int]]:
        """The first most[i] that wait, or all: [B, C, ...], right-padded, and how many are real."""
        self._share_out()
        found = []
        for i, row in enumerate(rows):
            parts = self._parts[row] or [self._none]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            count = len(whole) if most is None else most[i]
            found.append(whole[:count])
            self._parts[row] = [whole[count:]] if count < len(whole) else []
        padded = found[0][None] if len(found) == 1 else nn.utils.rnn.pad_sequence(found, batch_first=True)
        return padded, [len(own) for own in found]

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._parts[row], self._begins[row] = [], self._count
        self._passed = [each for each in self._passed if any(self._begins[row] <= each[0] for row in each[1])]


class FeatureDrafter(Drafter, ABC):
    """A drafter that reads the target's features of every committed token, once.

    Its memory has `kept`, a SlotCache of what was read, and `waiting`, a FeatureBuffer of what was not.  What a step brings is
    read together with the next draft; more than that, such as a prompt, before it.
    """

    def __init__(self, model: DraftModel, most: int):
        """most: features of one slot that the next draft reads."""
        packed.pack(model)
        self.taps, self.hidden, self.most, self.seen = model.taps, model.target.spec.hidden, most, model.seen

    def admit(self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        memory.waiting.admit(rows, self.seen(scores), lengths)
        self.catch_up(memory, rows, state)

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        memory.waiting.observe(state.rows, self.seen(scores), accepted)

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        memory.kept.free(rows)
        memory.waiting.free(rows)

    @torch.inference_mode()
    def catch_up(self, memory: Any, rows: Sequence[int], state: DecodeState) -> None:
        """Let no slot wait with more than the next draft reads; each is read by itself, so none is padded."""
        for row in rows:
            if memory.waiting.count(row) > self.most:
                self.read(memory, row, state)

    @abstractmethod
    def read(self, memory: Any, row: int, state: DecodeState) -> None:
        """Read what waits in this slot, without drafting."""


class Sampler:
    """Draws a draft's tokens, depth by depth: the likeliest at temperature 0, else from the request's distribution, kept as q.

    What can't stand at a place has no chance there: banned tokens are masked by the tokens drawn before.
    """

    def __init__(self, state: DecodeState):
        self.state, self.streams = state, state.streams
        self.tokens: list[Tensor] = []
        self.q: list[Tensor] = []

    def next(self, logits: Tensor) -> Tensor:
        """One token a slot, [B].  logits [B, V] behind the last ones."""
        return self.draw(self.state.judge.masked(logits, self.tokens))

    def draw(self, logits: Tensor) -> Tensor:
        """As `next`, of logits that are masked already."""
        if self.state.judge.temperature is None:
            self.tokens.append(logits.argmax(-1))
        else:
            self.q.append(self.state.judge.distribution(logits))
            self.tokens.append(self.streams.draw(self.q[-1], len(self.tokens), Purpose.DRAFT))
        return self.tokens[-1]

    def draft(self, sizes: Tensor, confidence: Tensor | None = None) -> Draft:
        """The chain of what was drawn.  sizes [B] int64 on the CPU."""
        if not self.tokens:
            return Draft.empty(len(self.state.rows), self.state.device)
        return Draft.chain(torch.stack(self.tokens, 1), sizes, torch.stack(self.q, 1) if self.q else None, confidence)


def chain(first: Tensor, read_one: Callable[[Tensor], Tensor], budget: Tensor, state: DecodeState) -> Draft:
    """Token after token.  first [B, V], logits behind the anchor.

    read_one reads one drafted token a slot, [B], and returns the logits [B, V] behind it; the last token is never read.
    """
    sampler, logits = Sampler(state), first
    for depth in range(int(budget.max())):
        if depth:
            logits = read_one(sampler.tokens[-1])
        sampler.next(logits)
    return sampler.draft(budget)


def side_by_side(logits: Tensor, budget: Tensor, state: DecodeState) -> Draft:
    """A chain whose places do not know of each other.  logits [B, at least budget, V] of every place."""
    later = iter(logits.unbind(1)[1:])
    return chain(logits[:, 0], lambda _drafted: next(later), budget, state)


def tree(
    first: Tensor, expand: trees.Expand, budget: Tensor, state: DecodeState, *, width: int, depth: int, parents: Sequence[int],
    replacement: bool = False,
) -> Draft:  # fmt: skip
    """The likeliest paths at temperature 0, `parents` with drawn nodes else.  first [B, V], logits behind the anchor."""

    def possible(tree: Draft, fresh: int) -> Tensor:
        return masked(expand(tree, fresh), tree, state)

    first = state.judge.masked(first)
    if state.judge.temperature is None:
        return trees.beam(first, possible, budget, width=width, depth=depth)
    return trees.sampled(first, possible, budget, state, parents=parents, replacement=replacement)


class Branching:
    """A chain, or a tree where the config's width is above 1, of a drafter that reads its own tokens."""

    def __init__(self, config: Any):
        """config: its length, width, nodes and replacement."""
        self.config, self.width = config, config.width
        self.parents = trees.shape(self.width, config.length, config.nodes) if self.width > 1 else ()
        self.limit = len(self.parents) or config.length

    def draft(
        self, first: Tensor, read_one: Callable[[Tensor], Tensor], expand: trees.Expand, budget: Tensor, state: DecodeState
    ) -> Draft:
        """read_one as in `chain`, expand as in `tree`."""
        if self.width == 1:
            return chain(first, read_one, budget, state)
        shape: Any = {"width": self.width, "depth": self.config.length, "parents": self.parents}
        return tree(first, expand, budget, state, **shape, replacement=self.config.replacement)


def allowed(config: Any, target: Target) -> Any:
    """The config, with width 1 where the target verifies no trees; says which settings have no effect."""
    if config.width == 1:
        idle = {"nodes": False, "replacement": False}
        warn_idle(config.kind, config, idle, "on a chain; set width above 1 for a tree")
    elif not verifies_trees(target, config.kind, f"a chain of {config.length}, as with width 1"):
        return config.model_copy(update={"width": 1})
    return config


def masked(logits: Tensor, tree: Draft, state: DecodeState) -> Tensor:
    """logits [B, fresh, V] behind the last nodes of the tree with -inf where no token may follow; see `Judge.masked`."""
    if not state.judge.bans:
        return logits
    fresh, path = logits.shape[1], trees.path(tree, logits.shape[1])
    return torch.stack([state.judge.masked(logits[:, w], [step[:, w] for step in path]) for w in range(fresh)], 1)


def possible(draft: Draft, state: DecodeState) -> Draft:
    """The draft up to the first node that no distribution is left for: nothing that can be drafted may stand there.

    That is known before the node is drawn, so a slot may end there.
    """
    if draft.q is None or not state.judge.bans:
        return draft
    is_law = draft.q.isfinite().all(-1).long().cumprod(-1).sum(-1)
    return draft.first(torch.minimum(draft.sizes, is_law.cpu()))


def verifies_trees(target: Target, kind: str, instead: str) -> bool:
    """Whether the target does; where not, one line says what `kind` drafts instead."""
    if target.spec.mode != "tree":
        message = "%s verifies no trees (its mode is %s): %s drafts %s"
        logging.getLogger(__name__).warning(message, target.spec.name, target.spec.mode, kind, instead)
    return target.spec.mode == "tree"


def warn_idle(kind: str, config: object, needs: Mapping[str, object], because: str) -> None:
    """Say which settings were given and have no effect.  needs: setting to whether something uses it."""
    fields = type(config).model_fields  # type: ignore[attr-defined]
    idle = [name for name, is_used in needs.items() if not is_used and getattr(config, name) != fields[name].default]
    if idle:
        logging.getLogger(__name__).warning("%s.%s has no effect %s", kind, " and ".join(idle), because)
