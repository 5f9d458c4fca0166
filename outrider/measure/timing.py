"""One prompt continued once, alone: every step noted, its seconds parted into the two models and all the rest."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.state import Request, Scores
from outrider.generation import batch, serve
from outrider.measure import memory
from outrider.measure.rejections import TracedTarget
from outrider.measure.row import Run
from outrider.policies import lossy
from outrider.sampling.judge import SamplingJudge
from outrider.targets.transformers import TransformersTarget


def run_once(
    target: TransformersTarget, request: Request, drafter: Drafter | None = None,
    policy: Policy | None = None, ends: bool = True, judge: SamplingJudge | None = None, shared_noise: bool = True,
) -> Run:  # fmt: skip
    """Continue one request alone and note every step.  ends False goes on past end-of-text, for equal lengths."""
    run = Run()

    def count_nodes(draft: Draft, scores: Scores) -> None:
        run.nodes.append(sum(draft.live))

    state = batch(target, 1, judge or "standard", shared_noise, None if ends else frozenset())
    traced: Any = TracedTarget(target, count_nodes)
    is_watched = memory.reset(target.device)
    with model_clock(target, drafter) as clock:
        began = last = time.perf_counter()
        for progress in serve(traced, [request], drafter, policy=policy, state=state):
            now = time.perf_counter()
            if run.steps:
                run.gaps_s.append(now - last)
            else:
                run.first_s = now - began
            last = now
            run.tokens += progress.tokens
            run.steps += 1
            run.accepted.append(progress.accepted)
            # what stood behind the text's end was never judged
            is_cut = len(progress.tokens) == progress.accepted
            run.reached.append(progress.accepted if is_cut else progress.reached)
            if isinstance(judge, lossy.LossyJudge):
                run.tv_distance += judge.tv_distance[progress.row]
            run.draft_s += state.timing.draft
            run.verify_s += state.timing.verify
            run.other_s += state.timing.other
            run.model_s += clock.since(state.timing.began)
        run.seconds = time.perf_counter() - began
    run.memory_peak_bytes = memory.peak(target.device) if is_watched else None
    run.invalid = state.invalid
    return run


class ModelClock:
    """When the outermost calls into the models began and ended."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []
        self._depth = 0

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its outermost calls noted."""

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._calls.append((began, time.perf_counter()))

        return timed

    def since(self, moment: float) -> float:
        """Seconds inside calls that began after `moment`; forgets them and all before."""
        seconds = sum(end - began for began, end in self._calls if began >= moment)
        self._calls.clear()
        return seconds


@contextmanager
def model_clock(target: TransformersTarget, drafter: Drafter | None) -> Iterator[ModelClock]:
    """Watch every forward call of target and drafter while the block runs.

    Around `forward`, not by hooks: a module with hooks is called by a longer way, which would count as the loop's.
    """
    clock, before = ModelClock(), {}
    for module in {*_modules(target), *_modules(drafter)}:
        before[module] = vars(module).get("forward")
        module.forward = clock.watched(module.forward)
    try:
        yield clock
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _modules(party: Any) -> list[nn.Module]:
    """The module whose calls are the party's model, and the graph that may stand for it."""
    model = getattr(party, "model", None)
    if isinstance(model, TransformersTarget):
        return _modules(model)
    if not isinstance(model, nn.Module):
        return []
    base = getattr(model, "base_model", model)
    steps: Any = [party.step] if isinstance(party, TransformersTarget) else party.steps
    return [*dict.fromkeys([model, base]), *(step.graph for step in steps if step.graph is not None)]


@torch.inference_mode()
def generate_once(target: TransformersTarget, tokens: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """transformers' own greedy `generate`: its new tokens, and its seconds."""
    began = time.perf_counter()
    inputs = torch.tensor([tokens], device=target.device)
    out = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False, temperature=None,
        top_p=None, top_k=None, repetition_penalty=1.0, eos_token_id=sorted(target.ends) or None,
        pad_token_id=min(target.ends, default=0),
    )  # fmt: skip
    return out[0, len(tokens) :].tolist(), time.perf_counter() - began
