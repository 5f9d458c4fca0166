"""Write the table of sizes into docs/export-formats.md, between its two markers: our defaults for the demo target, in
every format.

python scripts/export_sizes.py

If a format needs other settings than our defaults, the table's first column names them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from outrider import load_target
from outrider.checkpoint import save
from outrider.config import build
from outrider.drafters import find
from outrider.errors import ExportError
from outrider.export.formats import find as find_format
from outrider.export.writing import export_folder
from outrider.targets.hf.transformers import TransformersTarget

PAGE = Path(__file__).resolve().parent.parent / "docs" / "export-formats.md"
BEGIN, END = "<!-- sizes -->", "<!-- /sizes -->"
COLUMNS = ("speculators", "sglang", "deepspec", "trtllm", "medusa", "transformers", "gguf")
MASKED: dict[str, Any] = {"mask_token": 5}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3, 2,048 tokens": ("eagle3", {"vocabulary": 2048}),
    "eagle3, all tokens, `qk_norm`": ("eagle3", {"qk_norm": True}),
    "peagle": ("peagle", MASKED),
    "dflash": ("dflash", MASKED),
    "dflash, `anchor_predicts: no`": ("dflash", {**MASKED, "anchor_predicts": False}),
    "dspark": ("dspark", MASKED),
    "domino": ("domino", MASKED),
    "mtp": ("mtp", {"native": False}),
    "medusa": ("medusa", {}),
    "small_model": ("small_model", {}),
}
"""Row label, kind, and settings that differ from its defaults."""


def table(target: TransformersTarget) -> str:
    """Markdown: bytes of weights, one row per drafter, with a dash if the format does not support it."""
    lines = [f"| | checkpoint | {' | '.join(COLUMNS[:-1])} | gguf f32 / f16 |", "|---" * (2 + len(COLUMNS)) + "|"]
    for said, (kind, settings) in ROWS.items():
        with tempfile.TemporaryDirectory() as name:
            lines.append(f"| {said} | " + " | ".join(sizes(kind, settings, target, Path(name))) + " |")
    return "\n".join(lines)


def sizes(kind: str, settings: dict[str, Any], target: TransformersTarget, place: Path) -> list[str]:
    """Size of the checkpoint and of each column's folder, in bytes."""
    module = find(kind)
    torch.manual_seed(0)
    save(place / "mine", module.Model(build(module.Config, {"kind": kind, **settings}, "drafter"), target))
    found = [f"{(place / 'mine' / 'model.safetensors').stat().st_size:,}"]
    for format in COLUMNS:
        precisions = ("f32", "f16") if format == "gguf" else (None,)
        found.append(" / ".join(_size(place, format, kind, target, precision) for precision in precisions))
    return ["–" if set(size) <= set("–/ ") else size for size in found]


def _size(place: Path, format: str, kind: str, target: TransformersTarget, precision: str | None) -> str:
    layout = find_format(format).get(kind)
    if layout is None or layout.config is None:
        return "–"
    try:
        folder = export_folder(place / "mine", format, place / f"{format}-{precision}", target, precision)
    except ExportError:  # the format can't express these settings
        return "–"
    return f"{sum(path.stat().st_size for path in folder.iterdir() if path.suffix in ('.safetensors', '.gguf')):,}"


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = table(load_target("demo", compile=False))
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
