"""A small model in the formats of other programs: transformers, TensorRT-LLM, GGUF.

The transformers folder is for `from_pretrained`, with the target's tokenizer: for assisted generation in transformers
and for `draft_model` in vLLM.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from outrider.errors import ExportError
from outrider.formats import trtllm
from outrider.formats.gguf import layouts, model, refusals, settings
from outrider.formats.layout import Config, Layout, Source
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
            "auto_map in config.json would run code that comes with the model, which Outrider does not do; use a "
            "model without it"
        )
    if config.get("quantization_config"):
        raise ExportError("config.json has a quantization_config; use the unquantised weights")
    # `_attn_implementation` may name a repository of kernels, which transformers would fetch and run
    hidden = [
        key for key in config if key.startswith("_") or key.endswith(("_implementation", "_implementation_internal"))
    ]
    if set(hidden) - {"_name_or_path"}:
        raise ExportError(f"config.json has {hidden[0]}, which selects code to run; delete it from config.json")
    lm_config = AutoConfig.for_model(**config)
    if lm_config.vocab_size != target.spec.vocabulary:
        raise ExportError(
            f"vocab_size is {lm_config.vocab_size}, but {target.spec.name} has {target.spec.vocabulary} tokens; load "
            "the target it was trained for"
        )
    return {"architecture": {key: value for key, value in config.items() if key not in NOT_SHAPE}}


def is_plain(config: Config, names: Collection[str]) -> bool:
    name = (config.get("architectures") or [""])[0]
    is_causal = name.endswith("ForCausalLM") and not {"dflash_config", "eagle_config"} & config.keys()
    # EAGLE's heads are released under the same name; no plain model has fc
    return is_causal and "fc.weight" not in names


# ── TensorRT-LLM ─────────────────────────────────────────────────────────────────────────────────────────────────────

speculation = trtllm.files(
    lambda source: {"decoding_type": "Draft_Target", "max_draft_len": source.settings.length},
    disable_overlap_scheduler=True,
)


def trtllm_files(source: Source, folder: Path) -> None:
    tokenizer(source, folder)
    speculation(source, folder)


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_gguf(source: Source) -> dict[str, Any]:
    return layouts.header(source.model.lm, source.target.tokenizer, layouts.precision_of(source))


def of_gguf(config: Config, target: TransformersTarget) -> dict[str, Any]:
    settings.check_vocabulary(config, target)
    return model.architecture(config)


def refused(source: Source) -> str | None:
    return layouts.refused(source.model.lm, source.target.tokenizer)


NAMES = [("lm.*", "*")]
FORMATS = {
    "transformers": Layout(NAMES, written, read, files=tokenizer, is_of=is_plain),
    "trtllm": Layout(NAMES, written, files=trtllm_files),
    "gguf": layouts.layout(
        NAMES, to_gguf, of_gguf, lambda weights, config, source: model.tensors(weights, config, source.model.lm),
        lambda path: model.read_file(path)[1], is_of=layouts.of_architecture(*model.FAMILIES), refuses=(refused,),
        notes=(refusals.trees,),
    ),
}  # fmt: skip
