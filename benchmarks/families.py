"""Every family of models: what the self-test finds, and that speculation writes what `generate` writes.

    python benchmarks/families.py [--family NAME …] [--tokens 2000]

Tiny models with random weights, sdpa and eager where the family has both.  A tree drafter proposes what the model itself
wrote before, with wrong branches beside it and wrong tokens now and then, so that every depth is accepted and rejected.
In float64 a token that differs is a mismatch; in float32 it is a tie if the model's two best logits lie within four times the
measured difference between its one-row and its n-row pass there.  Prints JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALTERNATE = ["sliding_attention", "full_attention"] * 2
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 1}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 24}),
    "gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": ALTERNATE}),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": ALTERNATE}),
    "gemma4": ("gemma4_text", {"sliding_window": 24, "layer_types": ALTERNATE, "vocab_size_per_layer_input": 128}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ALTERNATE}),
    "llama4-chunks": (
        "llama4_text",
        {
            "attention_chunk_size": 24, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
            "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 16, "num_key_value_heads": 4, "n_shared_experts": 1, "head_dim": 8,
        },
    ),
    "cohere2": ("cohere2", {"sliding_window": 24, "layer_types": ALTERNATE}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("bloom", {"n_layer": 4, "n_head": 4}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "qwen3-next": ("qwen3_next", {**EXPERTS, "shared_expert_intermediate_size": 32, **DELTA}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2, "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96, "full_attn_idxs": [1, 3]}),
}  # fmt: skip


def tiny(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64, seed: int = 3) -> PreTrainedModel:
    """A random model of a family, its weights large enough that its text moves.  ValueError: it has no such attention."""
    kind, own = SMALL[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**BASE, **own})
    # the grouped products of torch know no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in weight_name and "A_log" not in weight_name:
                weight.mul_(4.0)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()
