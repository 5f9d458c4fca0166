"""Medusa's heads, written for vLLM (0.32 and before) and read from there or as Medusa's authors release them.

vLLM calls a head's parts `blocks.K.layers.L` and `lm_heads.K`, the authors `K.L.linear` and `K.L.weight`.  Every head there has
an output matrix of its own: where ours is the target's, each gets a copy.  Which tree is drafted stands in neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from outrider.errors import ExportError
from outrider.export.layout import Config, Format, Layout, Source
from outrider.targets.transformers import TransformersTarget

DEEPEST, MOST = 4, 16
"""Blocks of a head and heads that names are made for."""


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
        # unless it is announced, vLLM passes over the bias in silence
        "medusa_fc_bias": True,
        "max_paths": settings.nodes,
        "topk": 10,
        "max_seq_len": spec.context,
    }


def read(config: Config, target: TransformersTarget) -> dict[str, Any]:
    if config.get("truncated_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        raise ExportError(f"truncated_vocab_size {config['truncated_vocab_size']}: heads here draft from the whole vocabulary")
    heads = config.get("num_heads", config.get("medusa_num_heads"))
    layers = config.get("num_hidden_layers", config.get("medusa_num_layers", 1))
    return {"heads": heads, "layers": layers, "sequential": False}


def copies(source: Source) -> list[str]:
    return [f"lm_heads.{k}.weight" for k in range(source.settings.heads)] if source.settings.head == "target" else []


def sequential(source: Source) -> str | None:
    if source.settings.layers > DEEPEST or source.settings.heads > MOST:
        return f"it has more than {MOST} heads of {DEEPEST} blocks"
    return "its heads read the words before their own, which the format's don't" if source.settings.sequential else None


def names() -> list[tuple[str, str]]:
    """Of a head's parts, the output matrix last: its place tells how many blocks come before."""
    found = []
    for k in range(MOST):
        found += [(f"medusa_head.{k}.{n}.linear.*", f"blocks.{k}.layers.{n}.*") for n in range(DEEPEST)]
        found += [(f"medusa_head.{k}.{n}.weight", f"lm_heads.{k}.weight") for n in range(1, DEEPEST + 1)]
    return found


def _kind(config: Config, names: Collection[str]) -> str | None:
    is_medusa = config.get("model_type") == "medusa" or "medusa_num_heads" in config
    return "medusa" if is_medusa else None


def released(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' names made vLLM's, where they are such."""
    found = {}
    for name, weight in weights.items():
        k, n, part = [*name.removeprefix("medusa_head.").split(".", 2), "", ""][:3]
        if k.isdigit() and n.isdigit():
            name = (
                f"blocks.{k}.layers.{n}.{part.removeprefix('linear.')}"
                if part.startswith("linear.")
                else f"lm_heads.{k}.{part}"
            )
        found[name] = weight
    return found


LAYOUTS = {
    "medusa": Layout(names(), written, read, copies, refuses=sequential, assumed={"head": "own"}, translates=released),
}
FORMAT = Format(LAYOUTS, _kind)
