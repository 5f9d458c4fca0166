"""TensorRT-LLM's PyTorch backend: eagle3, dflash and small_model in the folders it takes as a draft model; write only.

EAGLE-3's layer is called `midlayer` and the layers it reads stand in `llm_api.yaml`, counted from 0, as here; DFlash's stand in
`dflash_config`.  Embedding and head are taken from the target, but for EAGLE-3's head.  `llm_api.yaml` is what
`trtllm-serve TARGET --config` reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from outrider.export import released, sglang
from outrider.export import transformers as plain
from outrider.export.layout import Format, Layout, Source

SETTINGS = "llm_api.yaml"


def eagle3(source: Source) -> dict[str, Any]:
    return {"decoding_type": "Eagle3", "max_draft_len": source.settings.length,
            "eagle3_layers_to_capture": list(source.model.taps)}  # fmt: skip


def dflash(source: Source) -> dict[str, Any]:
    backbone: Any = source.model.backbone
    return {
        "decoding_type": "DFlash",
        "max_draft_len": source.settings.block,
        "mask_token_id": backbone.mask_token,
        "target_layer_ids": list(source.model.taps),
    }


def small_model(source: Source) -> dict[str, Any]:
    return {"decoding_type": "Draft_Target", "max_draft_len": source.settings.length}


def eagle3_files(source: Source, folder: Path) -> None:
    _write(folder, eagle3(source))


def dflash_files(source: Source, folder: Path) -> None:
    _write(folder, dflash(source))


def small_model_files(source: Source, folder: Path) -> None:
    plain.tokenizer(source, folder)
    _write(folder, small_model(source), disable_overlap_scheduler=True)


def _write(folder: Path, speculation: dict[str, Any], **rest: Any) -> None:
    """llm_api.yaml, which names the folder by the place that it is going to have."""
    place = folder.with_name(folder.name.removesuffix(".part")).absolute()
    said = {**rest, "speculative_config": {**speculation, "speculative_model": str(place)}}
    head = "# trtllm-serve TARGET --config llm_api.yaml; where this folder is moved, change speculative_model\n"
    (folder / SETTINGS).write_text(head + yaml.safe_dump(said, sort_keys=False, allow_unicode=True), encoding="utf-8")


def not_eagle3(source: Source) -> str | None:
    if len(source.model.taps) < 2:  # its loader makes a place for fc from the second layer on
        return "it reads two layers or more; train with more taps"
    return sglang.not_eagle3(source)


LAYOUTS = {
    "eagle3": Layout(released.MIDLAYER, sglang.eagle3, copies=released.head_copy, files=eagle3_files, refuses=not_eagle3),
    "dflash": Layout(released.DFLASH, sglang.block, files=dflash_files, refuses=sglang.not_dflash),
    "small_model": Layout([("lm.*", "*")], plain.written, files=small_model_files),
}
FORMAT = Format(LAYOUTS)
