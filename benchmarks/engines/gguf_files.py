"""Files of the demo for other engines, written once: its trained drafter as GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.export.writing import export_folder
from outrider.formats.gguf import layouts


def drafter(checkpoint: Path, target: Any, place: Path, kind: str) -> Path:
    """A checkpoint as a GGUF file in `place`, of `kind` f32, f16, bf16 or q8_0.

    Raises FileNotFoundError where there is no checkpoint, ExportError where the drafter can't be said.
    """
    if not checkpoint.exists():
        raise FileNotFoundError(f"no {checkpoint}: run `make demo`")
    folder = place / f"{checkpoint.parent.name}-{kind}"
    return (folder if folder.exists() else export_folder(checkpoint, "gguf", folder, target, kind)) / layouts.FILE
