"""A small language model drafts token by token; the classic pair.  (Leviathan 2211.17192, Chen 2302.01318.)

Any causal LM with the target's own vocabulary.  Its cache follows the committed text: what was rejected is forgotten, and
what it has not read yet (one token, or two after a block that was kept whole) it reads before it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from outrider import demo
from outrider.config import Config as Base
from outrider.decoding.accept import Verdict
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Scores, Target
from outrider.decoding.sampling import Purpose, distribution
from outrider.decoding.state import DecodeState
from outrider.errors import DrafterError
from outrider.targets.cache import SlotCache
from outrider.targets.transformers import TransformersTarget, load_target


class Config(Base):
    kind: Literal["small_model"] = "small_model"
    model: str = "demo"
    """Folder or Hugging Face id of the drafting model; `demo` is the one that ships with Outrider."""
    length: PositiveInt = 4
    """Tokens drafted per step."""


class SmallModel:
    """Drafts a chain with a language model of its own."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: TransformersTarget, length: int):
        self.model = model
        self.limit = length

    def allocate(self, cache: Cache) -> SlotCache:
        return self.model.allocate(cache.slots, cache.length + self.limit)

    def admit(self, memory: SlotCache, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        self._read(memory, rows, [state.tokens[row][: state.prefilled[row]] for row in rows])

    @torch.inference_mode()
    def propose(self, memory: SlotCache, state: DecodeState, budget: Tensor) -> Draft:
        rows = state.rows
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        logits = self._read(memory, rows, [state.tokens[row] for row in rows])
        for depth in range(int(budget.max())):
            if depth:
                memory_scores = self.model.verify(memory, rows, tokens[-1], Draft.empty(len(rows), state.device))
                memory.append([1] * len(rows))
                logits = memory_scores.logits[:, -1]
            if state.settings.is_greedy:
                tokens.append(logits.argmax(-1))
            else:
                q.append(distribution(logits, state.settings))
                tokens.append(state.streams.draw(q[-1], depth, Purpose.DRAFT))
        return Draft.chain(torch.stack(tokens, 1), budget, torch.stack(q, 1) if q else None)

    def observe(self, memory: SlotCache, state: DecodeState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Forget what was rejected: of the committed tokens all but the last may stand in the cache, and no draft beyond."""
        for b, row in enumerate(state.rows):
            added = int(verdict.accepted[b]) + (int(verdict.next_token[b]) >= 0)
            agreed = len(state.tokens[row]) - added + int(verdict.accepted[b])
            memory.lengths[row] = min(memory.lengths[row], agreed)

    def free(self, memory: SlotCache, rows: Sequence[int]) -> None:
        memory.free(rows)

    def _read(self, memory: SlotCache, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Read what the cache lacks of these texts; logits [R, V] after the last token of each."""
        for row, text in zip(rows, texts, strict=True):
            if len(rows) > 1 and len(text) - memory.lengths[row] > self.limit + 1:  # one that lags would pad all others
                self._read(memory, [row], [text[:-1]])
        pieces = [text[memory.lengths[row] :] for row, text in zip(rows, texts, strict=True)]
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (max(lengths) - len(piece)) for piece in pieces]
        tokens = torch.tensor(padded, device=self.model.device)
        return self.model.prefill(memory, rows, tokens, lengths).logits[:, -1]


def build(config: Config, target: Target) -> SmallModel:
    name = str(demo.SMALL_MODEL) if config.model == "demo" else config.model
    model = load_target(name, device=target.device, dtype=target.spec.dtype)
    mine, theirs = model.spec, target.spec
    if mine.vocabulary != theirs.vocabulary or (theirs.tokenizer_hash and mine.tokenizer_hash != theirs.tokenizer_hash):
        raise DrafterError(
            f"small_model {config.model!r} has a vocabulary of {mine.vocabulary} (tokenizer {mine.tokenizer_hash}), the target "
            f"{theirs.name!r} one of {theirs.vocabulary} (tokenizer {theirs.tokenizer_hash}); "
            "choose a model with the target's tokenizer"
        )
    return SmallModel(model, config.length)
