"""config.json of the models that are loaded most, as facts: architecture, switches and quantisation, with sizes cut
down; and what a target of each is."""

from typing import Any, NamedTuple

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "head_dim": 4,  # of the rotary part, as these models set it themselves
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 5e5}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4,
        "original_max_position_embeddings": 64}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"},
                                  "input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}},
}  # fmt: skip


class Known(NamedTuple):
    """One config, and what comes of it."""

    name: str
    fields: dict[str, Any]
    outcome: str
    """`loads`, or a text of the one sentence that refuses it."""
    plan: str = "plans"
    """`plans`, or a text of the sentence."""


def text(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **SIZES, **more}


def gpt(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 96, **more}


def seeing(kind: str, inner: str, **more: Any) -> dict[str, Any]:
    vision = more.pop("vision", VISION)
    return {"model_type": kind, "text_config": text(inner, **more.pop("text", {})), "vision_config": vision, **more}


CONFIGS = [
    Known("Llama 3.1 8B Instruct", text("llama", rope_parameters=ROPE), "loads"),
    Known("Llama 3.2 1B Instruct", text("llama", rope_parameters=ROPE, tie_word_embeddings=True), "loads"),
    Known("TinyLlama 1.1B Chat", text("llama", torch_dtype="bfloat16"), "loads"),
    Known("Llama 4 Scout", seeing("llama4", "llama4_text", text={"num_local_experts": 2, "num_experts_per_tok": 1,
          "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}), "loads"),
    Known("Qwen2.5 7B Instruct", text("qwen2"), "loads"),
    Known("Qwen2.5 0.5B Instruct", text("qwen2", tie_word_embeddings=True, use_sliding_window=False), "loads"),
    Known("Qwen2.5-VL 7B Instruct", seeing("qwen2_5_vl", "qwen2_5_vl_text", vision=QWEN_VISION,
          text={"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}}), "loads"),
    Known("Qwen3 8B", text("qwen3"), "loads"),
    Known("Qwen3 0.6B", text("qwen3", tie_word_embeddings=True), "loads"),
    Known("Qwen3 30B A3B", text("qwen3_moe", num_experts=4, decoder_sparse_step=1, **EXPERTS), "loads"),
    Known("Qwen3-VL 8B Instruct", seeing("qwen3_vl", "qwen3_vl_text", vision=QWEN_VISION | {
          "deepstack_visual_indexes": [0]}, text={"rope_parameters": {"rope_type": "default", "rope_theta": 5e6,
          "mrope_section": [2, 1, 1]}}), "loads"),
    Known("Qwen3-Next 80B A3B", text("qwen3_next", num_experts=4, shared_expert_intermediate_size=16,
          linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
          layer_types=["linear_attention", "full_attention"], **EXPERTS), "loads"),
    Known("Mistral 7B Instruct v0.3", text("mistral", sliding_window=None), "loads"),
    Known("Mistral Small 3.1 24B", seeing("mistral3", "mistral", vision=VISION | {"model_type": "pixtral"}), "loads"),
    Known("Mixtral 8x7B Instruct", text("mixtral", num_local_experts=4, num_experts_per_tok=2), "loads"),
    Known("Gemma 2 2B", text("gemma2", sliding_window=16, query_pre_attn_scalar=8, attn_logit_softcapping=50.0,
          final_logit_softcapping=30.0, layer_types=["sliding_attention", "full_attention"]), "loads"),
    Known("Gemma 3 1B", text("gemma3_text", sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
          "loads"),
    Known("Gemma 3 4B", seeing("gemma3", "gemma3_text", mm_tokens_per_image=4, vision=VISION | {
          "model_type": "siglip_vision_model"}), "loads"),
    Known("Phi-2", text("phi", num_key_value_heads=4, partial_rotary_factor=0.5), "loads"),
    Known("Phi-3.5 mini", text("phi3", rope_parameters=LONG, original_max_position_embeddings=64, pad_token_id=0),
          "loads"),
    Known("GPT-2", gpt("gpt2"), "loads"),
    Known("OPT 125M", {"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
          "loads"),
    Known("BLOOM 560M", {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
          "loads"),
    Known("Pythia 160M", text("gpt_neox", num_key_value_heads=4, rotary_pct=0.25), "loads"),
    Known("Falcon 7B", {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "vocab_size": 96, "multi_query": True, "new_decoder_architecture": False, "alibi": False}, "loads"),
    Known("gpt-oss 20B", text("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
          layer_types=["sliding_attention", "full_attention"]), "loads"),
    Known("DeepSeek-V2 Lite Chat", text("deepseek_v2", **EXPERTS, **LATENT), "loads"),
    Known("DeepSeek-V3", text("deepseek_v3", n_group=2, topk_group=1, **EXPERTS, **LATENT), "loads"),
    Known("GLM-4.5 Air", text("glm4_moe", n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
          topk_group=1, **EXPERTS), "loads"),
    Known("OLMo 2 7B", text("olmo2"), "loads"),
    Known("SmolLM3 3B", text("smollm3", no_rope_layers=[1, 0], pad_token_id=0), "loads"),
    Known("Granite 3.3 2B", text("granite", logits_scaling=8.0, residual_multiplier=0.22), "loads"),
    Known("StarCoder2 3B", text("starcoder2", use_bias=True), "loads"),
    Known("LLaVA 1.5 7B", seeing("llava", "llama", vision=VISION | {"model_type": "clip_vision_model"}), "loads"),
    Known("Kimi K2", text("kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}),
          "trust_remote_code", "model_type 'kimi_k2'"),
    Known("T5 base", {"model_type": "t5", "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8,
          "vocab_size": 96}, "T5Config", "T5Config"),
    Known("Qwen2.5 7B Instruct AWQ", text("qwen2", quantization_config={"quant_method": "awq", "bits": 4,
          "group_size": 128, "version": "gemm", "zero_point": True}), "'awq', which can't be read here"),
    Known("Qwen2.5 7B Instruct GPTQ Int4", text("qwen2", quantization_config={"quant_method": "gptq", "bits": 4,
          "group_size": 128, "desc_act": False, "sym": True}), "'gptq', which can't be read here"),
    Known("Qwen3 8B FP8", text("qwen3", quantization_config={"quant_method": "fp8", "fmt": "e4m3",
          "activation_scheme": "dynamic", "weight_block_size": [128, 128]}), "dequantised"),
    Known("Llama 3.1 8B Instruct w8a8", text("llama", quantization_config=W8A8), "dequantised"),
    Known("Llama 3.1 8B bnb 4-bit", text("llama", quantization_config={"quant_method": "bitsandbytes",
          "load_in_4bit": True}), "'bitsandbytes"),
    Known("Mamba 2 2.7B", {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8,
          "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "vocab_size": 96}, "loads"),
]  # fmt: skip
"""As their model cards have them in 2025, by name."""
