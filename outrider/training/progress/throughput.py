"""Training speed: tokens per second, and the share of the device's arithmetic that is used.

Model FLOPs utilisation (PaLM, arXiv 2204.02311): FLOPs of the passes that the gradient needs, divided by what the
device could do in that time.  FLOPs are counted in the matrix products of logged steps; recomputation to save memory,
the target's passes and the optimiser are not counted.  Differs from the paper: the device's speed is measured on large
products instead of taken from the data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from outrider import machine

BACKWARD = 2
"""FLOPs of a backward pass relative to its forward pass."""
FORMULAS: Mapping[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
}
"""FLOPs by operator; torch has no entry for attention on CPUs."""


class Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products while active; results are unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        output = func(*args, **named)
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.count += formula(*args, **named, out_val=output)
        return output


class StepFlops:
    """The model's FLOPs in one step: forward and backward passes of all batches."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def of(self, times: int) -> Iterator[None]:
        """Count the FLOPs of this block, multiplied by `times`."""
        with Flops() as flops:
            yield
        self.count += times * flops.count


class Pace:
    """Tokens per second between two logged steps."""

    def __init__(self, device: torch.device, dtype: machine.Precision, tokens: int):
        self.device, self.dtype = device, dtype
        self._before = time.monotonic(), tokens

    def facts(self, tokens: int, step_tokens: int, flops: int) -> dict[str, float]:
        """`tokens_per_s` since the last call, and `mfu`.

        Omits an `mfu` above 1: this machine's speed was then measured while it was busy.

        tokens: number read so far; step_tokens: number in the logged step; both over all processes.  flops: of that
        step in this process, on its own device.
        """
        now, (began, before) = time.monotonic(), self._before
        self._before = now, tokens
        per_s = (tokens - before) / max(now - began, 1e-9)
        able = 1e9 * machine.gflops(machine.LARGE, self.dtype, self.device)
        used = per_s * flops / max(step_tokens, 1) / able
        return {"tokens_per_s": round(per_s, 1)} | ({"mfu": round(used, 4)} if used <= 1 else {})
