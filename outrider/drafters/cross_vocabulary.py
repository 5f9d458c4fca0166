"""A small language model with another vocabulary drafts; the output is still exact.  (arXiv 2502.05202.)

It reads the committed text in its own tokens and drafts in one of two ways.  `intersection`: it draws from its
distribution restricted to the tokens of both vocabularies; this is q, over the target's ids.  `text`: it continues in
its own tokens, and their text is encoded with the target's tokenizer.  That draft is deterministic, so it is best at
low temperatures.

Differs from the paper: tokens are compared by their bytes, so different space markers do not matter; and
`intersection` drafts nothing if the target puts too little probability on common tokens (`min_overlap`).

Use it if there is a good small model but none with the target's vocabulary; if there is, use `small_model`, which
drafts from its whole distribution.

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
from outrider.method import Method
from outrider.nn.drafting import serving
from outrider.nn.language_model import ModelConfig, loaded, read_one, read_texts, room
from outrider.sampling.text import common_prefix
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import Target
from outrider.targets.text.vocabulary import SharedVocabulary, Transcript, Vocabulary, overlap, sample_distributions

METHOD = Method(cost="each", is_model=True)


class Config(ModelConfig):
    kind: Literal["cross_vocabulary"] = "cross_vocabulary"
    vocabulary: Literal["intersection", "text"] = "intersection"
    """`intersection` drafts tokens that both vocabularies have; `text` drafts text and encodes it for the target."""
    min_overlap: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of the target's probability, 0 to 1, that shared tokens must have; below it `intersection` drafts
    nothing."""
    length: PositiveInt = 4
    """Tokens drafted per step."""


@dataclass
class Reading:
    """One slot's text in the drafting model's tokens."""

    transcript: Transcript
    held: list[int] = field(default_factory=list)
    """Ids in the cache."""
    skipped: int = 0
    """Number of leading ids that are skipped because the text is longer than the cache."""


@dataclass
class Readings:
    """The model's cache and how far it has read each slot."""

    cache: SlotCache
    slots: list[Reading]


REWRITTEN = 8
"""Number of trailing tokens that may change in this vocabulary when the text continues.  With recurrent layers, a
larger change means rereading the text from the start."""


class CrossVocabulary(Drafter):
    """Drafts a chain with a language model of another vocabulary.

    Rejected tokens are dropped in the next step, which reads from where the texts differ.
    """

    def __init__(
        self, model: TransformersTarget, config: Config, vocabulary: Vocabulary, target: Vocabulary, p: Tensor
    ):
        """p [..., V]: the target's distributions at the positions of a sample text."""
        self.model, self.config, self.steps = model, config, (model.step,)
        self.vocabulary, self.target = vocabulary, target
        self.shared = SharedVocabulary(vocabulary, target, model.device)
        self.overlap = overlap(self.shared, p)
        self.limit = config.length
        if config.vocabulary == "intersection" and (self.overlap.mass < config.min_overlap or not self.shared.count):
            self.limit = 0
        self._mute = torch.tensor(vocabulary.mute, device=model.device)  # [U]

    def allocate(self, cache: Cache) -> Readings:
        # a text may have more tokens in this vocabulary than in the target's
        length = min(2 * cache.length, self.model.spec.context) + self.limit
        model_cache = self.model.allocate(cache.slots, length, undo=self.limit + REWRITTEN)
        return Readings(model_cache, [self._blank() for _ in range(cache.slots)])

    def admit(
        self, memory: Readings, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        if self.limit:
            self._follow(memory, rows, [state.tokens[row][: state.prefilled[row]] for row in rows])

    @torch.inference_mode()
    def propose(self, memory: Readings, state: DecodeState, budget: Tensor) -> Draft:
        logits = self._follow(memory, state.rows, [state.tokens[row] for row in state.rows])
        if self.config.vocabulary == "text":
            return self._in_text(memory, state, budget, logits)
        return self._in_common(memory, state, budget, logits)

    def _in_common(self, memory: Readings, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        """Tokens in both vocabularies, sampled from the model's distribution restricted to them."""
        rows = state.rows
        # if the end of a text has no tokens in the shared vocabulary, the model can't read it
        is_readable = [self.shared.of(memory.slots[row].transcript.incomplete) is not None for row in rows]

        def read_one(tokens: Tensor) -> Tensor:
            return self.shared.spread(self._read_one(memory, rows, self.shared.to_drafter(tokens)))

        draft = serving.chain(self.shared.spread(logits), read_one, budget * torch.tensor(is_readable), state)
        return serving.possible(draft, state)

    def _in_text(self, memory: Readings, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        """The model's likeliest text in the target's tokens, generated from as many of its own tokens as the budget
        allows."""
        rows, tokens = state.rows, [logits.masked_fill(self._mute, -torch.inf).argmax(-1)]
        while len(tokens) < int(budget.max()):
            logits = self._read_one(memory, rows, tokens[-1])
            tokens.append(logits.masked_fill(self._mute, -torch.inf).argmax(-1))
        drafted = zip(rows, torch.stack(tokens, 1).tolist(), budget.tolist(), strict=True)
        target_tokens = [memory.slots[row].transcript.continued(ids)[:most] for row, ids, most in drafted]
        return Draft.chain(
            padded(target_tokens, 0, state.device), torch.tensor([len(tokens) for tokens in target_tokens])
        )

    def free(self, memory: Readings, rows: Sequence[int]) -> None:
        memory.cache.free(rows)
        for row in rows:
            memory.slots[row] = self._blank()

    def _blank(self) -> Reading:
        return Reading(Transcript(self.target, self.vocabulary))

    def _follow(self, memory: Readings, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Read these texts, in the target's tokens, from where they changed.  Returns logits [R, U] after each."""
        inputs = []
        for row, text in zip(rows, texts, strict=True):
            reading = memory.slots[row]
            reading.transcript.push(text[reading.transcript.taken :])
            ids = self._ids(reading, memory.cache.length - self.limit)
            memory.cache.cut(row, min(common_prefix(reading.held, ids), len(ids) - 1))
            reading.held = ids
            inputs.append(ids)
        return read_texts(self.model, memory.cache, rows, inputs, self.limit + 1)

    def _ids(self, reading: Reading, room: int) -> list[int]:
        """The ids that the model reads: the whole text, or its tail if it is longer than `room`."""
        transcript = reading.transcript
        rest = [] if self.config.vocabulary == "text" else self.shared.of(transcript.incomplete) or []
        if len(transcript.ids) + len(rest) - reading.skipped > room - len(self.vocabulary.begin):
            # keep half of the context, so that the text is rarely read again
            reading.skipped = max(0, len(transcript.ids) - room // 2)
        ids = [*transcript.ids[reading.skipped :], *rest]
        if ids[: len(self.vocabulary.begin)] != self.vocabulary.begin:
            ids = self.vocabulary.begin + ids
        return ids or [self.vocabulary.filler]

    def _read_one(self, memory: Readings, rows: Sequence[int], tokens: Tensor) -> Tensor:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            memory.slots[row].held.append(token)
        return read_one(self.model, memory.cache, rows, tokens)


def build(config: Config, target: Target) -> CrossVocabulary:
    model, log = loaded(config, target), logging.getLogger(__name__)
    room(model, config.kind, config.length)  # raises if there is none
    vocabulary = Vocabulary(model.tokenizer, model.spec.vocabulary, config.model)
    target_vocabulary = Vocabulary(getattr(target, "tokenizer", None), target.spec.vocabulary, target.spec.name)
    drafter = CrossVocabulary(
        model, config, vocabulary, target_vocabulary, sample_distributions(target_vocabulary, target)
    )
    log.info("cross_vocabulary %s with %s: %s", config.model, target.spec.name, drafter.overlap)
    if not drafter.limit:
        log.warning(
            "cross_vocabulary %s drafts nothing for %s: %s, below cross_vocabulary.min_overlap %s; set "
            "cross_vocabulary.vocabulary to text, choose a model with a closer tokenizer, or lower min_overlap",
            config.model, target.spec.name, drafter.overlap, config.min_overlap,
        )  # fmt: skip
    return drafter
