"""Language models as drafters: reads new tokens into a cache, and trains on the target's texts.

B slots, R rows, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.config import Config as Base
from outrider.config import Quantization
from outrider.decoding.draft import Draft, padded
from outrider.errors import ConfigError
from outrider.kernels import rounding
from outrider.nn.draft_model import Batch
from outrider.nn.rows import DetachedRows, RowLabels
from outrider.targets.cache.slots import SlotCache
from outrider.targets.gguf.files import locate
from outrider.targets.hf.causal_lm import folder
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.protocol import Target, members_of


class ModelConfig(Base):
    """The language model that drafts."""

    model: str = "demo"
    """Folder, GGUF file or Hugging Face id of the drafting model; `demo` ships with Outrider."""
    quantize: Quantization | None = None
    """Quantise the linear layers of the drafting model, independently of the target's; int8 needs torchao."""
    device: str | None = None
    """Device of the drafter, such as cuda:1; the target's by default."""


def loaded(config: ModelConfig, target: Target) -> TransformersTarget:
    """The drafting model, on the target's device and in its dtype; if the target is an ensemble with it, that
    member."""
    for member in members_of(target) if config.quantize is None else ():
        if member.spec.name == folder(config.model):
            model: TransformersTarget = member
            return model
    name = folder(config.model)
    if locate(name) is not None or config.quantize in rounding.MODES:  # which are on the CPU, in float32
        return load_target(name, quantize=config.quantize)
    return load_target(name, device=target.device, dtype=target.spec.dtype, quantize=config.quantize)


def room(model: TransformersTarget, kind: str, length: int) -> int:
    """Maximum number of tokens of a text that leave room for `length` drafted ones in the model's context.  Raises
    ConfigError if there is no room."""
    left = model.spec.context - length
    if left < 1:
        raise ConfigError(
            f"{kind}.length {length} leaves no room in the drafting model's context of {model.spec.context}; shorten it"
        )
    return left


def read_texts(
    model: TransformersTarget, cache: SlotCache, rows: Sequence[int], texts: Sequence[list[int]], most: int
) -> Tensor:
    """Read the tokens of these texts that are not in the cache; logits [R, V] after the last token of each.

    most: maximum number of new tokens in a usual step; a slot with more is read by itself first, since it would pad all
    others.
    """
    for row, text in zip(rows, texts, strict=True):
        if len(rows) > 1 and len(text) - cache.lengths[row] > most:
            read_texts(model, cache, [row], [text[:-1]], most)
    pieces = [text[cache.lengths[row] :] for row, text in zip(rows, texts, strict=True)]
    return model.prefill(cache, rows, padded(pieces, 0, model.device), [len(piece) for piece in pieces]).logits[:, -1]


def read_one(model: TransformersTarget, cache: SlotCache, rows: Sequence[int], tokens: Tensor) -> Tensor:
    """Logits [R, V] after one more token per slot.  tokens [R]."""
    logits = model.verify(cache, rows, tokens, Draft.empty(len(rows), tokens.device)).logits[:, -1]
    cache.append([1] * len(rows))
    return logits


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenRows(DetachedRows):
    """Predictions of a language model: one row, and one block, per trained token."""

    def __init__(self, model: Any, batch: Batch):
        documents = batch.documents
        follows = batch.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        text, at = follows.nonzero(as_tuple=True)
        every = torch.arange(len(at), device=at.device)
        rows = RowLabels.of(batch, text, at + 1, torch.ones_like(every, dtype=torch.float), 0 * every, every)
        super().__init__(model, model.read(batch.tokens, documents)[text, at], batch.final, rows)
