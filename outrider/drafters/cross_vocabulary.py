"""A small language model of another vocabulary drafts; exact all the same.  (Timor et al. 2502.05202.)

It reads the committed text in tokens of its own and drafts one of two ways.  `intersection`: it draws among the tokens that
both have, from its distribution given that; this is q, over the target's ids.  `text`: it goes on in its own tokens, and what
they say is encoded with the target's; a deterministic draft, so best at low temperatures.

B live slots, V the target's vocabulary, U the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from outrider.decoding.draft import Draft, padded
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import serving
from outrider.nn.language_model import ModelConfig, loaded, read_one, read_texts, room
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target
from outrider.targets.transformers import TransformersTarget
from outrider.targets.vocabulary import SharedVocabulary, Transcript, Vocabulary, overlap, sample_distributions


class Config(ModelConfig):
    kind: Literal["cross_vocabulary"] = "cross_vocabulary"
    vocabulary: Literal["intersection", "text"] = "intersection"
    """`intersection` drafts the tokens that both have, `text` drafts text and encodes it with the target's tokenizer."""
    min_overlap: Annotated[float, Field(ge=0, le=1)] = 0.8
    """`intersection` drafts nothing where the tokens in common hold less than this share of the target's probability."""
    length: PositiveInt = 4
    """Tokens drafted per step."""


@dataclass
class Reading:
    """One slot's text in the drafting model's tokens."""

    transcript: Transcript
    held: list[int] = field(default_factory=list)
    """Ids that stand in its cache."""
    skipped: int = 0
    """Ids at the beginning of the text that are read no longer: there were more than the cache takes."""


@dataclass
class Readings:
    """The model's cache, and what it read in each slot."""

    cache: SlotCache
    slots: list[Reading]


REWRITTEN = 8
"""Tokens at the end of a text that may read otherwise in this vocabulary once the text goes on; more are read from the start
where layers keep states."""


class CrossVocabulary(Drafter):
    """Drafts a chain with a language model of another vocabulary.

    What was rejected is forgotten with the next reading, which begins where the texts part."""

    def __init__(self, model: TransformersTarget, config: Config, own: Vocabulary, target: Vocabulary, p: Tensor):
        """p [..., V]: the target's distributions at the places of a sample text."""
        self.model, self.config, self.steps = model, config, (model.step,)
        self.own, self.target = own, target
        self.shared = SharedVocabulary(own, target, model.device)
        self.overlap = overlap(self.shared, p)
        self.limit = config.length
        if config.vocabulary == "intersection" and (self.overlap.mass < config.min_overlap or not self.shared.count):
            self.limit = 0
        self._mute = torch.tensor(own.mute, device=model.device)  # [U]

    def allocate(self, cache: Cache) -> Readings:
        # a text may have more tokens in this vocabulary than in the target's; of a longer one the end is read
        length = min(2 * cache.length, self.model.spec.context) + self.limit
        cache_of_own = self.model.allocate(cache.slots, length, undo=self.limit + REWRITTEN)
        return Readings(cache_of_own, [self._blank() for _ in range(cache.slots)])

    def admit(self, memory: Readings, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        if self.limit:
            self._follow(memory, rows, [state.tokens[row][: state.prefilled[row]] for row in rows])

    @torch.inference_mode()
    def propose(self, memory: Readings, state: DecodeState, budget: Tensor) -> Draft:
        logits = self._follow(memory, state.rows, [state.tokens[row] for row in state.rows])
        if self.config.vocabulary == "text":
            return self._in_text(memory, state, budget, logits)
        return self._in_common(memory, state, budget, logits)

    def _in_common(self, memory: Readings, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        """Tokens that both vocabularies have, each drawn from the model's distribution given that it is one of them."""
        rows = state.rows
        # where a text's end has no twin, the model can't be told where it stands
        is_told = [self.shared.of(memory.slots[row].transcript.waiting) is not None for row in rows]

        def read_one(tokens: Tensor) -> Tensor:
            return self.shared.spread(self._read_one(memory, rows, self.shared.own(tokens)))

        draft = serving.chain(self.shared.spread(logits), read_one, budget * torch.tensor(is_told), state)
        return serving.possible(draft, state)

    def _in_text(self, memory: Readings, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        """The model's likeliest text, in the target's tokens: as many of its own are read as the target's are wanted."""
        rows, own = state.rows, [logits.masked_fill(self._mute, -torch.inf).argmax(-1)]
        while len(own) < int(budget.max()):
            logits = self._read_one(memory, rows, own[-1])
            own.append(logits.masked_fill(self._mute, -torch.inf).argmax(-1))
        said = zip(rows, torch.stack(own, 1).tolist(), budget.tolist(), strict=True)
        found = [memory.slots[row].transcript.continued(ids)[:most] for row, ids, most in said]
        return Draft.chain(padded(found, 0, state.device), torch.tensor([len(tokens) for tokens in found]))

    def free(self, memory: Readings, rows: Sequence[int]) -> None:
        memory.cache.free(rows)
        for row in rows:
            memory.slots[row] = self._blank()

    def _blank(self) -> Reading:
        return Reading(Transcript(self.target, self.own))

    def _follow(self, memory: Readings, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Read these texts of the target's tokens, as far as they changed; logits [R, U] after each."""
        wanted = []
        for row, text in zip(rows, texts, strict=True):
            reading = memory.slots[row]
            reading.transcript.push(text[reading.transcript.taken :])
            ids = self._ids(reading, memory.cache.length - self.limit)
            memory.cache.cut(row, min(_agreement(reading.held, ids), len(ids) - 1))
            reading.held = ids
            wanted.append(ids)
        return read_texts(self.model, memory.cache, rows, wanted, self.limit + 1)

    def _ids(self, reading: Reading, room: int) -> list[int]:
        """What the model is to read: the text's end where all of it takes more than `room`."""
        transcript = reading.transcript
        behind = [] if self.config.vocabulary == "text" else self.shared.of(transcript.waiting) or []
        if len(transcript.ids) + len(behind) - reading.skipped > room - len(self.own.begin):
            # half of the room, so that all is read anew only once in a while
            reading.skipped = max(0, len(transcript.ids) - room // 2)
        ids = [*transcript.ids[reading.skipped :], *behind]
        if ids[: len(self.own.begin)] != self.own.begin:
            ids = self.own.begin + ids
        return ids or [self.own.filler]

    def _read_one(self, memory: Readings, rows: Sequence[int], tokens: Tensor) -> Tensor:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            memory.slots[row].held.append(token)
        return read_one(self.model, memory.cache, rows, tokens)


def _agreement(held: list[int], wanted: list[int]) -> int:
    """How many ids both begin with."""
    least = min(len(held), len(wanted))
    near = max(0, least - 64)
    begin = near if held[:near] == wanted[:near] else 0  # texts mostly part near their end
    return next((n for n in range(begin, least) if held[n] != wanted[n]), least)


def build(config: Config, target: Target) -> CrossVocabulary:
    model, log = loaded(config, target), logging.getLogger(__name__)
    room(model, config.kind, config.length)  # raises where there is none
    own = Vocabulary(model.tokenizer, model.spec.vocabulary, config.model)
    theirs = Vocabulary(getattr(target, "tokenizer", None), target.spec.vocabulary, target.spec.name)
    drafter = CrossVocabulary(model, config, own, theirs, sample_distributions(theirs, target))
    log.info("cross_vocabulary %s beside %s: %s", config.model, target.spec.name, drafter.overlap)
    if not drafter.limit:
        log.warning(
            "cross_vocabulary %s drafts nothing for %s: %s, and less than cross_vocabulary.min_overlap %s does not pay; "
            "set cross_vocabulary.vocabulary to text, choose a model of a nearer tokenizer, or lower min_overlap",
            config.model, target.spec.name, drafter.overlap, config.min_overlap,
        )  # fmt: skip
    return drafter
