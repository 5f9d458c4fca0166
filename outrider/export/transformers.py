"""transformers: small_model as a plain causal language model, for assisted generation there and for vLLM's
`draft_model`.

The folder is what `from_pretrained` reads, with the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from outrider.errors import ExportError
from outrider.export.layout import Config, Format, Layout, Source
from outrider.targets.hf.causal_lm import NOT_SHAPE, architecture_of
from outrider.targets.hf.transformers import TransformersTarget


def written(source: Source) -> dict[str, Any]:
    lm = source.model.lm
    return architecture_of(lm) | {"architectures": [type(lm).__name__], "dtype": source.target.spec.dtype}


def tokenizer(source: Source, folder: Path) -> None:
    if source.target.tokenizer is not None:
        source.target.tokenizer.save_pretrained(folder)


def read(config: Config, target: TransformersTarget) -> dict[str, Any]:
    if config.get("auto_map"):
        raise ExportError(
            "auto_map in config.json asks to run code that comes with the model, which Outrider does not do; use a "
            "model without"
        )
    if config.get("quantization_config"):
        raise ExportError("config.json has a quantization_config; use the weights from before quantisation")
    # `_attn_implementation` may name a repository of kernels, which transformers would fetch and run
    hidden = [
        key for key in config if key.startswith("_") or key.endswith(("_implementation", "_implementation_internal"))
    ]
    if set(hidden) - {"_name_or_path"}:
        raise ExportError(f"config.json has {hidden[0]}, which would choose code to run; delete it from config.json")
    found = AutoConfig.for_model(**config)
    if found.vocab_size != target.spec.vocabulary:
        raise ExportError(
            f"vocab_size is {found.vocab_size}, but {target.spec.name} has {target.spec.vocabulary} tokens; load the "
            "target it was trained for"
        )
    return {"architecture": {key: value for key, value in config.items() if key not in NOT_SHAPE}}


def _kind(config: Config, names: Collection[str]) -> str | None:
    name = (config.get("architectures") or [""])[0]
    is_plain = name.endswith("ForCausalLM") and not {"dflash_config", "eagle_config"} & config.keys()
    # EAGLE's heads are released under the same name; fc is what no plain model has
    return "small_model" if is_plain and "fc.weight" not in names else None


LAYOUTS = {"small_model": Layout([("lm.*", "*")], written, read, files=tokenizer)}
FORMAT = Format(LAYOUTS, _kind)
