"""Gemma 4's assistant as transformers loads it: a small model without keys of its own, which attends to the
target's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outrider.errors import DrafterError, first_line
from outrider.targets.progress import no_bars
from outrider.targets.protocol import Target


def load_assistant(name: str, target: Target) -> Any:
    """The assistant in this folder or of this Hugging Face id, to be used and not trained.

    Raises DrafterError where there is none.
    """
    from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

    try:
        with keyless_layers(), no_bars():
            found = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, target.spec.dtype))
    except (OSError, ValueError, KeyError) as error:
        raise DrafterError(
            f"can't load assistant {name!r}: {first_line(error)}; give a folder or a Hugging Face id of one"
        ) from error
    if not isinstance(found, Gemma4AssistantForCausalLM):
        raise DrafterError(f"{name} is a {type(found).__name__}; give a Gemma4AssistantForCausalLM")
    model: Any = found
    return model.to(target.device).eval().requires_grad_(False)


@contextmanager
def keyless_layers() -> Iterator[None]:
    """Let transformers build a Gemma 4 in which no layer has keys of its own: 5.23 wants at least one that has."""
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


@torch.inference_mode()
def shared_layers(model: Any, target: Target) -> dict[str, int]:
    """For every kind of layer in the assistant, the last target layer of that kind that stores keys.

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
    kinds = (
        getattr(theirs.config.get_text_config(decoder=True), "layer_types", None)
        or ["full_attention"] * target.spec.layers
    )
    found = {}
    for layer, kind in zip(model.model.layers, text.layer_types, strict=True):
        storing = [index for index in cache.layers if index < len(kinds) and kinds[index] == kind]
        if not storing:
            raise _misfit(target, f"the assistant attends to keys of {kind}, the target stores none")
        keys, _ = cache.cached(storing[-1], [0])
        own = layer.self_attn.head_dim, text.num_attention_heads // layer.self_attn.num_key_value_groups
        if own != (keys.shape[3], keys.shape[1]):
            raise _misfit(
                target, f"{kind} has heads of {own[0]}, {own[1]} of keys, against {keys.shape[3]} and {keys.shape[1]}"
            )
        found[kind] = storing[-1]
    return found


def _misfit(target: Target, what: str) -> DrafterError:
    return DrafterError(
        f"this assistant does not belong to {target.spec.name}: {what}; give the one that was released with it"
    )
