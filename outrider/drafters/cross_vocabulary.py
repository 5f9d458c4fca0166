"""A small language model of another vocabulary drafts; exact all the same.  (Timor et al. 2502.05202.)

It reads the committed text in tokens of its own and drafts one of two ways.  `intersection`: it draws among the tokens that
both have, from its distribution given that; this is q, over the target's ids.  `text`: it goes on in its own tokens, and what
they say is encoded with the target's; a deterministic draft, so best at low temperatures.

B live slots, V the target's vocabulary, U the model's.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from outrider import demo
from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import ConfigError
from outrider.nn.language_model import read_one, read_texts
from outrider.nn.serving import Sampler
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target
from outrider.targets.transformers import TransformersTarget, load_target
from outrider.targets.vocabulary import Overlap, Transcript, Twins, Vocabulary, continuation, overlap


class Config(Base):
    kind: Literal["cross_vocabulary"] = "cross_vocabulary"
    model: str = "demo"
    """Folder or Hugging Face id of the drafting model; `demo` is the one that ships with Outrider."""
    vocabulary: Literal["intersection", "text"] = "intersection"
    """`intersection` drafts the tokens that both have, `text` drafts text and encodes it with the target's tokenizer."""
    least_overlap: Annotated[float, Field(ge=0, le=1)] = 0.8
    """`intersection` drafts nothing where the tokens in common hold less than this share of the target's probability."""
    quantize: Literal["int8"] | None = None
    """Round the linear layers of the drafting model, whatever the target's are; needs torchao."""
    device: str | None = None
    """Where it drafts, such as cuda:1; the target's device unless given."""
    length: PositiveInt = 4
    """Tokens drafted per step."""


@dataclass
class Reading:
    """One slot's text in the drafting model's tokens."""

    transcript: Transcript
    held: list[int]
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
    """Drafts a chain with a language model of another vocabulary."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: TransformersTarget, config: Config, own: Vocabulary, target: Vocabulary, p: Tensor):
        """p [..., V]: the target's distributions at the places of a sample text."""
        self.model, self.config, self.steps = model, config, (model.step,)
        self.own, self.target = own, target
        self.twins = Twins(own, target, model.device)
        self.overlap: Overlap = overlap(self.twins, p)
        self.limit = config.length
        if config.vocabulary == "intersection" and (self.overlap.mass < config.least_overlap or not self.twins.count):
            self.limit = 0
        mute = [piece is None and token != own.end for token, piece in enumerate(own.pieces)]
        self._mute = torch.tensor(mute, device=model.device)
        """[U] ids that say nothing."""

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
        """Tokens that both vocabularies have, each drawn from the model's law given that it is one of them."""
        rows, sizes = state.rows, budget.tolist()
        for b, row in enumerate(rows):
            if any(token not in self.twins.by_target for token in memory.slots[row].transcript.waiting):
                sizes[b] = 0  # the model can't be told where the text stands
        sampler = Sampler(state)
        for depth in range(max(sizes)):
            if depth:
                logits = self._read_one(memory, rows, self.twins.own(sampler.tokens[-1]))
            logits = state.judge.masked(self.twins.spread(logits), sampler.tokens)
            if state.judge.bans:
                # a law with nothing left: that is known before the draw, so a slot may end there
                stuck = logits.amax(-1) == -torch.inf
                sizes = [min(size, depth) if is_stuck else size for size, is_stuck in zip(sizes, stuck.tolist(), strict=True)]
                logits = logits.masked_fill(stuck[:, None], 0.0)
            sampler.draw(logits)
        return sampler.draft(torch.tensor(sizes))

    def _in_text(self, memory: Readings, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        """The model's likeliest text, in the target's tokens: as many of its own are read as the target's are wanted."""
        rows, own = state.rows, [logits.masked_fill(self._mute, -torch.inf).argmax(-1)]
        while len(own) < int(budget.max()):
            logits = self._read_one(memory, rows, own[-1])
            own.append(logits.masked_fill(self._mute, -torch.inf).argmax(-1))
        said = zip(rows, torch.stack(own, 1).tolist(), budget.tolist(), strict=True)
        found = [self._translation(memory.slots[row].transcript, ids)[:most] for row, ids, most in said]
        return Draft.chain(padded(found, 0, state.device), torch.tensor([len(tokens) for tokens in found]))

    def _translation(self, transcript: Transcript, ids: list[int]) -> list[int]:
        """The target's tokens for what these ids say behind the text; the end of a text is a token of both."""
        spoken = list(itertools.takewhile(lambda token: token != self.own.end, ids))
        said = b"".join(self.own.pieces[token] or b"" for token in spoken)
        found = continuation(self.target, transcript.text, transcript.waiting_bytes, said)
        is_over = len(spoken) < len(ids)
        if is_over and self.target.end is not None and (found or said == transcript.waiting_bytes):
            found.append(self.target.end)
        return found

    def observe(self, memory: Readings, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        """What was rejected is forgotten with the next reading, which begins where the texts part."""

    def free(self, memory: Readings, rows: Sequence[int]) -> None:
        memory.cache.free(rows)
        for row in rows:
            memory.slots[row] = self._blank()

    def _blank(self) -> Reading:
        return Reading(Transcript(self.target, self.own), [])

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
        twins = [self.twins.by_target.get(token) for token in transcript.waiting]
        behind = [] if self.config.vocabulary == "text" or None in twins else [twin for twin in twins if twin is not None]
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
    near = max(0, min(len(held), len(wanted)) - 64)
    begin = near if held[:near] == wanted[:near] else 0  # texts mostly part near their end
    least = min(len(held), len(wanted))
    return next((n for n in range(begin, least) if held[n] != wanted[n]), least)


SAMPLE = """The committee met on Tuesday and agreed, after a short discussion, that the road should be repaired before winter.
def mean(values):
    return sum(values) / len(values)  # fails for an empty list
In 2024 about 3,150 people lived there; by 1911 it had been twice as many.
Die Straße führt über den Fluss. La forêt était déjà loin. El niño llegó mañana.
{"name": "Ann", "items": [1, 2.5, null], "done": true}
"""
"""Prose, code, numbers and letters beyond English: where the target's probability of the tokens in common is measured."""


def build(config: Config, target: Target) -> CrossVocabulary:
    name = str(demo.SMALL_MODEL) if config.model == "demo" else config.model
    model = load_target(name, device=target.device, dtype=target.spec.dtype, quantize=config.quantize)
    log = logging.getLogger(__name__)
    if model.spec.context <= config.length:
        raise ConfigError(
            f"cross_vocabulary.length {config.length} leaves no room in the drafting model's context of {model.spec.context}; "
            "choose a smaller length"
        )
    own = Vocabulary(model.tokenizer, model.spec.vocabulary, config.model)
    theirs = Vocabulary(getattr(target, "tokenizer", None), target.spec.vocabulary, target.spec.name)
    drafter = CrossVocabulary(model, config, own, theirs, _law_of_sample(theirs, target))
    log.info("cross_vocabulary %s beside %s: %s", config.model, target.spec.name, drafter.overlap)
    if not drafter.limit:
        log.warning(
            "cross_vocabulary %s drafts nothing for %s: %s, and less than cross_vocabulary.least_overlap %s does not pay; "
            "set cross_vocabulary.vocabulary to text, choose a model of a nearer tokenizer, or lower least_overlap",
            config.model, target.spec.name, drafter.overlap, config.least_overlap,
        )  # fmt: skip
    return drafter


@torch.inference_mode()
def _law_of_sample(vocabulary: Vocabulary, target: Target) -> Tensor:
    """The target's distributions [1, S, V] at the places of the sample text, at temperature 1."""
    ids = [token for token in vocabulary.encode(SAMPLE).ids if token < vocabulary.size]
    tokens = torch.tensor([[*vocabulary.begin, *ids][: target.spec.context] or [vocabulary.filler]], device=target.device)
    hidden, _ = target.read(tokens, ())
    return target.head(hidden).float().softmax(-1)
