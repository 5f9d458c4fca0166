"""TensorRT-LLM's PyTorch backend: eagle3, dflash and small_model in the folders it takes as a draft model; write only.

EAGLE-3's layer is called `midlayer` and the layers it reads are in `llm_api.yaml`, counted from 0, as here; DFlash's
are in `dflash_config`.  Embedding and head are taken from the target, but for EAGLE-3's head.  `llm_api.yaml` is what
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


def speculation(source: Source) -> dict[str, Any]:
    """The settings of a drafter in `llm_api.yaml`."""
    settings, layers = source.settings, list(source.model.taps)
    if settings.kind == "eagle3":
        return {"decoding_type": "Eagle3", "max_draft_len": settings.length, "eagle3_layers_to_capture": layers}
    if settings.kind == "small_model":
        return {"decoding_type": "Draft_Target", "max_draft_len": settings.length}
    facts = {"mask_token_id": source.mask_token, "target_layer_ids": layers}
    return {"decoding_type": "DFlash", "max_draft_len": settings.block, **facts}


def files(source: Source, folder: Path) -> None:
    """llm_api.yaml, which names the folder by its final path."""
    place = folder.with_name(folder.name.removesuffix(".part")).absolute()
    settings: dict[str, Any] = {"speculative_config": {**speculation(source), "speculative_model": str(place)}}
    if source.settings.kind == "small_model":
        plain.tokenizer(source, folder)
        settings = {"disable_overlap_scheduler": True, **settings}
    head = "# trtllm-serve TARGET --config llm_api.yaml; where this folder is moved, change speculative_model\n"
    (folder / SETTINGS).write_text(
        head + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )


def one_layer(source: Source) -> str | None:
    """Its loader makes fc only from the second layer on."""
    return "it reads two layers or more; train with more taps" if len(source.model.taps) < 2 else None


EAGLE3_REFUSES = (one_layer, *sglang.EAGLE3_REFUSES)
LAYOUTS = {
    "eagle3": Layout(
        released.MIDLAYER, sglang.eagle3, duplicates=released.head_copy, files=files, refuses=EAGLE3_REFUSES
    ),
    "dflash": Layout(released.DFLASH, sglang.block, files=files, refuses=sglang.DFLASH_REFUSES),
    "small_model": Layout([("lm.*", "*")], plain.written, files=files),
}
FORMAT = Format(LAYOUTS)
