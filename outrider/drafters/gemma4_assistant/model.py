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
    """The frozen assistant in this folder or of this Hugging Face id.

    Raises DrafterError if it can't be loaded.
    """
    from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

    try:
        with keyless_layers(), no_bars():
            result: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=getattr(torch, target.spec.dtype), output_loading_info=True
            )
            assistant, loaded = result
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise DrafterError(
            f"can't load assistant {name!r}: {first_line(error)}; give a folder or a Hugging Face id of one"
        ) from error
    if not isinstance(assistant, Gemma4AssistantForCausalLM):
        raise DrafterError(f"{name} is a {type(assistant).__name__}; give a Gemma4AssistantForCausalLM")
    # transformers only warns, and random weights draft what is never accepted
    if missing := sorted(loaded["missing_keys"]):
        unread = f", and has {min(loaded['unexpected_keys'])}" if loaded["unexpected_keys"] else ""
        raise DrafterError(
            f"{name} has no {missing[0]}{unread}; its weights and its config.json must be quantised alike, whatever "
            "the target is: give the folder as released"
        )
    model: Any = assistant
    return model.to(target.device).eval().requires_grad_(False)


@contextmanager
def keyless_layers() -> Iterator[None]:
    """Let transformers build a Gemma 4 in which no layer has its own keys; 5.23 requires at least one."""
    from transformers import Gemma4TextConfig

    text: Any = Gemma4TextConfig
    original = text.kv_sharing_modes

    def modes(config: Any) -> list[str | None]:
        count: int = config.num_hidden_layers
        kinds: list[str | None] = ["reuse"] * count if config.num_kv_shared_layers == count else original.fget(config)
        return kinds

    text.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        text.kv_sharing_modes = original


@torch.inference_mode()
def shared_layers(model: Any, target: Target) -> dict[str, int]:
    """For every kind of layer in the assistant, the last target layer of that kind that stores keys.

    Raises DrafterError if the assistant was made for another target.
    """
    text, lm = model.config.get_text_config(), getattr(target, "model", None)
    sizes = {
        "backbone_hidden_size": (model.backbone_hidden_size, target.spec.hidden),
        "vocab_size": (model.vocab_size, target.spec.vocabulary),
    }
    wrong = [f"{name} {size} against {expected}" for name, (size, expected) in sizes.items() if size != expected]
    if lm is None or lm.device != target.device:
        wrong.append("a target whose keys are on another device, or no transformers model")
    if wrong:
        raise _misfit(target, "; ".join(wrong))
    assert lm is not None
    cache: Any = target.allocate(1, 2)
    target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1], ())
    kinds = (
        getattr(lm.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"] * target.spec.layers
    )
    shared = {}
    for layer, kind in zip(model.model.layers, text.layer_types, strict=True):
        storing = [index for index in cache.layers if index < len(kinds) and kinds[index] == kind]
        if not storing:
            raise _misfit(target, f"the assistant attends to keys of {kind}, which the target does not store")
        keys, _ = cache.cached(storing[-1], [0])
        head_dim = layer.self_attn.head_dim
        kv_heads = text.num_attention_heads // layer.self_attn.num_key_value_groups
        if (head_dim, kv_heads) != (keys.shape[3], keys.shape[1]):
            raise _misfit(
                target,
                f"{kind} has head_dim {head_dim} and {kv_heads} kv heads, against {keys.shape[3]} and {keys.shape[1]}",
            )
        shared[kind] = storing[-1]
    return shared


def _misfit(target: Target, what: str) -> DrafterError:
    return DrafterError(
        f"this assistant does not belong to {target.spec.name}: {what}; give the one that was released with it"
    )
