"""A Hugging Face causal LM to be trained as a drafter: created or loaded, its shape, and its passes.

B rows, S tokens, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from outrider import demo
from outrider.errors import DrafterError, first_line
from outrider.targets import catalog
from outrider.targets.cache.attention_mask import positions
from outrider.targets.gguf.files import locate
from outrider.targets.hf.anatomy import head_transform, trunk
from outrider.targets.identity import hash_tokenizer, load_tokenizer
from outrider.targets.progress import no_bars
from outrider.targets.protocol import Target


def folder(model: str) -> str:
    """Folder or Hugging Face id of a model; `demo` is part of Outrider."""
    return str(demo.SMALL_MODEL) if model == "demo" else catalog.checkpoint(model)


def to_train(name: str, target: Target, architecture: dict[str, Any] | None, new: dict[str, Any] | None) -> Any:
    """The language model in float32: new with this architecture or these sizes, or the named checkpoint."""
    if architecture is not None:
        lm = untrained(AutoConfig.for_model(**architecture))
    elif new is not None:
        lm = untrained(qwen3(target, **new))
    else:
        lm = named(name, target)
    vocabulary = lm.get_output_embeddings().weight.shape[0]
    if vocabulary != target.spec.vocabulary:
        raise DrafterError(
            f"small_model {name!r} has a vocabulary of {vocabulary}, the target {target.spec.name!r} one of "
            f"{target.spec.vocabulary}; with a different one it can't be trained: choose a model with the target's "
            "tokenizer"
        )
    return lm.eval()


def qwen3(
    target: Target, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int,
    rope_theta: float,
    tied: bool,
) -> Qwen3Config:  # fmt: skip
    """A Qwen3 of these sizes with the target's vocabulary and context.  tied: embedding and head share one matrix."""
    if heads % kv_heads:
        raise DrafterError(
            f"small_model.new: heads {heads} is not a multiple of kv_heads {kv_heads}; choose one that is"
        )
    if head_dim % 2:
        raise DrafterError(f"small_model.new: head_dim {head_dim} is odd; rotary positions need an even one")
    return Qwen3Config(
        vocab_size=target.spec.vocabulary, max_position_embeddings=target.spec.context, num_hidden_layers=layers,
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def named(name: str, target: Target) -> Any:
    """The language model of this folder or id, in float32.  Raises DrafterError for another tokenizer than the
    target's."""
    name = folder(name)
    if locate(name) is not None:
        raise DrafterError(
            f"small_model.model {name!r} is a GGUF file, whose weights can't be trained; use the model's safetensors "
            "checkpoint"
        )
    try:
        with no_bars():
            lm = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except Exception as error:  # every family fails in its own way
        raise DrafterError(
            f"can't load small_model.model {name!r}: {first_line(error)}; give `demo`, a folder with "
            "config.json and safetensors, or a Hugging Face id; or sizes of a new model in small_model.new"
        ) from error
    target_hash = target.spec.tokenizer_hash
    tokenizer, _ = (None, "") if target_hash is None else load_tokenizer(name)
    tokenizer_hash = None if tokenizer is None else hash_tokenizer(tokenizer)
    if tokenizer_hash != target_hash:
        raise DrafterError(
            f"small_model {name!r} has the tokenizer {tokenizer_hash}, the target {target.spec.name!r} has "
            f"{target_hash}; with a different vocabulary it can't be trained: choose a model with the target's "
            "tokenizer"
        )
    return lm


def untrained(shape: Any) -> Any:
    """A model of this shape with random weights, in float32."""
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


NOT_SHAPE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""Keys of a config.json that are not about the model's shape."""


def architecture_of(lm: Any) -> dict[str, Any]:
    """The model's shape as in a config.json, without the origin and the dtype of its weights."""
    config = json.loads(lm.config.to_json_string())
    return {key: config[key] for key in config if key not in NOT_SHAPE}


@torch.no_grad()
def learn_passes(lm: Any, name: str) -> tuple[Callable[[Tensor], Tensor], bool]:
    """The transform of the output layer's values, and whether texts packed in one row are read independently."""
    tokens, head = torch.arange(12)[None] % lm.config.get_text_config().vocab_size, lm.get_output_embeddings()
    alone = torch.cat([states(lm, part) for part in tokens.split((7, 5), 1)], 1)
    logits = lm(input_ids=tokens[:, :7], use_cache=False).logits
    finish = head_transform(head(alone[:, :7]), logits, lm.config.get_text_config())
    if finish is None:
        raise DrafterError(
            f"small_model {name!r} changes its logits after the output layer in an unknown way, so it can't be "
            "trained; choose a model of another family"
        )
    position_ids = torch.cat([torch.arange(7), torch.arange(5)])[None]
    try:
        in_one_row = states(lm, tokens, position_ids=position_ids)
    except (RuntimeError, TypeError, ValueError):
        return finish, False
    return finish, torch.allclose(in_one_row, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


@contextmanager
def keeping_computed(model: nn.Module) -> Iterator[None]:
    """Within this context, computed buffers such as rotary frequencies move between devices with their module but keep
    their dtype."""
    computed = [(module, name) for module in model.modules() for name in module._non_persistent_buffers_set]
    before = [module._buffers[name] for module, name in computed]
    yield
    for (module, name), buffer in zip(computed, before, strict=True):
        if buffer is not None:
            module._buffers[name] = buffer.to(getattr(module, name).device)


# ── passes with a gradient ────────────────────────────────────────────────────────────────────────────────────────────


def refuse_longer(lm: Any, documents: Tensor, name: str) -> None:
    """Raises DrafterError for a text that is longer than the model's context.  documents [B, S]."""
    context = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if context is None or documents.shape[1] <= context:
        return
    longest = int(positions(documents)[documents > 0].max()) + 1
    if longest > context:
        raise DrafterError(
            f"a text of {longest} tokens is longer than the context of small_model {name!r}, {context}; "
            f"set prepare.length to {context} or less"
        )


def read(lm: Any, tokens: Tensor, documents: Tensor, reads_prepacked: bool) -> Tensor:
    """States [B, S, H] before the head; every text is read independently.  tokens, documents [B, S].

    reads_prepacked: texts in one row can be read in one pass, distinguished by their positions; otherwise each gets its
    own row.
    """
    follows = documents[:, 1:] == documents[:, :-1]
    if bool((follows | (documents[:, 1:] == 0)).all()):  # one text per row, padding after it
        return states(lm, tokens)
    if reads_prepacked:
        return states(lm, tokens, position_ids=positions(documents))
    begins = nn.functional.pad(~follows, (1, 0), value=True).flatten()
    lengths = torch.diff(begins.nonzero()[:, 0].cpu(), append=torch.tensor([begins.numel()])).tolist()
    alone = states(lm, pad_sequence(tokens.flatten().split(lengths), batch_first=True))
    return torch.cat([row[:n] for row, n in zip(alone, lengths, strict=True)]).view(*tokens.shape, -1)


def states(lm: Any, tokens: Tensor | None, **options: Any) -> Tensor:
    """States [B, S, H] before the head.  tokens: None if `inputs_embeds` are given instead."""
    hidden: Tensor = trunk(lm)(input_ids=tokens, **{"use_cache": False, **options}).last_hidden_state
    return hidden
