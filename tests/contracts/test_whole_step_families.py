"""Captured steps write what plain steps write, in every family: known texts are drafted, with wrong tokens in them."""

import pytest
import torch
from conftest import first
from targets.test_families import FAST, RECURRENT

from benchmarks.families import SMALL, tiny
from benchmarks.recording import HostRead, Recording
from benchmarks.static_replay import StaticReplay
from outrider.decoding.protocols import NoStatic
from outrider.decoding.scheduler import advance
from outrider.decoding.state import DecodeState, Request
from outrider.fast.gpu import cuda_graphs
from outrider.fast.whole.steps import WholeSteps
from outrider.generation import batch, serve
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

REFUSED = {*RECURRENT, "bloom"}
"""Their passes carry a state that no column of a cache holds, or no mask: they are refused, with the reason."""
EXPERTS = {"deepseek-v3", "qwen3-moe", "gpt-oss"}
"""Experts that are called one by one, for which the host reads which were chosen: no graph takes that."""
LENGTHS, COUNTS = (6, 1, 33, 3, 9), (24, 18, 12, 20, 1)


def target_of(family: str) -> TransformersTarget:
    try:
        return load_target(tiny(family, "sdpa"))
    except ValueError:
        return load_target(tiny(family))


def written(target: TransformersTarget, requests: list[Request], drafter: StaticReplay | None) -> list[list[int]]:
    """By plain steps without a drafter, by recorded ones with it."""
    state = batch(target, 3, ends=frozenset({5}))
    steps = serve(target, requests, state=state) if drafter is None else by_record(target, requests, drafter, state)
    found: list[list[int]] = [[] for _ in requests]
    kept = 0
    for step in steps:
        found[step.request] += step.tokens
        kept += step.accepted
    assert drafter is None or kept > sum(map(len, found)) / 4, "drafts that are right must be kept"
    return found


def by_record(target: TransformersTarget, requests: list[Request], drafter: StaticReplay, state: DecodeState):
    recording = Recording()
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    whole = WholeSteps(target, drafter, len(state.tokens), longest, state.ends, recorder=recording)
    yield from advance(target, requests, drafter, Fixed(drafter.limit), state, fast=lambda _length: whole)
    assert recording.recorded < recording.replayed


@pytest.mark.parametrize("family", first([*FAST[2:5], *(name for name in SMALL if name not in FAST[2:5])], 3))
def test_captured_steps_of_every_family_write_what_plain_ones_write(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a family's part of a pass that a graph leaves out: windows, chunks, shared keys, biases by distance."""
    monkeypatch.setattr(cuda_graphs, "COLUMNS", 32)
    target = target_of(family)
    width = 1 if target.spec.mode == "chain" else 2
    noise = torch.Generator().manual_seed(1)
    samplings = [Sampling(), Sampling(temperature=0.9, seed=4)]
    requests = [
        Request(torch.randint(target.spec.vocabulary, (length,), generator=noise).tolist(), count, samplings[n % 2])
        for n, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))
    ]
    plain = written(target, requests, None)
    texts = [request.prompt + tokens for request, tokens in zip(requests, plain, strict=True)]
    drafter = StaticReplay(texts, target.spec.vocabulary, depth=3, width=width, right=0.8)
    if family in REFUSED | EXPERTS:
        with pytest.raises(NoStatic if family in REFUSED else HostRead):
            written(target, requests, drafter)
        return
    assert written(target, requests, drafter) == plain
