"""The cost of a pass's matrix products compared with the bytes they read and their arithmetic.

    python benchmarks/products.py [--shapes demo,0.6b] [--rows 1,2,4,8,16,64,256] [--out FILE]

All linear layers of a model one after another, in every variant available on this machine (`kernels.prepacked`):
weights in float32, and weights whose values are exactly bfloat16, which panels store in half the bytes.  All variants,
a read of the same number of bytes and a square product are interleaved; the fastest turn of each is used.  `bound` is
the longer of two times: reading the bytes that a variant stores, at the speed of that read, and the arithmetic, at the
speed of the fastest product in this run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from batch_time import write
from torch import Tensor

from outrider import machine
from outrider.kernels import prepacked

QWEN_06B = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
SHAPES = {
    "demo": [(256, 256), (128, 256), (128, 256), (256, 256), (704, 256), (704, 256), (256, 704)] * 16 + [(4096, 256)],
    "0.6b": QWEN_06B * 28,
}
TURNS, SECONDS = 40, 3.0
"""Maximum number of turns of a comparison, and its time limit in seconds."""
SQUARE = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="demo,0.6b")
    parser.add_argument("--rows", default="1,2,4,8,16,64,256")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    found = [
        row
        for shape in options.shapes.split(",")
        for kind in ("float32", "bfloat16")
        for row in table(shape, kind, [int(rows) for rows in options.rows.split(",")])
    ]
    promises = [
        {"promise": f"{row['shape']}, {row['values']} values, {row['rows']} rows: times the bound", "wanted": 1.3,
         "found": row["times_bound"], "holds": row["times_bound"] <= 1.3}
        for row in found if row["rows"] <= 8
    ] + [
        {"promise": f"{row['shape']}, {row['values']} values, {row['rows']} rows: no slower than torch", "wanted": 1.0,
         "found": row["ms"][row["best"]] / row["ms"]["plain"], "holds": row["ms"][row["best"]] <= row["ms"]["plain"]}
        for row in found
    ]  # fmt: skip
    write({"promises": promises, "rows": found}, options.out)


@torch.inference_mode()
def table(shape: str, kind: str, counts: list[int]) -> list[dict[str, Any]]:
    """One row for each number of rows."""
    noise = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=noise) for size in SHAPES[shape]]
    if kind == "bfloat16":
        weights = [weight.bfloat16().float() for weight in weights]
    held = {way: prepacked.prepacked(weights, way) for way in prepacked.ways()}
    stored = {way: sum(weight.nbytes for weight in own) for way, own in held.items()}
    if "onednn" in stored:
        stored["onednn"] = stored["plain"]  # onednn does not report its size
    flop = 2 * sum(weight.numel() for weight in weights)
    reading, square = torch.randn(max(stored.values()) // 4), torch.randn(SQUARE, SQUARE)
    found = []
    for rows in counts:
        inputs = {width: torch.randn(rows, width, generator=noise) for width in {weight.shape[1] for weight in weights}}

        def run(way: Any, inputs: dict[int, Tensor] = inputs) -> None:
            for weight, own in zip(weights, held[way], strict=True):
                prepacked.product(inputs[weight.shape[1]], way, own, weight.shape[0])

        ways: dict[str, Callable[[], object]] = {way: lambda way=way, run=run: run(way) for way in held}
        # panels of exactly representable values read half the bytes, which can be faster per byte where caches matter
        halves = {f"read {n}": (lambda n=n: reading[: len(reading) // n].sum()) for n in (1, 2)}
        seconds = by_turns(ways | halves | {"square": lambda: square @ square})
        peak = max(2 * SQUARE**3 / seconds["square"], *(rows * flop / seconds[way] for way in held))
        best = min(held, key=lambda way: seconds[way])
        speed = reading.nbytes / seconds["read 1"], reading.nbytes / 2 / seconds["read 2"]
        read_s = stored[best] / max(speed)
        bound = max(read_s, rows * flop / peak)
        found.append(
            {
                "shape": shape, "values": kind, "rows": rows, "ms": {way: 1e3 * seconds[way] for way in held},
                "best": best,
                "stored_mb": {way: size / 1e6 for way, size in stored.items()}, "read_gb_s": max(speed) / 1e9,
                "peak_gflop_s": peak / 1e9, "bound_ms": 1e3 * bound,
                "set_by": "bytes" if bound == read_s else "arithmetic",
                "times_bound": seconds[best] / bound,
            }
        )  # fmt: skip
        print(found[-1], file=sys.stderr, flush=True)
    return found


def by_turns(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the fastest turn of each."""
    best, began = dict.fromkeys(ways, float("inf")), time.perf_counter()
    for _ in range(TURNS):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            best[way] = min(best[way], time.perf_counter() - start)
        if time.perf_counter() - began > SECONDS:
            break
    return best


if __name__ == "__main__":
    main()
