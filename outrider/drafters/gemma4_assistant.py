"""Gemma 4's assistant: a few layers without keys of their own look at the target's.  (Released beside Gemma 4, 2026.)

pre_projection reads [embedding of the last token; state], each layer attends to the keys and values of the last target layer of
its kind, post_projection gives the next step's state.  All steps stand at the anchor's position, so a draft writes no key
anywhere.  A large vocabulary is read through centroids: the likeliest of them name the tokens that can be drafted.

Assumes that the target's keys hold what the next few tokens need.

Differs from transformers' generation: in its steps a stale key may stand at the anchor's place, here none does; tokens of other
centroids can't be drafted at all, where transformers gives them the least logit found, which hangs on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import DrafterError
from outrider.nn import serving
from outrider.targets.cache import SlotCache
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["gemma4_assistant"] = "gemma4_assistant"
    model: str = ""
    """Folder or Hugging Face id of the assistant, such as google/gemma-4-e2b-it-assistant."""
    length: PositiveInt = 4
    """Tokens drafted per step."""


@dataclass
class Memory:
    """The target's own cache, for reading, and the state of the last token that each slot has read."""

    cache: SlotCache
    states: list[Tensor | None]
    """Of every slot [H]; None before the first token."""


class Gemma4Assistant(Drafter):
    """Drafts a chain, looking at the keys and values of the target."""

    def __init__(self, model: Any, target: Target, config: Config):
        self.model, self.target, self.limit = model, target, config.length
        self.text = model.config.get_text_config()
        self.layers = shared_layers(model, target)
        """Of every kind of layer, the target layer whose keys and values are looked at."""

    def allocate(self, cache: Any) -> Memory:
        return Memory(cache, [None] * cache.slots)

    def admit(self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        for b, row in enumerate(rows):
            memory.states[row] = scores.hidden[b, lengths[b] - 1].clone()

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        known = [memory.states[row] for row in state.rows]
        budget = torch.tensor([0 if own is None else most for own, most in zip(known, budget.tolist(), strict=True)])
        if not int(budget.max()):
            return Draft.empty(len(state.rows), state.device)
        nothing = next(own for own in known if own is not None)
        steps = Steps(self, memory.cache, state.rows, torch.stack([nothing if own is None else own for own in known]))
        return serving.possible(serving.chain(steps.read_one(state.anchor), steps.read_one, budget, state), state)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        for b, row in enumerate(state.rows):
            memory.states[row] = scores.hidden[b, kept.rows(b)[-1]].clone()

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        for row in rows:
            memory.states[row] = None


class Steps:
    """One draft of some slots: what the target holds of them, and the state that goes from step to step."""

    def __init__(self, drafter: Gemma4Assistant, cache: SlotCache, rows: Sequence[int], states: Tensor):
        """states [B, H]."""
        self.drafter, self.states = drafter, states
        self.shared = {kind: cache.kept(layer, rows) for kind, layer in drafter.layers.items()}
        lengths = torch.tensor([cache.lengths[row] for row in rows], device=states.device)
        self.positions = lengths[:, None]
        self.masks = {kind: self._mask(kind, keys, lengths) for kind, (keys, _) in self.shared.items()}

    def read_one(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] behind one more token a slot, [B]."""
        model, target = self.drafter.model, self.drafter.target
        pairs = torch.cat([target.embed(tokens), self.states], -1)
        found = model.model(
            inputs_embeds=model.pre_projection(pairs)[:, None], attention_mask=self.masks, position_ids=self.positions,
            shared_kv_states=self.shared, use_cache=False,
        ).last_hidden_state[:, 0]  # fmt: skip
        self.states = model.post_projection(found)
        return model.lm_head(found) if model.masked_embedding is None else by_centroids(model, found)

    def _mask(self, kind: str, keys: Tensor, lengths: Tensor) -> Tensor:
        """[B, 1, 1, n], additive.  What a sliding layer sees ends with the last token read, its window before that."""
        places = torch.arange(keys.shape[2], device=lengths.device)
        seen = places < lengths[:, None]
        if kind == "sliding_attention":
            seen = seen & (places >= lengths[:, None] - 1 - self.drafter.text.sliding_window)
        return torch.zeros(seen.shape, dtype=keys.dtype, device=keys.device).masked_fill(~seen, -torch.inf)[:, None, None]


def by_centroids(model: Any, states: Tensor) -> Tensor:
    """Logits [B, V] of states [B, h], -inf for tokens of all but the likeliest centroids."""
    head = model.masked_embedding
    groups = head.token_ordering.long().view(head.num_centroids, -1)
    tokens = groups[head.centroids(states).topk(head.centroid_intermediate_top_k, -1).indices].flatten(1)
    logits = (model.lm_head.weight[tokens] @ states[..., None])[..., 0]
    return logits.new_full((len(states), head.vocab_size), -torch.inf).scatter(1, tokens, logits)


@torch.inference_mode()
def shared_layers(model: Any, target: Target) -> dict[str, int]:
    """Of every kind of layer that the assistant has, the last target layer of that kind that keeps keys.

    Raises DrafterError where the assistant was made for another target.
    """
    text, theirs = model.config.get_text_config(), getattr(target, "model", None)
    sizes = {"backbone_hidden_size": (model.backbone_hidden_size, target.spec.hidden)}
    sizes["vocab_size"] = model.vocab_size, target.spec.vocabulary
    wrong = [f"{name} {own} against {wanted}" for name, (own, wanted) in sizes.items() if own != wanted]
    if theirs is None or theirs.device != target.device:
        wrong.append("a target whose keys are on another device, or no transformers model")
    if wrong:
        raise _misfit(target, "; ".join(wrong))
    assert theirs is not None
    cache: Any = target.allocate(1, 2)
    target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1], ())
    kinds = getattr(theirs.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"] * target.spec.layers
    found = {}
    for layer, kind in zip(model.model.layers, text.layer_types, strict=True):
        keeping = [index for index in cache.layers if kinds[index] == kind]
        if not keeping:
            raise _misfit(target, f"the assistant looks at keys of {kind}, the target keeps none")
        keys, _ = cache.kept(keeping[-1], [0])
        own = layer.self_attn.head_dim, text.num_attention_heads // layer.self_attn.num_key_value_groups
        if own != (keys.shape[3], keys.shape[1]):
            raise _misfit(
                target, f"{kind} has heads of {own[0]}, {own[1]} of keys, against {keys.shape[3]} and {keys.shape[1]}"
            )
        found[kind] = keeping[-1]
    return found


def _misfit(target: Target, what: str) -> DrafterError:
    return DrafterError(
        f"this assistant does not belong to {target.spec.name}: {what}; give the one that was released beside it"
    )


@contextmanager
def keyless_layers() -> Iterator[None]:
    """Let transformers build a Gemma 4 of layers without keys alone: 5.23 wants at least one that makes them."""
    from transformers import Gemma4TextConfig

    text: Any = Gemma4TextConfig
    own = text.kv_sharing_modes

    def modes(config: Any) -> list[str | None]:
        count: int = config.num_hidden_layers
        found: list[str | None] = ["reuse"] * count if config.num_kv_shared_layers == count else own.fget(config)
        return found

    text.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        text.kv_sharing_modes = own


def build(config: Config, target: Target) -> Gemma4Assistant:
    """Raises DrafterError where there is no assistant, or that of another target."""
    from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

    if not config.model:
        raise DrafterError("gemma4_assistant.model is empty; name the assistant, a folder or a Hugging Face id")
    try:
        with keyless_layers():
            found = AutoModelForCausalLM.from_pretrained(config.model, dtype=getattr(torch, target.spec.dtype))
    except (OSError, ValueError, KeyError) as error:
        said = str(error).strip().split("\n")[0]
        raise DrafterError(
            f"can't load assistant {config.model!r}: {said}; give a folder or a Hugging Face id of one"
        ) from error
    if not isinstance(found, Gemma4AssistantForCausalLM):
        raise DrafterError(f"{config.model} is a {type(found).__name__}; give a Gemma4AssistantForCausalLM")
    model: Any = found
    return Gemma4Assistant(model.to(target.device).eval().requires_grad_(False), target, config)
