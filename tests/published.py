"""Draft models as their authors publish them, written by hand: names, shapes and config.json, at tiny sizes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.targets.hf.transformers import TransformersTarget

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, RANK, DRAFTED, MASK = 2, 1, 8, 48, 8, 40, 5
Weights = dict[str, Tensor]


class Published(NamedTuple):
    """One folder."""

    kind: str
    """Ours."""
    format: str
    config: dict[str, Any]
    weights: Weights
    file: str = "model.safetensors"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: weight.contiguous() for name, weight in self.weights.items()}, folder / self.file)
        return folder


class Sizes:
    """Random weights and configs for one target.  They are in bfloat16, as published ones are."""

    def __init__(self, target: TransformersTarget) -> None:
        self.target, spec = target, target.spec
        self.hidden, self.vocabulary = spec.hidden, spec.vocabulary
        self.noise = torch.Generator().manual_seed(11)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.noise).mul(0.2).bfloat16()

    def norm(self, size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=self.noise)).bfloat16()

    def attention(self, name: str, width: int | None = None, qk_norm: bool = False) -> Weights:
        width, wide = width or self.hidden, HEADS * HEAD_DIM
        found = {
            f"{name}.q_proj.weight": self.random(wide, width), f"{name}.o_proj.weight": self.random(self.hidden, wide),
            f"{name}.k_proj.weight": self.random(KV_HEADS * HEAD_DIM, width),
            f"{name}.v_proj.weight": self.random(KV_HEADS * HEAD_DIM, width),
        }  # fmt: skip
        norms = {f"{name}.{part}_norm.weight": self.norm(HEAD_DIM) for part in ("q", "k")}
        return found | (norms if qk_norm else {})

    def layer(self, name: str, width: int | None = None, qk_norm: bool = False, input_norm: bool = True) -> Weights:
        """width: of what its attention reads; EAGLE-3's reads two states."""
        wide, down = (INTERMEDIATE, self.hidden), (self.hidden, INTERMEDIATE)
        sizes = {"gate": wide, "up": wide, "down": down}
        found = {f"{name}.mlp.{part}_proj.weight": self.random(*size) for part, size in sizes.items()}
        found[f"{name}.post_attention_layernorm.weight"] = self.norm(self.hidden)
        if input_norm:
            found[f"{name}.input_layernorm.weight"] = self.norm(self.hidden)
        if width is not None:
            found[f"{name}.hidden_norm.weight"] = self.norm(self.hidden)
        return found | self.attention(f"{name}.self_attn", width, qk_norm)

    def copies(self) -> Weights:
        """Embedding and head, frozen copies of the target's."""
        ids = torch.arange(self.vocabulary)
        rows = {"embed_tokens.weight": self.target.embedding_rows(ids), "lm_head.weight": self.target.head_rows(ids)}
        return {name: weight.detach().bfloat16() for name, weight in rows.items()}

    def reduced(self) -> Weights:
        """A vocabulary of its own, with its head and both maps."""
        chosen = torch.randperm(self.vocabulary, generator=self.noise)[:DRAFTED].sort().values
        allowed = torch.zeros(self.vocabulary, dtype=torch.bool)
        allowed[chosen] = True
        head = self.random(DRAFTED, self.hidden)
        return {"d2t": chosen - torch.arange(DRAFTED), "t2d": allowed, "lm_head.weight": head}

    def fused(self, layer: str, taps: int, qk_norm: bool = False) -> Weights:
        """EAGLE-3 but for its head."""
        return {
            "fc.weight": self.random(self.hidden, taps * self.hidden), "norm.weight": self.norm(self.hidden),
            **self.layer(layer, 2 * self.hidden, qk_norm),
        }  # fmt: skip

    def block(self, taps: int, layers: int = 2) -> Weights:
        """A DFlash."""
        found = {"fc.weight": self.random(self.hidden, taps * self.hidden), "norm.weight": self.norm(self.hidden)}
        for number in range(layers):
            found |= self.layer(f"layers.{number}", qk_norm=True)
        return found | {"hidden_norm.weight": self.norm(self.hidden)}

    def markov(self) -> Weights:
        size = self.vocabulary
        return {
            "markov_head.markov_w1.weight": self.random(size, RANK), "markov_head.markov_w2.weight": self.random(size,
            RANK),
            "confidence_head.proj.weight": self.random(1, self.hidden + RANK),
            "confidence_head.proj.bias": self.random(1),
        }  # fmt: skip

    def shape(self, layers: int, family: str, **more: Any) -> dict[str, Any]:
        return {
            "model_type": family, "hidden_size": self.hidden, "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "vocab_size": self.vocabulary, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, **more,
        }  # fmt: skip

    def speculators(self, kind: str, layers: int, family: str, tokens: int, **more: Any) -> dict[str, Any]:
        names = {"eagle3": "Eagle3Speculator", "mtp": "MTPDraftModel"}
        method = {
            "proposal_type": "greedy",
            "speculative_tokens": tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        verifier = {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]}
        return {
            "architectures": [names[kind]], "speculators_model_type": kind, "speculators_version": "0.7.0",
            "dtype": "bfloat16", "tie_word_embeddings": False,
            "transformer_layer_config": self.shape(layers, family, **rope),
            "speculators_config": {"algorithm": kind, "proposal_methods": [method], "default_proposal_method": "greedy",
                                   "verifier": verifier}, **more,
        }  # fmt: skip


CONFIDENCE = {
    "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def speculators_eagle3(sizes: Sizes) -> Published:
    more = {
        "draft_vocab_size": DRAFTED, "norm_before_residual": True, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "embed_requires_grad": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    }  # fmt: skip
    copies = {"embed_tokens.weight": sizes.copies()["embed_tokens.weight"]}
    weights = sizes.fused("layers.0", 3) | sizes.reduced() | copies
    return Published("eagle3", "speculators", sizes.speculators("eagle3", 1, "llama", 3, **more), weights)


def speculators_mtp(sizes: Sizes) -> Published:
    weights = sizes.layer("mtp_layers.0", qk_norm=True)
    weights["mtp_layers.0.input_proj.weight"] = sizes.random(sizes.hidden, 2 * sizes.hidden)
    for name in ("hidden_layernorm", "token_layernorm", "final_layernorm"):
        weights[f"mtp_layers.0.{name}.weight"] = sizes.norm(sizes.hidden)
    config = sizes.speculators("mtp", 1, "qwen3", 3, num_nextn_predict_layers=1)
    return Published("mtp", "speculators", config, weights)


def safeailab_eagle3(sizes: Sizes) -> Published:
    """Names no taps."""
    own = {"draft_vocab_size": DRAFTED, "rope_scaling": None, "rope_theta": 1e4}
    config = sizes.shape(1, "llama", architectures=["LlamaForCausalLMEagle3"], **own)
    return Published("eagle3", "eagle", config, sizes.fused("midlayer", 3) | sizes.reduced())


def _zlab_block(sizes: Sizes, architecture: str, block: int, **own: Any) -> dict[str, Any]:
    return sizes.shape(
        2, "qwen3", architectures=[architecture], block_size=block, num_target_layers=sizes.target.spec.layers,
        layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        auto_map={"AutoModel": f"dflash.{architecture}"},
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 5], **own},
    )  # fmt: skip


def zlab_dflash(sizes: Sizes) -> Published:
    """SpecForge's `--to hf` writes the same."""
    return Published("dflash", "sglang", _zlab_block(sizes, "DFlashDraftModel", 4), sizes.block(2))


def _deepspec(sizes: Sizes, architecture: str, layers: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return sizes.shape(
        layers, "qwen3", architectures=[architecture], num_target_layers=sizes.target.spec.layers, target_layer_ids=ids,
        layer_types=["full_attention"] * layers, tie_word_embeddings=False, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **more,
    )  # fmt: skip


def deepspec_dspark(sizes: Sizes) -> Published:
    more = {"block_size": 3, "mask_token_id": MASK, "num_anchors": 512, **CONFIDENCE}
    config = _deepspec(sizes, "Qwen3DSparkModel", 2, [1, 5], **more)
    return Published("dspark", "deepspec", config, sizes.block(2) | sizes.markov() | sizes.copies())


def deepspec_dflash(sizes: Sizes) -> Published:
    more = {"block_size": 3, "mask_token_id": MASK, "num_anchors": 512}
    more |= {"markov_rank": 0, "enable_confidence_head": False}
    config = _deepspec(sizes, "Qwen3DSparkModel", 2, [1, 5], **more)
    return Published("dflash", "deepspec", config, sizes.block(2) | sizes.copies())


def deepspec_eagle3(sizes: Sizes) -> Published:
    more = {"target_model_name_or_path": "org/target", "ttt_length": 7, "step_loss_decay": 0.8}
    config = _deepspec(sizes, "Qwen3Eagle3Model", 1, [0, 1, 3, 4, 6], draft_num_hidden_layers=1, **more)
    return Published("eagle3", "deepspec", config, sizes.fused("layers.0", 5, True) | sizes.copies())


def medusa_heads(sizes: Sizes) -> Published:
    """Numbers for names, and a file of another name."""
    weights = {}
    for head in range(3):
        weights[f"{head}.0.linear.weight"] = sizes.random(sizes.hidden, sizes.hidden)
        weights[f"{head}.0.linear.bias"] = sizes.random(sizes.hidden)
        weights[f"{head}.1.weight"] = sizes.random(sizes.vocabulary, sizes.hidden)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/target"}
    return Published("medusa", "medusa", config, weights, "medusa_lm_head.safetensors")


LAYOUTS: dict[str, Callable[[Sizes], Published]] = {
    make.__name__: make for make in (
        speculators_eagle3, speculators_mtp, safeailab_eagle3, zlab_dflash, deepspec_dspark, deepspec_dflash,
        deepspec_eagle3, medusa_heads,
    )
}  # fmt: skip
