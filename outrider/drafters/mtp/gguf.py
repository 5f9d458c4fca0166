"""mtp as GGUF: the target and the module in one file, since llama.cpp looks for the module in the target's.

llama.cpp has no such module for a Qwen3 or a Llama, but one in its `glm4moe` that computes what ours does: the target's
layers are written as that architecture's dense layers, and the module as the layer after them.  Its MLP is a mixture
there: ours is the expert that every token shares, and the one that is routed to has a width of 1 and is zero.  The
module reads the target's state after the final norm, and its own after its norm, in both.

llama.cpp also reads the first token of a text, beside a state of zeros; here that pair does not exist.  So a draft may
differ from ours; the text does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ExportError
from outrider.formats.gguf import file, model, reading, tokenizer
from outrider.formats.gguf.drafters import PARTS
from outrider.formats.gguf.settings import check
from outrider.formats.keys import OURS as KIND
from outrider.formats.layout import Answer, Config, Source, only
from outrider.targets.hf.transformers import TransformersTarget
from outrider.weights import weights_of

NAME = "glm4moe"
SIGMOID = 2
"""llama.cpp's number for how the expert is chosen; with one there is no choice."""
BLOCK = "block."
"""In names of the layout what stands for blk.N., N being the number of the target's layers."""
RENAMED = {"ffn_norm": "post_attention_norm"}
"""A Qwen3's and Llama's names of tensors where this architecture has others."""
SHARED = {"ffn_gate": "ffn_gate_shexp", "ffn_up": "ffn_up_shexp", "ffn_down": "ffn_down_shexp"}
"""The MLP of the module."""
MODULE = [
    *(
        (f"layers.0.{ours}.weight", f"{BLOCK}{(RENAMED | SHARED).get(theirs, theirs)}.weight")
        for ours, theirs in PARTS.items()
    ),
    *((f"layers.0.{name}.weight", f"{BLOCK}nextn.{name}.weight") for name in ("eh_proj", "enorm", "hnorm")),
    ("layers.0.shared_head.norm.weight", f"{BLOCK}nextn.shared_head_norm.weight"),
]  # fmt: skip
EMPTY = ("ffn_gate_inp.weight", "exp_probs_b.bias", "ffn_gate_exps.weight", "ffn_up_exps.weight",
         "ffn_down_exps.weight")  # fmt: skip
"""Tensors of the mixture that is none, all zero."""


def header(source: Source) -> dict[str, Any]:
    """The keys of target and module."""
    spec = source.target.spec
    shape = {
        "block_count": spec.layers + 1, "nextn_predict_layers": 1, "context_length": spec.context,
        "embedding_length": spec.hidden, "vocab_size": spec.vocabulary, **model.layer(_target_sizes(source)),
        "leading_dense_block_count": spec.layers, "expert_count": 1, "expert_used_count": 1,
        "expert_shared_count": source.sizes.intermediate, "expert_feed_forward_length": 1, "expert_weights_norm": True,
        "expert_weights_scale": 1.0, "expert_gating_func": SIGMOID,
    }  # fmt: skip
    return {
        **file.general(NAME, file.precision_of(source)), KIND: "mtp",
        **{f"{NAME}.{key}": value for key, value in shape.items()},
        **tokenizer.keys(source.target.tokenizer, spec.vocabulary, source.target.model),
    }  # fmt: skip


def tensors(weights: Mapping[str, Tensor], keys: Config, source: Source) -> dict[str, Tensor]:
    """The target's weights and the module's, as the file has them."""
    lm, layers, hidden = source.target.model, source.target.spec.layers, source.target.spec.hidden
    own = weights_of(lm)
    theirs = model.names_of(
        {"general.architecture": lm.config.model_type, f"{lm.config.model_type}.block_count": layers}, list(own)
    )
    trunk = {_renamed(theirs[name]): weight for name, weight in own.items()}
    shapes = ((1, hidden), (1,), (1, 1, hidden), (1, 1, hidden), (1, hidden, 1))
    empty = {f"blk.{layers}.{name}": torch.zeros(shape) for name, shape in zip(EMPTY, shapes, strict=True)}
    module = {name.replace(BLOCK, f"blk.{layers}.", 1): weight for name, weight in weights.items()}
    return trunk | module | empty


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name


def read(path: Path) -> dict[str, Tensor]:
    """The weights of the module by the names of its layout; the target's are left.

    Raises ExportError for a module whose MLP is a mixture.
    """
    header = reading.read_header(path)
    start = f"blk.{header.keys[f'{NAME}.block_count'] - 1}."
    found = reading.read_tensors(path, [name for name in header.tensors if name.startswith(start)])
    for name in EMPTY:
        weight = found.pop(start + name, None)
        if weight is not None and weight.any():
            raise ExportError(f"{start}{name} is not zero: the module is a mixture of experts, which is not known here")
    return {name.replace(start, BLOCK, 1): weight for name, weight in found.items()}


def settings(config: Config, target: TransformersTarget) -> dict[str, Any]:
    check(config, target)
    if config.get(KIND) != "mtp":
        raise ExportError("it is a target with a module of its own; name the target's folder, whose module is native")
    sizes = model.sizes_of(config)
    module = f"blk.{config[f'{NAME}.block_count'] - 1}."
    return {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
        "intermediate": config[f"{NAME}.expert_shared_count"], "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta, "rope_scaling": sizes.rope_scaling, "partial_rotary_factor": 1.0,
        "modules": 1, "native": False, "qk_norm": f"{module}attn_q_norm.weight" in config[reading.SHAPES],
    }  # fmt: skip


# ── what can't be said ───────────────────────────────────────────────────────────────────────────────────────────────


def target(source: Source) -> str | None:
    """Why the target can't be written as this architecture."""
    if reason := model.refused(source.target.model, source.target.tokenizer):
        return f"llama.cpp reads it from the target's file, and {reason}"
    if model.is_llama3(_target_sizes(source)):
        return "llama.cpp's glm4moe, the one that has such a module, does not know llama3's rotation"
    return None


def sizes(source: Source) -> str | None:
    """The file has one value for the target's layers and the module."""
    own, theirs = source.sizes, _target_sizes(source)
    for name in ("heads", "kv_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
                 "partial_rotary_factor"):  # fmt: skip
        mine, wanted = getattr(own, name), getattr(theirs, name)
        if mine != wanted:
            return f"its {name} is {mine}, its target's {wanted}, and llama.cpp reads one value for both; train with it"
    return None


def _target_sizes(source: Source) -> Any:
    return source.target.spec.sizes


REFUSES: tuple[Answer, ...] = (
    only("native", False, "its modules are the target's own; use llama.cpp's converter on the target"),
    only("modules", 1, "it has {} modules, llama.cpp's one"), target, sizes,
)  # fmt: skip


def whole_target(source: Source) -> str | None:
    return "model.gguf holds the target too: llama-server -m model.gguf --spec-type draft-mtp, without -md"
