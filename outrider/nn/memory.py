"""What drafters store for every slot: features that are not read yet, the target's last state, or a value of their own.

B live slots, R rows of a pass, S tokens, N drafted nodes, C unread features, T taps, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded, to_device
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.kernels import prepacked
from outrider.nn.draft_model import DraftModel
from outrider.nn.drafting import serving, trees
from outrider.retrieval.texts import TextIndex, Tries
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import Target

# ── features of every token ───────────────────────────────────────────────────────────────────────────────────────────


class FeatureBuffer:
    """The target's features of every slot's tokens that the drafter has not read yet, in order.

    A feature and the next token are a pair, which drafters like EAGLE read (Li et al. 2401.15077): pair i holds the
    taps of position i and token i + 1, has rotary position i, and is known once that token is, so the newest one ends
    in the anchor. A draft from pair i predicts token i + 2 first.
    """

    MAX_PASSES = 256
    """Passes whose features are stored without a copy, so that nothing is copied for a text that ends before."""
    MAX_UNREAD = 256
    """Features of a slot that stay unread while nothing is drafted."""

    def __init__(self, slots: int, taps: int, target: Target, dtype: torch.dtype):
        """taps: hidden states in a feature of one token."""
        self._parts: list[list[tuple[Tensor, Sequence[int]]]] = [[] for _ in range(slots)]
        """Per slot: features [n, ...] of passes, and which of their rows are unread, ascending."""
        self._plain: list[Tensor] = []
        """Features [B, 1, ...] of the newest passes, where these drafted nothing: they are given to `_rows` at once."""
        self._rows: list[int] = []
        self._none = torch.empty(0, taps, target.spec.hidden, device=target.device, dtype=dtype)
        self.read = [0] * slots
        """How many features of each slot were read."""

    def admit(self, rows: Sequence[int], features: Tensor, lengths: Sequence[int]) -> None:
        """Add features [R, S, ...] of a prompt's chunk, right-padded."""
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            self._parts[row].append((features[b], range(length)))

    def observe(self, rows: list[int], features: Tensor, accepted: Accepted) -> None:
        """Add the features of the old anchor and the accepted tokens.  features [B, N+1, ...] of the verified pass."""
        if features.shape[1] == 1:
            if rows != self._rows or len(self._plain) == self.MAX_PASSES:
                self._flush()
            self._rows = rows
            self._plain.append(features)
            return
        self._flush()
        for b, row in enumerate(rows):
            self._parts[row].append((features[b], accepted.rows(b)))
            if len(self._parts[row]) > self.MAX_PASSES:
                self._hold(row, self._whole(row))

    def new(self, width: int) -> Tensor:
        """Zeros for `width` features of every slot, [slots, width, ...]."""
        return self._none.new_zeros(len(self._parts), width, *self._none.shape[1:])

    @property
    def is_long(self) -> bool:
        """So many passes drafted nothing that some slots may have more than `MAX_UNREAD`."""
        return len(self._plain) == self.MAX_PASSES

    def count(self, row: int) -> int:
        """The number of unread entries."""
        self._flush()
        return sum(len(at) for _, at in self._parts[row])

    def _flush(self) -> None:
        """Give each slot its features of the plain passes."""
        plain, self._plain = self._plain, []
        if plain:
            features = torch.cat(plain, 1)
            for b, row in enumerate(self._rows):
                self._parts[row].append((features[b], range(len(plain))))

    def _whole(self, row: int) -> Tensor:
        """All unread features, [C, ...]."""
        parts = [
            (features[: len(at)] if not at or at[-1] == len(at) - 1 else features[list(at)]).to(self._none)
            for features, at in self._parts[row]
        ]
        return parts[0] if len(parts) == 1 else torch.cat([self._none, *parts])

    def _hold(self, row: int, whole: Tensor) -> None:
        self._parts[row] = [(whole, range(len(whole)))] if len(whole) else []

    def take(self, rows: Sequence[int], most: Sequence[int] | None = None) -> tuple[Tensor, list[int]]:
        """Take the first most[i] unread features, or all: [B, C, ...], right-padded, and how many are real."""
        self._flush()
        found = []
        for i, row in enumerate(rows):
            whole = self._whole(row)
            count = len(whole) if most is None else most[i]
            found.append(whole[:count])
            self._hold(row, whole[count:])
            self.read[row] += len(found[-1])
        padded = found[0][None] if len(found) == 1 else nn.utils.rnn.pad_sequence(found, batch_first=True)
        return padded, [len(own) for own in found]

    def take_with_tokens(
        self, rows: Sequence[int], state: DecodeState, leave: int = 0
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Take all pairs but the last `leave`: taps [B, C, T, H], tokens [B, C], right-padded, and how many are
        real."""
        begins = [self.read[row] + 1 for row in rows]
        taps, counts = self.take(rows, [max(0, self.count(row) - leave) for row in rows])
        spans = zip(rows, begins, counts, strict=True)
        tokens = [state.tokens[row][begin : begin + count] for row, begin, count in spans]
        return taps, padded(tokens, 0, state.device), counts

    def put_back(self, row: int, features: Tensor, read: int) -> None:
        """These features [C, ...] of a slot are unread, after `read` others."""
        self._flush()
        self._hold(row, features)
        self.read[row] = read

    def free(self, rows: Sequence[int]) -> None:
        self._flush()
        for row in rows:
            self._parts[row], self.read[row] = [], 0


class FeatureMemory:
    """Keys and values of what every slot has read, and the features that it has not read yet."""

    def __init__(self, slots: int, length: int, layers: int, model: DraftModel):
        self.kv_cache = SlotCache(slots, length, model.target.device, layers)
        self.features = FeatureBuffer(slots, max(1, len(model.taps)), model.target, model.dtype)


class FeatureDrafter(Drafter, ABC):
    """A drafter that reads the target's features of every committed token, once; its memory is `FeatureMemory`.

    The features of a step are read together with the next draft; more than that, such as a prompt, before it.  While
    nothing is drafted, `FeatureBuffer.MAX_UNREAD` of a slot wait for the next draft, if there is one.  Of a text that
    wants no drafts (`Request.max_draft` 0) no prompt is read.
    """

    def __init__(self, model: DraftModel, limit: int, most: int):
        """most: features of one slot that the next draft reads."""
        self._packed = prepacked.Packed(model)
        self.model: Any = model
        self.limit, self.most = limit, most
        self.taps, self.hidden = model.taps, model.target.spec.hidden

    def refresh(self) -> None:
        if self._packed.refresh():
            for step in self.steps:
                step.renew()

    def admit(
        self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        wanted = [b for b, row in enumerate(rows) if state.wants_drafts(row)]
        if not wanted:
            return
        states = self.model.target_states(scores)
        if len(wanted) < len(rows):
            rows, lengths = [rows[b] for b in wanted], [lengths[b] for b in wanted]
            states = states[to_device(wanted, states.device)]
        memory.features.admit(rows, states, lengths)
        self.catch_up(memory, rows, state, self.most if state.is_drafting else memory.features.MAX_UNREAD)

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        if not any(map(state.wants_drafts, state.rows)):
            return
        memory.features.observe(state.rows, self.model.target_states(scores), accepted)
        if memory.features.is_long:
            self.catch_up(memory, state.rows, state, memory.features.MAX_UNREAD)

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        memory.kv_cache.free(rows)
        memory.features.free(rows)

    @torch.inference_mode()
    def catch_up(self, memory: Any, rows: Sequence[int], state: DecodeState, most: int | None = None) -> None:
        """Read ahead in slots with more unread features than `most`, which is what the next draft reads unless given;
        each slot alone, so none is padded."""
        most = self.most if most is None else most
        for row in rows:
            if memory.features.count(row) > most:
                self.read(memory, row, state)

    @abstractmethod
    def read(self, memory: Any, row: int, state: DecodeState) -> None:
        """Read this slot's features, without drafting."""


class PairDrafter(FeatureDrafter, ABC):
    """A drafter that reads pairs.  It drafts nothing before a text's second token, where there is no pair yet."""

    @torch.inference_mode()
    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        is_known = [bool(memory.features.read[row] or memory.features.count(row)) for row in state.rows]
        sizes = budget * torch.tensor(is_known)
        if not int(sizes.max()):
            return Draft.empty(len(state.rows), state.device)
        self.catch_up(memory, state.rows, state)
        with prepacked.enabled():
            return serving.possible(self.draft(memory, state, sizes), state)

    @abstractmethod
    def draft(self, memory: Any, state: DecodeState, sizes: Tensor) -> Draft:
        """At most sizes[b] nodes a slot; some slot has one."""


# ── the last state alone ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class LastStates:
    """The target's hidden state of the last token that it read in every slot, and its cache."""

    hidden: Tensor
    """[slots, H]; 0 before the first token."""
    known: list[bool]
    cache: Any


class StateDrafter(Drafter, ABC):
    """Drafts from these states; nothing after a text's first token, where none is known."""

    def __init__(self, target: Target, dtype: torch.dtype, limit: int):
        self.target, self.dtype, self.limit = target, dtype, limit

    def allocate(self, cache: Cache) -> LastStates:
        hidden = torch.zeros(cache.slots, self.target.spec.hidden, device=self.target.device, dtype=self.dtype)
        return LastStates(hidden, [False] * cache.slots, cache)

    def admit(
        self, memory: LastStates, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self._keep(memory, rows, scores.hidden, [length - 1 for length in lengths])

    def observe(self, memory: LastStates, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        self._keep(memory, state.rows, scores.hidden, [accepted.rows(b)[-1] for b in range(len(state.rows))])

    @torch.inference_mode()
    def propose(self, memory: LastStates, state: DecodeState, budget: Tensor) -> Draft:
        sizes = budget * torch.tensor([memory.known[row] for row in state.rows])
        if not int(sizes.max()):
            return Draft.empty(len(state.rows), state.device)
        with prepacked.enabled():
            return self.draft(memory, state, sizes)

    @abstractmethod
    def draft(self, memory: LastStates, state: DecodeState, sizes: Tensor) -> Draft:
        """At most sizes[b] nodes a slot; some slot has one."""

    def free(self, memory: LastStates, rows: Sequence[int]) -> None:
        memory.hidden[to_device(rows, memory.hidden.device)] = 0
        for row in rows:
            memory.known[row] = False

    def _keep(self, memory: LastStates, rows: Sequence[int], states: Tensor, at: Sequence[int]) -> None:
        """Remember states[b, at[b]] of [R, S, H]."""
        own, slots, last = to_device([*zip(range(len(rows)), rows, at, strict=True)], states.device).unbind(-1)
        memory.hidden[slots.to(memory.hidden.device)] = states[own, last].to(memory.hidden)
        for row in rows:
            memory.known[row] = True


# ── a value of each request ───────────────────────────────────────────────────────────────────────────────────────────

T = TypeVar("T")


class RequestDrafter(Drafter, ABC, Generic[T]):
    """Stores something for each request: it is made when first asked for, and dropped with the request."""

    @abstractmethod
    def new_request(self, tenant: str) -> T:
        """What is stored for a new request of this tenant."""

    def allocate(self, cache: Cache) -> list[T | None]:
        return [None] * cache.slots

    def of(self, memory: list[T | None], state: DecodeState, row: int) -> T:
        """What is stored for this slot's request."""
        found = memory[row] = memory[row] or self.new_request(state.requests[row].tenant)
        return found

    def free(self, memory: list[T | None], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None


class Lookup(RequestDrafter[TextIndex], ABC):
    """Looks up the end of each slot's text; a method says in what."""

    watches = True  # what it observes is the text

    def __init__(self, limit: int, tries: Tries):
        self.limit, self.tries = limit, tries

    def propose(self, memory: list[TextIndex | None], state: DecodeState, budget: Tensor) -> Draft:
        return self.look_up(memory, state, [()] * len(state.rows), budget)

    def look_up(
        self, memory: list[TextIndex | None], state: DecodeState, drafted: Sequence[Sequence[int]], budget: Tensor
    ) -> Draft:
        slots = zip(state.rows, drafted, budget.tolist(), strict=True)
        found = [self._read(memory, state, row).propose(state.tokens[row], most, path) for row, path, most in slots]
        return trees.of_lists([own.tokens for own in found], [own.parents for own in found], state.device)

    def observe(
        self, memory: list[TextIndex | None], state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> None:
        """Others find what was committed at once, even if the text ends here."""
        if self.tries.shared:
            for row in state.rows:
                self._read(memory, state, row)

    def _read(self, memory: list[TextIndex | None], state: DecodeState, row: int) -> TextIndex:
        """The slot's text, everything committed read."""
        text = self.of(memory, state, row)
        text.read(state.tokens[row])
        return text
