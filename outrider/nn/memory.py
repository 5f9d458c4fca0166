"""What drafters store for every slot: features not read yet, the target's last state, or a value of their own.

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

    A feature and the next token are a pair, which drafters like EAGLE read (arXiv 2401.15077): pair i has the taps of
    position i, token i + 1 and rotary position i, so the token of the newest pair is the anchor.  A draft from pair i
    first predicts token i + 2.
    """

    MAX_PASSES = 256
    """Maximum number of passes whose features are stored without a copy; shorter texts never need one."""
    MAX_UNREAD = 256
    """Maximum number of features of a slot that stay unread while nothing is drafted."""

    def __init__(self, slots: int, taps: int, target: Target, dtype: torch.dtype):
        """taps: number of hidden states in the feature of one token."""
        self._parts: list[list[tuple[Tensor, Sequence[int]]]] = [[] for _ in range(slots)]
        """Per slot and pass: features [n, ...] and their unread rows, ascending."""
        self._plain: list[Tensor] = []
        """Features [B, 1, ...] of the latest passes without drafts, all for the slots `_rows`."""
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
        """Whether some slots may have more than `MAX_UNREAD` features, after many passes without drafts."""
        return len(self._plain) == self.MAX_PASSES

    def count(self, row: int) -> int:
        """The number of a slot's unread features."""
        self._flush()
        return sum(len(at) for _, at in self._parts[row])

    def _flush(self) -> None:
        """Move the features of the passes without drafts to their slots."""
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
        """Take the first most[i] unread features, by default all: [B, C, ...], right-padded, and the real counts."""
        self._flush()
        taken = []
        for i, row in enumerate(rows):
            whole = self._whole(row)
            count = len(whole) if most is None else most[i]
            taken.append(whole[:count])
            self._hold(row, whole[count:])
            self.read[row] += len(taken[-1])
        padded = taken[0][None] if len(taken) == 1 else nn.utils.rnn.pad_sequence(taken, batch_first=True)
        return padded, [len(features) for features in taken]

    def take_with_tokens(
        self, rows: Sequence[int], state: DecodeState, leave: int = 0
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Take all pairs except the last `leave`: taps [B, C, T, H] and tokens [B, C], right-padded, and the real
        counts."""
        begins = [self.read[row] + 1 for row in rows]
        taps, counts = self.take(rows, [max(0, self.count(row) - leave) for row in rows])
        spans = zip(rows, begins, counts, strict=True)
        tokens = [state.tokens[row][begin : begin + count] for row, begin, count in spans]
        return taps, padded(tokens, 0, state.device), counts

    def put_back(self, row: int, features: Tensor, read: int) -> None:
        """Mark these features [C, ...] of a slot as unread, after `read` others."""
        self._flush()
        self._hold(row, features)
        self.read[row] = read

    def free(self, rows: Sequence[int]) -> None:
        self._flush()
        for row in rows:
            self._parts[row], self.read[row] = [], 0


class FeatureMemory:
    """Keys and values of what every slot has read, and its unread features."""

    def __init__(self, slots: int, length: int, layers: int, model: DraftModel):
        self.kv_cache = SlotCache(slots, length, model.target.device, layers)
        self.features = FeatureBuffer(slots, max(1, len(model.taps)), model.target, model.dtype)


class FeatureDrafter(Drafter, ABC):
    """A drafter that reads the target's features of every committed token, once; its memory is `FeatureMemory`.

    The features of a step are read together with the next draft; longer ones, such as those of a prompt, are read
    before it.  While nothing is drafted, up to `FeatureBuffer.MAX_UNREAD` features of a slot stay unread.  Requests
    without drafts (`Request.max_draft` 0) are not read at all.
    """

    def __init__(self, model: DraftModel, limit: int, most: int):
        """most: maximum number of features of one slot that a draft reads."""
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
        drafting = [b for b, row in enumerate(rows) if state.wants_drafts(row)]
        if not drafting:
            return
        states = self.model.target_states(scores)
        if len(drafting) < len(rows):
            rows, lengths = [rows[b] for b in drafting], [lengths[b] for b in drafting]
            states = states[to_device(drafting, states.device)]
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
        """Read the features of slots that have more than `most`, by default more than a draft reads; each slot alone,
        without padding."""
        most = self.most if most is None else most
        for row in rows:
            if memory.features.count(row) > most:
                self.read(memory, row, state)

    @abstractmethod
    def read(self, memory: Any, row: int, state: DecodeState) -> None:
        """Read this slot's features without drafting."""


class PairDrafter(FeatureDrafter, ABC):
    """A drafter that reads pairs.  It drafts nothing before a text's second token, since there is no pair yet."""

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
        """A draft of at most sizes[b] nodes per slot; at least one size is above 0."""


# ── the last state alone ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class LastStates:
    """The target's hidden state of the last token that it read in every slot, and the target's cache."""

    hidden: Tensor
    """[slots, H]; 0 before the first token."""
    is_ready: list[bool]
    """False before a slot's first token."""
    cache: Any


class StateDrafter(Drafter, ABC):
    """Drafts from `LastStates`; drafts nothing after a text's first token, since there is no state yet."""

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
        sizes = budget * torch.tensor([memory.is_ready[row] for row in state.rows])
        if not int(sizes.max()):
            return Draft.empty(len(state.rows), state.device)
        with prepacked.enabled():
            return self.draft(memory, state, sizes)

    @abstractmethod
    def draft(self, memory: LastStates, state: DecodeState, sizes: Tensor) -> Draft:
        """A draft of at most sizes[b] nodes per slot; at least one size is above 0."""

    def free(self, memory: LastStates, rows: Sequence[int]) -> None:
        memory.hidden[to_device(rows, memory.hidden.device)] = 0
        for row in rows:
            memory.is_ready[row] = False

    def _keep(self, memory: LastStates, rows: Sequence[int], states: Tensor, at: Sequence[int]) -> None:
        """Store states[b, at[b]] of states [R, S, H]."""
        index, slots, last = to_device([*zip(range(len(rows)), rows, at, strict=True)], states.device).unbind(-1)
        memory.hidden[slots.to(memory.hidden.device)] = states[index, last].to(memory.hidden)
        for row in rows:
            memory.is_ready[row] = True


# ── a value of each request ───────────────────────────────────────────────────────────────────────────────────────────

T = TypeVar("T")


class RequestDrafter(Drafter, ABC, Generic[T]):
    """Stores one value per request, created on first use and dropped with the request."""

    @abstractmethod
    def new_request(self, tenant: str) -> T:
        """The value of a new request of this tenant."""

    def allocate(self, cache: Cache) -> list[T | None]:
        return [None] * cache.slots

    def of(self, memory: list[T | None], state: DecodeState, row: int) -> T:
        """The value of this slot's request."""
        value = memory[row] = memory[row] or self.new_request(state.requests[row].tenant)
        return value

    def free(self, memory: list[T | None], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None


class Lookup(RequestDrafter[TextIndex], ABC):
    """Looks up the end of each slot's text; a subclass chooses the index."""

    watches = True  # it observes the text, not just its own draft

    def __init__(self, limit: int, tries: Tries):
        self.limit, self.tries = limit, tries

    def propose(self, memory: list[TextIndex | None], state: DecodeState, budget: Tensor) -> Draft:
        return self.look_up(memory, state, [()] * len(state.rows), budget)

    def look_up(
        self, memory: list[TextIndex | None], state: DecodeState, drafted: Sequence[Sequence[int]], budget: Tensor
    ) -> Draft:
        slots = zip(state.rows, drafted, budget.tolist(), strict=True)
        proposals = [self._read(memory, state, row).propose(state.tokens[row], most, path) for row, path, most in slots]
        return trees.of_lists(
            [proposal.tokens for proposal in proposals], [proposal.parents for proposal in proposals], state.device
        )

    def observe(
        self, memory: list[TextIndex | None], state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> None:
        """Make committed tokens visible to other requests at once, even if the text ends here."""
        if self.tries.shared:
            for row in state.rows:
                self._read(memory, state, row)

    def _read(self, memory: list[TextIndex | None], state: DecodeState, row: int) -> TextIndex:
        """The slot's index, with all committed tokens read."""
        text = self.of(memory, state, row)
        text.read(state.tokens[row])
        return text
