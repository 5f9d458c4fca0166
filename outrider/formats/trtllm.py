"""TensorRT-LLM's PyTorch backend: the folders it loads as a draft model.  Export only.

EAGLE-3's layer is called `midlayer` and its taps are in `llm_api.yaml`, counted from 0, as in Outrider; DFlash's are in
`dflash_config`.  Embedding and head are taken from the target, except for EAGLE-3's head.  `llm_api.yaml` is the file
for `trtllm-serve TARGET --config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from outrider.formats.layout import Source

SETTINGS = "llm_api.yaml"


def files(speculation: Callable[[Source], Mapping[str, Any]], **more: Any) -> Callable[[Source, Path], None]:
    """A writer of llm_api.yaml, which names the folder by its final path.  speculation: the drafter's settings in it.
    more: other settings."""

    def write(source: Source, folder: Path) -> None:
        place = folder.with_name(folder.name.removesuffix(".part")).absolute()
        settings = {**more, "speculative_config": {**speculation(source), "speculative_model": str(place)}}
        head = "# trtllm-serve TARGET --config llm_api.yaml; where this folder is moved, change speculative_model\n"
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        (folder / SETTINGS).write_text(head + text, encoding="utf-8")

    return write
