"""Medusa's heads in vLLM's format (0.32 and before), and read from its authors' format.

vLLM names a head's parts `blocks.K.layers.L` and `lm_heads.K`, the authors `K.L.linear` and `K.L.weight`.  Every head
has its own output matrix there: if ours is the target's, each gets a copy.  Neither format stores the tree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from outrider.errors import ExportError
from outrider.formats.layout import Config, Layout, Source, only
from outrider.targets.hf.transformers import TransformersTarget

DEEPEST, MOST = 4, 16
"""Maximum number of blocks per head, and of heads."""
RELEASED = (
    (r"^(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"^(?:medusa_head\.)?(\d+)\.\d+\.", r"lm_heads.\1."),
)
"""Prefixes of the authors' names, and vLLM's."""


def written(source: Source) -> dict[str, Any]:
    settings, spec = source.settings, source.target.spec
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "dtype": spec.dtype,
        "hidden_size": spec.hidden,
        "vocab_size": spec.vocabulary,
        "truncated_vocab_size": spec.vocabulary,
        "num_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        # without this, vLLM silently ignores the bias
        "medusa_fc_bias": True,
        "max_paths": settings.nodes,
        "topk": 10,
        "max_seq_len": spec.context,
    }


def read(config: Config, target: TransformersTarget) -> dict[str, Any]:
    if config.get("truncated_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        raise ExportError(
            f"truncated_vocab_size is {config['truncated_vocab_size']}, but Outrider's heads draft from the whole "
            "vocabulary; use a draft without it"
        )
    heads = config.get("num_heads", config.get("medusa_num_heads"))
    layers = config.get("num_hidden_layers", config.get("medusa_num_layers", 1))
    return {"heads": heads, "layers": layers, "sequential": False}


def duplicates(source: Source) -> list[str]:
    """The output matrix of every head; ignored for heads with their own."""
    return [f"lm_heads.{k}.weight" for k in range(source.settings.heads)]


def too_large(source: Source) -> str | None:
    if source.settings.layers > DEEPEST or source.settings.heads > MOST:
        return f"it has more than {MOST} heads of {DEEPEST} blocks"
    return None


def released(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the authors' names replaced by vLLM's."""
    renamed = {}
    for name, weight in weights.items():
        for pattern, replacement in RELEASED:
            name = re.sub(pattern, replacement, name)
        renamed[name] = weight
    return renamed


def is_of(config: Config, names: Collection[str]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


REFUSES = (too_large, only("sequential", False, "its heads read earlier words, which the format does not support"))
NAMES = [
    rule for k in range(MOST)
    for rule in (
        *((f"medusa_head.{k}.{n}.linear.*", f"blocks.{k}.layers.{n}.*") for n in range(DEEPEST)),
        *((f"medusa_head.{k}.{n}.weight", f"lm_heads.{k}.weight") for n in range(1, DEEPEST + 1)),
    )
]  # fmt: skip
"""The output matrix is a head's last part, numbered by the blocks before it."""
FORMATS = {
    "medusa": Layout(
        NAMES, written, read, duplicates, assumed={"head": "own"}, translates=released, refuses=REFUSES, is_of=is_of
    )
}
