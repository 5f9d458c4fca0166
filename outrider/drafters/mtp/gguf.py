"""MTP as GGUF: the target and the module in one file, since llama.cpp reads the module from the target's file.

llama.cpp has no such module for Qwen3 or Llama, but the one in its `glm4moe` computes the same as ours.  So the
target's layers are written as that architecture's dense layers, and the module as the layer after them.  There, the
module's MLP is a mixture of experts: ours becomes the shared expert, and the single routed expert is zero, with a width
of 1.  In both, the module reads the target's state after the final norm and its own output after its norm.

llama.cpp also reads the first token of a text, with a state of zeros; here that pair does not exist.  So drafts may
differ from ours, but the generated text does not.
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
"""llama.cpp's number for a gating function; irrelevant with one expert."""
BLOCK = "block."
"""Stands for blk.N. in the layout's names, N being the number of the target's layers."""
RENAMED = {"ffn_norm": "post_attention_norm"}
"""Tensor names of Qwen3 and Llama that differ in this architecture."""
SHARED = {"ffn_gate": "ffn_gate_shexp", "ffn_up": "ffn_up_shexp", "ffn_down": "ffn_down_shexp"}
"""Tensor names of the module's MLP."""
MODULE = [
    *(
        (f"layers.0.{name}.weight", f"{BLOCK}{(RENAMED | SHARED).get(gguf_name, gguf_name)}.weight")
        for name, gguf_name in PARTS.items()
    ),
    *((f"layers.0.{name}.weight", f"{BLOCK}nextn.{name}.weight") for name in ("eh_proj", "enorm", "hnorm")),
    ("layers.0.shared_head.norm.weight", f"{BLOCK}nextn.shared_head_norm.weight"),
]  # fmt: skip
EMPTY = ("ffn_gate_inp.weight", "exp_probs_b.bias", "ffn_gate_exps.weight", "ffn_up_exps.weight",
         "ffn_down_exps.weight")  # fmt: skip
"""Tensors of the unused routed expert, all zero."""


def header(source: Source) -> dict[str, Any]:
    """The keys of the target and the module."""
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
    """The target's weights and the module's under the file's names."""
    lm, layers, hidden = source.target.model, source.target.spec.layers, source.target.spec.hidden
    target_weights = weights_of(lm)
    names = model.names_of(
        {"general.architecture": lm.config.model_type, f"{lm.config.model_type}.block_count": layers},
        list(target_weights),
    )
    trunk = {_renamed(names[name]): weight for name, weight in target_weights.items()}
    shapes = ((1, hidden), (1,), (1, 1, hidden), (1, 1, hidden), (1, hidden, 1))
    empty = {f"blk.{layers}.{name}": torch.zeros(shape) for name, shape in zip(EMPTY, shapes, strict=True)}
    module = {name.replace(BLOCK, f"blk.{layers}.", 1): weight for name, weight in weights.items()}
    return trunk | module | empty


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name


def read(path: Path) -> dict[str, Tensor]:
    """The weights of the module by its layout's names, without the target's.

    Raises ExportError for a module whose MLP is a mixture of experts.
    """
    header = reading.read_header(path)
    start = f"blk.{header.keys[f'{NAME}.block_count'] - 1}."
    module = reading.read_tensors(path, [name for name in header.tensors if name.startswith(start)])
    for name in EMPTY:
        weight = module.pop(start + name, None)
        if weight is not None and weight.any():
            raise ExportError(
                f"{start}{name} is not zero: the module is a mixture of experts, which Outrider does not support"
            )
    return {name.replace(start, BLOCK, 1): weight for name, weight in module.items()}


def settings(config: Config, target: TransformersTarget) -> dict[str, Any]:
    check(config, target)
    if config.get(KIND) != "mtp":
        raise ExportError("it is a target with its own module; load the target's folder and use native: yes")
    sizes = model.sizes_of(config)
    module = f"blk.{config[f'{NAME}.block_count'] - 1}."
    return {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
        "intermediate": config[f"{NAME}.expert_shared_count"], "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta, "rope_scaling": sizes.rope_scaling, "partial_rotary_factor": 1.0,
        "modules": 1, "native": False, "qk_norm": f"{module}attn_q_norm.weight" in config[reading.SHAPES],
    }  # fmt: skip


# ── what the format can't store ──────────────────────────────────────────────────────────────────────────────────────


def target(source: Source) -> str | None:
    """The reason if the target can't be written as this architecture."""
    if reason := model.refused(source.target.model, source.target.tokenizer):
        return f"llama.cpp reads it from the target's file, and {reason}"
    if model.is_llama3(_target_sizes(source)):
        return "llama.cpp's glm4moe, its only architecture with such a module, does not support llama3's rotation"
    return None


def sizes(source: Source) -> str | None:
    """The reason if sizes of module and target differ, since the file has one value for both."""
    module_sizes, target_sizes = source.sizes, _target_sizes(source)
    for name in ("heads", "kv_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
                 "partial_rotary_factor"):  # fmt: skip
        value, target_value = getattr(module_sizes, name), getattr(target_sizes, name)
        if value != target_value:
            return (
                f"its {name} is {value}, its target's {target_value}, and llama.cpp has one value for both; train with "
                "the target's"
            )
    return None


def _target_sizes(source: Source) -> Any:
    return source.target.spec.sizes


REFUSES: tuple[Answer, ...] = (
    only("native", False, "its modules are the target's own; use llama.cpp's converter on the target"),
    only("modules", 1, "it has {} modules, llama.cpp only one"), target, sizes,
)  # fmt: skip


def whole_target(source: Source) -> str | None:
    return "model.gguf contains the target too: llama-server -m model.gguf --spec-type draft-mtp, without -md"
