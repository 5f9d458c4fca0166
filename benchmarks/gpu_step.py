"""The row `step-8b` of `gpu.py`: a verified step with Python between its graphs, and the same step as one graph.

Drafters have random weights, so almost nothing is accepted: a step of one tree takes the same time whatever is
accepted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from outrider import generation
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import Progress, advance
from outrider.decoding.state import Request
from outrider.drafters import find
from outrider.errors import first_line
from outrider.fast.runner import wrong
from outrider.fast.whole.graphs import rerunning
from outrider.fast.whole.steps import WholeSteps
from outrider.kernels.selection import acceptance_kernels
from outrider.policies import named
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

DRAFTERS = {"medusa": {"nodes": 16}, "mtp": {"length": 3}, "dspark": {"block": 7}, "eagle3": {"length": 5}}
HEAT = 0.8
WARM = 4
"""Untimed steps, or half of the steps if there are fewer: sizes are captured in them."""


def measure(target: TransformersTarget, device: str, small: bool, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds per step by drafter, batch and temperature, both ways.  target: with its passes captured."""
    batches, new, kinds = ((1,), 24, ("dspark", "medusa")) if small else ((1, 16), 96, tuple(DRAFTERS))
    for kind, batch, heat in itertools.product(kinds, batches, (0.0, HEAT)):
        settings: dict[str, Any] = dict(DRAFTERS[kind])
        point: dict[str, Any] = {"drafter": kind, "batch": batch, "temperature": heat}
        try:
            drafter = drafter_of(kind, target, settings | ({"drawn": False} if kind == "medusa" and heat else {}))
            texts = []
            for way in ("seams", "whole"):
                text, point[f"{way}_ms"] = timed(target, drafter, batch, heat, new, device, way == "whole")
                texts.append(text)
            point["same"] = sum(one == other for one, other in zip(*texts, strict=True)) / batch
            point["check"] = wrong(target, drafter)
        except Exception as error:  # one drafter's failure does not stop the others
            point["error"] = f"{type(error).__name__}: {first_line(error)[:300]}"
        found.append(point)
    return {"points": found}


def drafter_of(kind: str, target: TransformersTarget, settings: dict[str, Any]) -> Drafter:
    module: Any = find(kind)
    torch.manual_seed(1)
    model = module.Model(module.Config(kind=kind, **settings), target)
    drafter: Drafter = model.to(target.device, getattr(torch, target.spec.dtype)).drafter()
    return drafter


def timed(
    target: TransformersTarget, drafter: Drafter, batch: int, heat: float, new: int, device: str, is_whole: bool
) -> tuple[list[list[int]], float]:  # fmt: skip
    """Texts, and the median of a step's milliseconds."""
    noise = torch.Generator().manual_seed(3)
    prompts = torch.randint(target.spec.vocabulary, (batch, 64), generator=noise).tolist()
    requests = [Request(prompt, new, Sampling(temperature=heat, seed=i)) for i, prompt in enumerate(prompts)]
    texts: list[list[int]] = [[] for _ in requests]
    ticks: list[float] = []
    for progress in steps_of(target, drafter, requests, is_whole):
        texts[progress.request] += progress.tokens
        if progress.request == 0:
            ticks.append(time.perf_counter())
    if device == "cuda":
        torch.cuda.synchronize()
    gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(ticks[min(WARM, len(ticks) // 2) :]))
    return texts, gaps[len(gaps) // 2]


def steps_of(
    target: TransformersTarget, drafter: Drafter, requests: list[Request], is_whole: bool
) -> Iterator[Progress]:  # fmt: skip
    """On a CPU, as a rehearsal: runs the operations of a whole step one by one."""
    state, fixed = generation.batch(target, len(requests), ends=frozenset()), named.policy("fixed", drafter)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    recorder = None if target.device.type == "cuda" else rerunning
    kernels, whole = acceptance_kernels(target.device), None
    if is_whole:
        whole = WholeSteps(target, drafter, len(requests), longest, state.ends, kernels, recorder)
    return advance(target, requests, drafter, fixed, state, fast=lambda _length: whole)
