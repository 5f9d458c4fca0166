"""Gemma 4's assistant: a few layers without keys of their own attend to the target's.  (Released with Gemma 4, 2026.)

pre_projection reads [embedding of the last token; state], each layer attends to the keys and values of the last target
layer of its kind, and post_projection gives the next step's state.  All steps are at the anchor's position, so a draft
stores no keys.  A large vocabulary is reached through centroids: only tokens of the likeliest ones can be drafted.

Assumes that the target's keys contain what the next few tokens need.

Differs from transformers' generation: there a stale key may be at the anchor's position.  Tokens of other centroids
can't be drafted; transformers gives them the smallest logit of the batch.

Use it if the target is a Gemma 4 with its assistant; it needs no training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState
from outrider.drafters.gemma4_assistant.model import load_assistant, shared_layers
from outrider.errors import DrafterError
from outrider.nn.drafting import serving
from outrider.nn.memory import LastStates, StateDrafter
from outrider.targets.cache.attention_mask import additive
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["gemma4_assistant"] = "gemma4_assistant"
    model: str = ""
    """Folder or Hugging Face id of the assistant, such as google/gemma-4-e2b-it-assistant."""
    length: PositiveInt = 4
    """Tokens drafted per step."""


class Gemma4Assistant(StateDrafter):
    """Drafts a chain that attends to the keys and values of the target."""

    def __init__(self, model: Any, target: Target, config: Config):
        super().__init__(target, getattr(torch, target.spec.dtype), config.length)
        self.model, self.text = model, model.config.get_text_config()
        self.layers = shared_layers(model, target)
        """By kind of layer: the target layer whose keys and values it attends to."""

    def draft(self, memory: LastStates, state: DecodeState, sizes: Tensor) -> Draft:
        steps = Steps(self, memory.cache, state.rows, memory.hidden[state.rows])
        return serving.possible(serving.chain(steps.read_one(state.anchor), steps.read_one, sizes, state), state)


class Steps:
    """One draft of some slots: the target's keys and values, and the state that is passed from step to step."""

    def __init__(self, drafter: Gemma4Assistant, cache: SlotCache, rows: Sequence[int], states: Tensor):
        """states [B, H]."""
        self.drafter, self.states = drafter, states
        self.shared = {kind: cache.cached(layer, rows) for kind, layer in drafter.layers.items()}
        lengths = torch.tensor([cache.lengths[row] for row in rows], device=states.device)
        self.positions = lengths[:, None]
        self.masks = {kind: self._mask(kind, keys, lengths) for kind, (keys, _) in self.shared.items()}

    def read_one(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token per slot, [B]."""
        model, target = self.drafter.model, self.drafter.target
        inputs = torch.cat([target.embed(tokens), self.states], -1)
        states = model.model(
            inputs_embeds=model.pre_projection(inputs)[:, None], attention_mask=self.masks, position_ids=self.positions,
            shared_kv_states=self.shared, use_cache=False,
        ).last_hidden_state[:, 0]  # fmt: skip
        self.states = model.post_projection(states)
        return model.lm_head(states) if model.masked_embedding is None else by_centroids(model, states)

    def _mask(self, kind: str, keys: Tensor, lengths: Tensor) -> Tensor:
        """[B, 1, 1, n], additive.  A sliding layer attends to its window up to the last token read."""
        columns = torch.arange(keys.shape[2], device=lengths.device)
        attended = columns < lengths[:, None]
        if kind == "sliding_attention":
            attended = attended & (columns >= lengths[:, None] - 1 - self.drafter.text.sliding_window)
        return additive(attended[:, None], keys.dtype)


def by_centroids(model: Any, states: Tensor) -> Tensor:
    """Logits [B, V] of states [B, h], -inf for tokens outside the likeliest centroids."""
    head = model.masked_embedding
    groups = head.token_ordering.long().view(head.num_centroids, -1)
    tokens = groups[head.centroids(states).topk(head.centroid_intermediate_top_k, -1).indices].flatten(1)
    logits = (model.lm_head.weight[tokens] @ states[..., None])[..., 0]
    return logits.new_full((len(states), head.vocab_size), -torch.inf).scatter(1, tokens, logits)


def build(config: Config, target: Target) -> Gemma4Assistant:
    """Raises DrafterError for a missing assistant, or one for another target."""
    if not config.model:
        raise DrafterError("gemma4_assistant.model is empty; name the assistant, a folder or a Hugging Face id")
    return Gemma4Assistant(load_assistant(config.model, target), target, config)
