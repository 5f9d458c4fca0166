"""The cost of products with the quantised weights of GGUF files compared with the bytes they read and their arithmetic.

    python benchmarks/quantized_products.py [--kinds Q4_1,Q8_0] [--rows 1,2,4,8,64] [--out FILE]

The products of a model's layers one after another, with weights of each kind: in float32 (a) and in integers (b).
Both, a read of as many bytes and, for comparison, our bfloat16 panels are interleaved.  Every layer is timed alone and
the median counts, so that other programs disturb little; all layers together exceed the caches.  `bound` is the longer
of two times: reading a layer's bytes at the speed of that read, and the arithmetic at the speed of the fastest product
of this variant and kind in this run.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from batch_time import write
from torch import Tensor

from outrider import kernels, machine
from outrider.kernels import blocks, quantized

SHAPES = {
    "smollm2": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "wide": [(1536, 1024), (1024, 1024), (6144, 1024), (1024, 3072)],
}
"""[outputs, inner] of a layer's products, with those of one input joined.  Those of `smollm2` are not whole blocks of
256."""
LEAST_BYTES = 2**26
"""Of all layers."""
TURNS, SECONDS = 20, 3.0
"""Maximum number of turns of a comparison, and its time limit in seconds."""
WANTED = {"a": {1: 1.6, 2: 1.6, 4: 1.3, 8: 1.3}, "b": {1: 1.3, 2: 1.3, 4: 1.3, 8: 1.3}}
"""Maximum multiple of the bound, by rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(blocks.BLOCKS))
    parser.add_argument("--rows", default="1,2,4,8,16,64,256")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    kernels.library()
    rows = [int(count) for count in options.rows.split(",")]
    table = [row for kind in options.kinds.split(",") for row in measured(kind, options.shape or shape_of(kind), rows)]
    promises = [
        {"promise": f"{row['kind']}, way {way}, {row['rows']} rows: times the bound", "wanted": wanted,
         "found": row["times_bound"][way], "holds": row["times_bound"][way] <= wanted}
        for row in table for way in row["times_bound"] if (wanted := WANTED[way].get(row["rows"]))
    ]  # fmt: skip
    processor = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    described = [line for line in processor.splitlines() if line.startswith(("Model name", "Flags", "CPU(s)", "L"))]
    write({"lscpu": described, "load": os.getloadavg(), "promises": promises, "rows": table}, options.out)


def shape_of(kind: str) -> str:
    return "wide" if blocks.BLOCKS[kind].values > quantized.WIDTH else "smollm2"


@torch.inference_mode()
def measured(kind: str, shape: str, counts: list[int]) -> list[dict[str, Any]]:
    """One row for each number of rows.  Seconds and bytes are per layer."""
    noise, sizes = torch.Generator().manual_seed(0), SHAPES[shape]
    examples = [quantized.example(kind, *size, noise) for size in sizes]
    count = -(-LEAST_BYTES // sum(example.nbytes for example in examples))
    layers = [[quantized.in_panels(kind, example) for example in examples] for _ in range(count)]
    panels = [kernels.panels(torch.randn(size, generator=noise).bfloat16().float()) for size in sizes]
    stored, multiplications = sum(own.nbytes for own in layers[0]), sum(a * b for a, b in sizes)
    reading, table = torch.ones(count, stored // 4), []
    numbers = {"a": 0} if kind in blocks.PLAIN else {"a": 0, "b": 1}
    for rows in counts:
        x = {inner: torch.randn(rows, inner, generator=noise) for _, inner in sizes}

        def multiply(way: str, layer: int, x: dict[int, Tensor] = x) -> None:
            for (outputs, inner), own, halves in zip(sizes, layers[layer], panels, strict=True):
                if way == "bfloat16 panels":
                    torch.ops.outrider.multiply(x[inner], halves, outputs)
                else:
                    torch.ops.outrider.quantized(x[inner], own, quantized.NUMBERS[kind], outputs, numbers[way])

        ways: dict[str, Callable[[int], object]] = {
            way: functools.partial(multiply, way) for way in (*numbers, "bfloat16 panels")
        }
        ways["read"] = lambda layer: reading[layer].sum()
        table.append({"kind": kind, "shape": shape, "rows": rows, "mb": stored / 1e6, "seconds": medians(ways, count)})
    speed = stored / min(row["seconds"]["read"] for row in table)
    for way in numbers:
        peak = max(row["rows"] * multiplications / row["seconds"][way] for row in table)
        for row in table:
            bound = max(stored / speed, row["rows"] * multiplications / peak)
            row.setdefault("times_bound", {})[way] = row["seconds"][way] / bound
            row.setdefault("gb_s", {"read": speed / 1e9})[way] = stored / row["seconds"][way] / 1e9
            row.setdefault("gmac_s", {})[way] = row["rows"] * multiplications / row["seconds"][way] / 1e9
    for row in table:
        print(row, file=sys.stderr, flush=True)
    return table


def medians(ways: dict[str, Callable[[int], object]], layers: int) -> dict[str, float]:
    """Seconds of each variant over one layer."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    began = time.perf_counter()
    for _ in range(TURNS):
        for way, run in ways.items():
            for layer in range(layers):
                start = time.perf_counter()
                run(layer)
                times[way].append(time.perf_counter() - start)
        if time.perf_counter() - began > SECONDS:
            break
    return {way: statistics.median(own) for way, own in times.items()}


if __name__ == "__main__":
    main()
