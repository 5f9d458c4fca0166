"""Language models as drafters: reading what a cache lacks of a text, and training one on the target's texts.

B slots, R rows, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.draft import Draft, padded
from outrider.errors import ConfigError
from outrider.nn.draft_model import Batch
from outrider.nn.rows import DetachedRows, RowLabels
from outrider.targets.cache.slots import SlotCache
from outrider.targets.gguf.files import locate
from outrider.targets.hf.causal_lm import folder
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.protocol import Target, members_of


class ModelConfig(Base):
    """Which language model drafts."""

    model: str = "demo"
    """Folder, GGUF file or Hugging Face id of the drafting model; `demo` is the one that ships with Outrider."""
    quantize: Literal["int8"] | None = None
    """Round the linear layers of the drafting model, whatever the target's are; needs torchao."""
    device: str | None = None
    """Device that drafts, such as cuda:1; the target's unless given."""


def loaded(config: ModelConfig, target: Target) -> TransformersTarget:
    """The drafting model, on the target's device and of its type; of an ensemble that has it, the member itself."""
    for member in members_of(target) if config.quantize is None else ():
        if member.spec.name == folder(config.model):
            found: TransformersTarget = member
            return found
    name = folder(config.model)
    if locate(name) is not None:  # its weights stay in their blocks, whatever the target's are
        return load_target(name, quantize=config.quantize)
    return load_target(name, device=target.device, dtype=target.spec.dtype, quantize=config.quantize)


def room(model: TransformersTarget, kind: str, length: int) -> int:
    """Tokens of a text that the model can read and still draft `length` more.  Raises ConfigError where there are
    none."""
    left = model.spec.context - length
    if left < 1:
        raise ConfigError(
            f"{kind}.length {length} leaves no room in the drafting model's context of {model.spec.context}; shorten it"
        )
    return left


def read_texts(
    model: TransformersTarget, cache: SlotCache, rows: Sequence[int], texts: Sequence[list[int]], most: int
) -> Tensor:
    """Read what the cache lacks of these texts; logits [R, V] after the last token of each.

    most: tokens that a step brings; a slot that lacks more is read alone, since it would pad all others.
    """
    for row, text in zip(rows, texts, strict=True):
        if len(rows) > 1 and len(text) - cache.lengths[row] > most:
            read_texts(model, cache, [row], [text[:-1]], most)
    pieces = [text[cache.lengths[row] :] for row, text in zip(rows, texts, strict=True)]
    return model.prefill(cache, rows, padded(pieces, 0, model.device), [len(piece) for piece in pieces]).logits[:, -1]


def read_one(model: TransformersTarget, cache: SlotCache, rows: Sequence[int], tokens: Tensor) -> Tensor:
    """Read one token more in every slot; logits [R, V] after it.  tokens [R]."""
    logits = model.verify(cache, rows, tokens, Draft.empty(len(rows), tokens.device)).logits[:, -1]
    cache.append([1] * len(rows))
    return logits


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenRows(DetachedRows):
    """Predictions of a language model: a row, and a block, for every token that is one to learn."""

    def __init__(self, model: Any, batch: Batch):
        documents = batch.documents
        follows = batch.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        text, at = follows.nonzero(as_tuple=True)
        every = torch.arange(len(at), device=at.device)
        rows = RowLabels.of(batch, text, at + 1, torch.ones_like(every, dtype=torch.float), 0 * every, every)
        super().__init__(model, model.read(batch.tokens, documents)[text, at], batch.final, rows)
