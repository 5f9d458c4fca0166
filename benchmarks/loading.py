"""What loading a target costs beside transformers' own `from_pretrained`: the first time, and when its family is known.

    python benchmarks/loading.py [--target FOLDER] [--dtype float32 --dtype bfloat16] [--rounds 3] [--out FILE]

Without --target, a model of the shape of Qwen3-0.6B with random weights is saved to a temporary folder.  Every round
loads by turns: transformers alone, a target with an empty cache folder, a target again.  Prints JSON: seconds of each,
the median of what a target takes more, and the process's own seconds of CPU, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.replay import provenance, publish
from outrider.targets.load import load_target

SHAPE = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--dtype", action="append", help="float32 and bfloat16 unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = options.target or saved(Path(folder) / "target")
        rows = [measured(target, dtype, options.rounds) for dtype in options.dtype or ["float32", "bfloat16"]]
    publish({"provenance": provenance(time.perf_counter() - began), "rows": rows}, options.out)


def saved(folder: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def measured(target: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """One row: seconds of each way of loading, by turns."""
    ways: dict[str, list[tuple[float, float]]] = {"transformers": [], "first": [], "again": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["OUTRIDER_CACHE"] = cache
            ways["transformers"].append(timed(lambda: AutoModelForCausalLM.from_pretrained(target, dtype=dtype)))
            ways["first"].append(timed(lambda: load_target(target, dtype=dtype)))
            ways["again"].append(timed(lambda: load_target(target, dtype=dtype)))
    base, first, again = (list(zip(*runs, strict=True)) for runs in ways.values())
    row: dict[str, Any] = {"dtype": dtype}
    for n, clock in enumerate(("s", "cpu_s")):
        row |= {f"{way}_{clock}": [round(run[n], 2) for run in runs] for way, runs in ways.items()}
        for name, more in (("first", first), ("again", again)):
            row[f"{name}_more_{clock}"] = round(
                statistics.median(a - b for a, b in zip(more[n], base[n], strict=True)), 2
            )
    return row


def timed(load: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU."""
    gc.collect()
    began, used = time.perf_counter(), time.process_time()
    load()
    return time.perf_counter() - began, time.process_time() - used


if __name__ == "__main__":
    main()
