"""Language models as drafters: reading what a cache lacks of a text, and training one on the target's texts.

B slots, R rows, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.decoding.draft import Draft, padded
from outrider.errors import DrafterError
from outrider.nn.draft_model import Batch
from outrider.nn.rows import DetachedRows, Labelled
from outrider.targets.cache import SlotCache
from outrider.targets.family import head_law, trunk
from outrider.targets.protocol import Target
from outrider.targets.transformers import TransformersTarget, hash_tokenizer


def read_texts(
    model: TransformersTarget, cache: SlotCache, rows: Sequence[int], texts: Sequence[list[int]], most: int
) -> Tensor:
    """Read what the cache lacks of these texts; logits [R, V] after the last token of each.

    most: tokens that a step brings; a slot that lacks more is read by itself, since it would pad all others.
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


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenRows(DetachedRows):
    """Predictions of a language model: a row, and a block, for every token that is one to learn."""

    def __init__(self, model: Any, batch: Batch):
        self.model, documents, length = model, batch.documents, batch.tokens.shape[1]
        follows = batch.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        text, at = follows.nonzero(as_tuple=True)
        every = torch.arange(len(at), device=at.device)
        rows = Labelled(
            batch.tokens[text, at + 1], torch.ones_like(every, dtype=torch.float), 0 * every, every, text * length + at
        )
        super().__init__(model.target, model.read(batch.tokens, documents)[text, at], batch.hidden, rows)

    def head(self, states: Tensor, rows: slice) -> Tensor:
        return self.model.head(states)


def positions(documents: Tensor) -> Tensor:
    """Places within each text, from 0.  documents [B, S]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return places - places.where(begins, 0).cummax(1).values


def named(name: str, target: Target) -> Any:
    """The language model of this folder or id, in float32.  Raises DrafterError where its tokenizer is not the target's."""
    try:
        lm = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise DrafterError(
            f"can't load small_model.model {name!r}: {str(error).strip().splitlines()[0]}; give `demo`, a folder with "
            "config.json and safetensors, or a Hugging Face id; or sizes of a fresh model in small_model.new"
        ) from error
    theirs = target.spec.tokenizer_hash
    mine = tokenizer_hash(name) if theirs is not None else None
    if mine != theirs:
        raise DrafterError(
            f"small_model {name!r} has the tokenizer {mine}, the target {target.spec.name!r} {theirs}; one of another "
            "vocabulary can't be trained: choose a model with the target's tokenizer"
        )
    return lm


def tokenizer_hash(name: str) -> str | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None
    # where there are no files, transformers makes up one of special tokens alone
    return hash_tokenizer(tokenizer) if len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens) else None


def fresh(shape: Any) -> Any:
    """A model of this shape with random weights, in float32."""
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


NOT_SHAPE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""What a config.json says besides the shape of a model."""


def architecture_of(lm: Any) -> dict[str, Any]:
    """The model's shape as a config.json says it; where its weights came from, and their type, is no part of it."""
    said = json.loads(lm.config.to_json_string())
    return {key: said[key] for key in said if key not in NOT_SHAPE}


@torch.no_grad()
def learn(lm: Any, name: str) -> tuple[Callable[[Tensor], Tensor], bool]:
    """What becomes of the output layer's values, and whether texts in one row whose positions begin anew are read apart."""
    tokens, read, head = torch.arange(12)[None] % lm.config.get_text_config().vocab_size, trunk(lm), lm.get_output_embeddings()
    alone = torch.cat([read(input_ids=part, use_cache=False).last_hidden_state for part in tokens.split((7, 5), 1)], 1)
    finish = head_law(head(alone[:, :7]), lm(input_ids=tokens[:, :7], use_cache=False).logits, lm.config.get_text_config())
    if finish is None:
        raise DrafterError(
            f"small_model {name!r} changes its logits after the output layer in a way that is not known here, so it can't be "
            "trained; choose a model of another family"
        )
    places = torch.cat([torch.arange(7), torch.arange(5)])[None]
    try:
        packed = read(input_ids=tokens, position_ids=places, use_cache=False).last_hidden_state
    except (RuntimeError, TypeError, ValueError):
        return finish, False
    return finish, torch.allclose(packed, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))
