"""What the recipes for large targets take: hours, memory and disk, computed from shapes; nothing is measured.

    python benchmarks/recipes.py [--prompt 256] [--answer 768] [--out benchmarks/results/recipes.json]

Texts have the given mean lengths.  The shapes are those that the targets' authors publish, written with transformers'
config classes; Gemma 4's are the defaults of its class.  Efficiencies are in outrider/plan/paper/hardware.yaml, each
with its source.  A target of up to 10 B is on one H100, a larger one on eight.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import write  # noqa: E402
from outrider.plan.paper import hardware  # noqa: E402
from outrider.runs.file import load  # noqa: E402
from outrider.runs.forecast import on_accelerator  # noqa: E402
from outrider.targets.sketch import sketch  # noqa: E402

RECIPES = sorted((ROOT / "recipes" / "targets").glob("*.yaml"))
QWEN3 = {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3 = {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
SHAPES: dict[str, tuple[str, dict[str, Any], float]] = {
    "qwen3-0.6b": ("qwen3", QWEN3 | dict(zip(SIZES, (1024, 3072, 16, 28), strict=True)), 0.596e9),
    "qwen3-4b": ("qwen3", QWEN3 | dict(zip(SIZES, (2560, 9728, 32, 36), strict=True)), 4.02e9),
    "qwen3-8b": (
        "qwen3", QWEN3 | dict(zip(SIZES, (4096, 12288, 32, 36), strict=True)) | {"tie_word_embeddings": False}, 8.19e9,
    ),
    "llama-3.1-8b": ("llama", {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, **dict(zip(SIZES, (4096, 14336, 32, 32), strict=True))}, 8.03e9),
    "gemma-3-4b": ("gemma3_text", {
        "num_key_value_heads": 4, "head_dim": 256, **GEMMA3, **dict(zip(SIZES, (2560, 10240, 8, 34), strict=True)),
    }, 3.88e9),
    "gemma-3-27b": ("gemma3_text", {
        "num_key_value_heads": 16, "head_dim": 128, **GEMMA3, **dict(zip(SIZES, (5376, 21504, 32, 62), strict=True)),
    }, 27.0e9),
    "gemma-4-e2b": ("gemma4_text", {}, float("nan")),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9e9),
}  # fmt: skip
"""Model type, config and published number of parameters, by the target's name in a recipe."""
LARGE = 10e9
"""Parameters above which a target is on eight accelerators."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=float, default=256, help="mean tokens of a prompt")
    parser.add_argument("--answer", type=float, default=768, help="mean tokens of an answer")
    parser.add_argument("--accelerator", default="h100")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row(path, options) for path in RECIPES]
    write({"prompt": options.prompt, "answer": options.answer, "measured": False, "rows": rows}, options.out)


def row(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a recipe takes."""
    settings, _ = load(path)
    kind, config, _ = SHAPES[path.stem.rpartition("-")[0]]
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(kind, **config, dtype="bfloat16").save_pretrained(folder)
        target = sketch(folder)
    place = hardware.place(options.accelerator, 8 if target.parameters > LARGE else 1)
    texts = on_accelerator.Texts(settings.prepare.count or 0, options.prompt, options.answer)
    work = on_accelerator.work(settings, target, place, texts)
    return {
        "recipe": path.stem, "devices": place.devices, "passes": on_accelerator.passes_of(settings, texts.number),
        "parameters": target.parameters, "tokens": texts.tokens, **work._asdict(),
        "hours": work.answer_hours + work.read_hours + work.train_hours,
    }  # fmt: skip


if __name__ == "__main__":
    main()
