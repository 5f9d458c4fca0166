"""The row `acceptance` of `gpu.py`: a verified step's acceptance and the sampling of a block, with our kernels and in
plain torch.

Times are those of the judge, from logits on the device to lists on the host.  `floor_ms` is the time to read logits and
q once at the memory speed measured by the row `machine`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.kernels import selection
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

NODES, VOCABULARY = 8, 151_936
TREE = [-1, -1, -1, 0, 0, 1, 3, 3]
WAYS = ("greedy", "chain", "tree", "without q", "draw")
HEAT = 0.8

Timer = Callable[[Callable[[], object], str], float]


def measure(
    device: str, small: bool, known: Mapping[str, Any], timer: Timer, found: list[dict[str, Any]]
) -> dict[str, Any]:
    """timer: milliseconds of a function on a device."""
    from outrider.kernels import gpu_acceptance  # Triton is only installed with CUDA builds of torch

    speed = known.get("machine", {}).get("copied_gb_per_s")
    for slots, way in itertools.product((1,) if small else (1, 16, 64), WAYS):
        nodes, vocabulary = (3, 300) if small else (NODES, VOCABULARY)
        case = Case(way, slots, nodes, vocabulary, device)
        point: dict[str, Any] = {"batch": slots, "nodes": nodes, "way": way}
        answers = []
        for name, kernels in (("plain", None), ("kernels", gpu_acceptance)):
            case.judge.kernels = kernels
            began = time.perf_counter()
            answers.append(case.run())
            once_ms = 1e3 * (time.perf_counter() - began)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                case.run()
                point[f"{name}_peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
            # the interpreter takes seconds where a kernel takes microseconds
            point[f"{name}_ms"] = once_ms if small else timer(case.run, device)
        point["same"] = sum(map(same, *answers)) / slots
        point["floor_ms"] = case.bytes / speed / 1e6 if speed else None
        found.append(point)
    return {"points": found, "taken": None if small else selection.acceptance_kernels(torch.device(device)) is not None}


def same(one: Any, other: Any) -> bool:
    return bool(one == other)


class Case:
    """Drafts for some slots, sampled from a q close to the target's distribution."""

    def __init__(self, way: str, slots: int, nodes: int, vocabulary: int, device: str):
        torch.manual_seed(0)
        parents = TREE[:nodes] if way == "tree" else list(range(-1, nodes - 1))
        self.way = way
        self.logits = 3 * torch.randn(slots, nodes + 1, vocabulary, device=device, dtype=torch.bfloat16)
        above = self.logits[:, [1 + parent for parent in parents]].float() / HEAT
        q = (above + torch.randn(above.shape, device=device)).softmax(-1)
        tokens, sizes = q.flatten(0, 1).multinomial(1).view(slots, -1), torch.full((slots,), nodes)
        own = q if way in ("chain", "tree") else None
        self.draft = Draft.fixed(tokens, parents, sizes, own) if way == "tree" else Draft.chain(tokens, sizes, own)
        self.judge = SamplingJudge()
        self.state = DecodeState(slots, 1000, device=device, judge=self.judge)
        for row in range(slots):
            sampling = Sampling(temperature=0.0 if way == "greedy" else HEAT)
            self.state.admit(row, Request([1], 500, sampling))
            self.state.seeds[row] = row
        self.state._select()
        read = self.logits[:, 0] if way == "draw" else self.logits
        self.bytes = read.nbytes + (own.nbytes if own is not None else 0)

    @torch.inference_mode()
    def run(self) -> list[Any]:
        """What each slot accepts, or its sampled token."""
        if self.way == "draw":
            tokens: Tensor = self.judge.drawn(self.logits[:, 0], self.state.streams, 1)[1]
            return tokens.tolist()
        draft = replace(self.draft)  # a fresh copy, whose ids were not read yet
        if self.draft.branches:
            vars(draft)["tree"] = self.draft.tree
        kernels = self.judge.kernels if self.way == "greedy" else None  # only used by captured steps
        if kernels is not None:
            accepted = selection.accepted(kernels.accept_greedy(draft, self.logits, None))
        else:
            accepted = self.judge(draft, Scores(self.logits, self.logits, None), self.state)
        return list(zip(accepted.paths, accepted.next_tokens, strict=True))
