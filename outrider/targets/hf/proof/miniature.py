"""A miniature of a model: all settings and kinds of layers of its config, but with small sizes and limits.

How a family handles masks, positions and caches does not depend on its width.  So the self-test uses a miniature of a
few narrow layers in float64, where the model itself would take minutes.  Its windows, chunks and pretraining context
are so short that a text of a few tokens crosses them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from outrider.targets.hf.anatomy import BROKEN
from outrider.targets.hf.family import WINDOWS

VOCABULARY = 128
LIMIT = 16
"""Tokens of a window or a chunk."""
FIRST_CONTEXT = 48
"""Length of the pretraining context, where the rotary factors change: more than the test of a window needs."""
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "encoder_layers",
    "num_encoder_layers", "num_blocks", "depth",
)  # fmt: skip
NUMBERS = (
    "moe_layers", "only_layers", "source_layers", "cross_attention_layers", "scaling_layers", "_ids", "_idxs",
    "_indexes",
)  # fmt: skip
"""Suffixes of config keys that list layer numbers."""
HEADS = (
    ("num_attention_heads", "num_key_value_heads"), ("n_head", "n_head_kv"), ("n_heads", "n_kv_heads"),
    ("num_heads", "num_kv_heads"), ("decoder_attention_heads", ""), ("encoder_attention_heads", ""),
    ("attention_heads", ""), ("num_decoder_attention_heads", ""), ("num_encoder_attention_heads", ""),
    ("swa_num_attention_heads", "swa_num_key_value_heads"), ("num_sliding_attention_heads", ""),
    ("linear_num_value_heads", "linear_num_key_heads"),
)  # fmt: skip
"""Numbers of query heads and of key heads."""
WIDTHS = (
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_dim", "n_embed", "adapter_in_dim",
    "adapter_input_size",
)  # fmt: skip
STATES = (("mamba_n_heads", "mamba_d_head", "mamba_expand"), ("num_heads", "head_dim", "expand"))
"""Heads of a recurrent state, their size, and the ratio of their total width to the hidden size."""
SMALL = {
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "d_inner": 96,
    "d_ff": 96, "ffn_hidden_size": 96, "moe_intermediate_size": 32, "feed_forward_size": 96,
    "intermediate_size_mlp": 96,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "block_ff_dim": 96,
    "dense_intermediate_size": 96, "mlp_dim": 96, "share_expert_dim": 32, "moe_hidden_size": 64,
    "router_hidden_size": 32,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 2, "num_expert_group": 2, "topk_group": 1, "zero_expert_num": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "mamba_n_groups": 1, "n_groups": 1, "mamba_ngroups": 1, "mamba_d_state": 16,
    "ssm_state_size": 16, "state_size": 16, "chunk_size": 16, "mamba_chunk_size": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16, "encoder_hash_byte_group_vocab": 512, "lru_width": 64, "image_size": 56,
    "audio_vocab_size": VOCABULARY, "ngram_table_size": 2 * VOCABULARY,
}  # fmt: skip
"""Upper bounds of these sizes."""
TEXTS = ("text_config", "language_config", "llm_config", "decoder", "thinker_config", "vlm_config")
"""Parts of a config that are about text."""
NOT_ARGUMENTS = ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype")


def build(model: PreTrainedModel) -> PreTrainedModel | None:
    """A small random model of the same class and settings, in float64 if the family supports it; None if none can be
    built."""
    dtypes = dict.fromkeys((torch.float64, torch.float32, model.dtype))
    for dtype, narrow in itertools.product(dtypes, (True, False)):
        try:
            small = _built(model, dtype, narrow)
            # in some families the kernels of experts don't support float64
            small(input_ids=torch.ones(1, FIRST_CONTEXT + 2, dtype=torch.int64, device=small.device), use_cache=False)
        except BROKEN:
            continue
        return small
    return None


def _built(model: PreTrainedModel, dtype: torch.dtype, narrow: bool) -> PreTrainedModel:
    config = type(model.config)(**arguments(model.config, narrow))
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    build: Any = type(model)._from_config
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(3)
        small: Any = build(config, attn_implementation=attention, experts_implementation="eager")
    enlivened(small)
    built: PreTrainedModel = small.to(model.device, dtype).eval()
    return built


def enlivened(model: PreTrainedModel) -> PreTrainedModel:
    """The model with larger random weights, so that its output depends on its input, and without end tokens."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "A_log" not in name:
                weight.mul_(4.0)
    model.generation_config = GenerationConfig()  # some classes come with forced tokens
    return model


def arguments(config: PreTrainedConfig, narrow: bool, is_text: bool = True) -> dict[str, Any]:
    """Arguments of a small config: what this one sets differently from its class, and small sizes.

    narrow: hidden states are narrower than all heads together, which some classes with their own head size refuse.
    """
    sizes, set_there = config.to_dict(), config.to_diff_dict()
    fields = {key: value for key, value in set_there.items() if not key.startswith("_") and key not in NOT_ARGUMENTS}
    made_small = _small(sizes, narrow, is_text)
    fields |= {key: value for key, value in made_small.items() if value != sizes[key]}
    for key in sizes:
        part = vars(config).get(key)
        if isinstance(part, PreTrainedConfig):
            fields[key] = arguments(part, narrow, is_text and key in TEXTS)
            if part.model_type:
                fields[key]["model_type"] = part.model_type
    return fields


def _small(sizes: Mapping[str, Any], narrow: bool, is_text: bool) -> dict[str, Any]:
    """The same values, scaled down."""
    fields = {key: copy.deepcopy(value) for key, value in sizes.items() if not key.startswith("_")}
    _fewer_layers(fields)
    _narrower(fields, narrow and is_text)
    limits = {**SMALL, **dict.fromkeys(WINDOWS, LIMIT), "original_max_position_embeddings": FIRST_CONTEXT}
    fields |= {key: _at_most(fields[key], most) for key, most in limits.items() if key in fields}
    _shorter_rotary(fields, fields.get("rope_parameters"))
    if is_text:
        _fewer_words(fields)
    return fields


def _at_most(value: Any, most: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_at_most(each, most) for each in value)
    return min(value, most) if isinstance(value, int) and not isinstance(value, bool) else value


def _fewer_layers(fields: dict[str, Any]) -> None:
    """As few layers as cover every kind, but at least two; lists by layer are shortened."""
    for key in LAYERS:
        count = fields.get(key)
        if not isinstance(count, int):
            continue
        lists = {
            name: value for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == count
        }
        kinds = [value for name, value in fields.items() if name.endswith("_types") and isinstance(value, list | tuple)]
        named = [value for name, value in fields.items() if name.endswith(("_period", "_pattern", "_interval"))]
        periods = [value for value in named if isinstance(value, int) and value <= count]
        periods += [len(value) for value in kinds if len(value) < count]
        dense, shared = (fields.get(name) or 0 for name in ("first_k_dense_replace", "num_kv_shared_layers"))
        beginnings = [_until_all_found(value) for name, value in lists.items() if not name.endswith(NUMBERS)]
        fewest = max([2, *beginnings, *periods, 1 + dense])
        fields[key] = min(count, 2 * fewest if shared else fewest)
        if shared:  # these read the keys of earlier layers, one of each kind
            fields["num_kv_shared_layers"] = min(shared, fewest)
        for name, value in fields.items():
            if name.endswith(NUMBERS) and isinstance(value, list | tuple):
                fields[name] = type(value)(layer for layer in value if isinstance(layer, int) and layer < fields[key])
            elif name in lists:
                fields[name] = value[: fields[key]]
        if isinstance(by_layer := fields.get("per_layer_config"), dict):
            fields["per_layer_config"] = {n: config for n, config in by_layer.items() if int(n) < fields[key]}


def _until_all_found(values: Sequence[Any]) -> int:
    """Length of the shortest prefix that contains every distinct value."""
    first = {repr(value): at for at, value in reversed(list(enumerate(values)))}
    return max(first.values()) + 1


def _narrower(fields: dict[str, Any], narrow: bool) -> None:
    """Few heads of the same size in similar groups, and hidden states narrower by at least the same factor."""
    before, factor = dict(fields), None
    for many, few in HEADS:
        heads, shared = before.get(many), before.get(few)
        if not isinstance(heads, int) or not heads:
            continue
        keys = shared if isinstance(shared, int) and 0 < shared < heads and heads % shared == 0 else heads
        fewer = min(keys, 4 if keys == heads else 2)
        fields[many] = fewer * min(2, heads // keys)
        if isinstance(shared, int) and shared:
            fields[few] = fewer
        factor = factor or (heads, fields[many])
    for key in WIDTHS:
        if isinstance(fields.get(key), int):
            per_head = 64 if factor is None else fields[key] // factor[0]
            if narrow and isinstance(fields.get("head_dim"), int):
                per_head = min(per_head, 32)
            fields[key] = min(fields[key], per_head * (1 if factor is None else factor[1]))
    for heads, size, expand in STATES:
        width = fields.get("hidden_size", 0)
        has_all = all(isinstance(fields.get(key), int) for key in (heads, size, expand))
        if has_all and before[heads] * before[size] == before[expand] * before["hidden_size"]:
            fields[heads] = fields[expand] * width // fields[size]


def _shorter_rotary(fields: dict[str, Any], rotary: Any) -> None:
    """A short pretraining context, if the factors change at its end."""
    if isinstance(rotary, dict):
        if "dynamic" in str(rotary.get("rope_type")) and isinstance(fields.get("max_position_embeddings"), int):
            fields["max_position_embeddings"] = FIRST_CONTEXT
        if rotary.get("rope_type") == "longrope":
            rotary["original_max_position_embeddings"] = FIRST_CONTEXT
        for part in rotary.values():
            _shorter_rotary(fields, part)


def _fewer_words(fields: dict[str, Any]) -> None:
    """A small vocabulary, with the ids of special tokens at its end."""
    if isinstance(fields.get("vocab_size"), int):
        fields["vocab_size"] = min(fields["vocab_size"], VOCABULARY)
    spare = iter(range(VOCABULARY - 1, 0, -1))
    for key, value in fields.items():
        if key.endswith(("_token_id", "_token_index", "_token_ids")):
            fields[key] = value if not isinstance(value, int) or value < VOCABULARY else next(spare)
