"""Timed decoding of requests in a batch: every step is recorded, and its seconds are split into the two models and the
rest."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.state import Request
from outrider.generation import batch, serve
from outrider.measure import peak_memory
from outrider.measure.record import Run
from outrider.nn.drafting.ensemble import Ensemble
from outrider.nn.drafting.remote import RemoteDrafter
from outrider.policies import lossy
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import members_of


def run_batch(
    target: TransformersTarget, requests: Sequence[Request], drafter: Drafter | None = None,
    policy: Policy | None = None, ends: bool = True, judge: SamplingJudge | None = None, shared_noise: bool = True,
) -> list[Run]:  # fmt: skip
    """Continue requests together, each in its own slot, and record every step.

    A run's `seconds` are its share of the batch's, by tokens.  The seconds of a step are split evenly over the slots it
    served.  ends: False continues past the end of the text, for equal lengths.
    """
    runs = [Run() for _ in requests]
    state = batch(target, len(requests), judge or "standard", shared_noise, None if ends else frozenset())
    is_watched = peak_memory.reset(target.device)
    with model_clock(target, drafter) as clock:
        began = now = time.perf_counter()
        step, parts = None, (0.0, 0.0, 0.0, 0.0)
        for progress in serve(target, requests, drafter, policy=policy, state=state):
            if state.timing is not step:  # the first slot of a new step
                step = state.timing
                now = time.perf_counter()
                slots = len(state.rows)
                # a step within a single call counts as time of the models
                seconds = (step.draft, step.verify, step.other, clock.since(step.began) or step.verify)
                parts = tuple(part / slots for part in seconds)  # type: ignore[assignment]
            run = runs[progress.request]
            if run.steps:
                run.gaps_s.append(now - began - run.done_s)
            else:
                run.first_s = now - began
            run.done_s = now - began
            run.positions.append(len(requests[progress.request].prompt) + len(run.tokens))
            run.committed.append(len(progress.tokens))
            run.tokens += progress.tokens
            run.steps += 1
            run.accepted.append(progress.accepted)
            run.nodes.append(progress.drafted)
            # nodes after the text's end were not judged
            is_cut = len(progress.tokens) == progress.accepted
            run.reached.append(progress.accepted if is_cut else progress.reached)
            if isinstance(judge, lossy.LossyJudge):
                run.tv_distance += judge.tv_distance[progress.row]
            run.draft_s += parts[0]
            run.verify_s += parts[1]
            run.other_s += parts[2]
            run.model_s += parts[3]
        whole_s = time.perf_counter() - began
    peak = peak_memory.peak_bytes(target.device) if is_watched else None
    tokens = sum(len(run.tokens) for run in runs)
    for run in runs:
        run.seconds = whole_s * len(run.tokens) / tokens
        run.memory_peak_bytes = peak
    runs[0].invalid = state.invalid  # counted for all slots together
    if len(runs) == 1:
        runs[0].done_s = whole_s
    return runs


def run_once(target: TransformersTarget, request: Request, *args: Any, **kwargs: Any) -> Run:
    """Run one request and time it."""
    return run_batch(target, [request], *args, **kwargs)[0]


class ModelClock:
    """Start and end of the outermost calls into the models."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []
        self._depth = 0

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, with its outermost calls recorded."""

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
        """Seconds inside calls that began after `moment`; clears all calls so far."""
        seconds = sum(end - began for began, end in self._calls if began >= moment)
        self._calls.clear()
        return seconds


@contextmanager
def model_clock(target: TransformersTarget, drafter: Drafter | None) -> Iterator[ModelClock]:
    """Record every forward call of target and drafter within the block.

    It wraps `forward` instead of using hooks: a module with hooks takes a slower call path, which would count as the
    loop's overhead.
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


def _modules(participant: Any) -> list[Any]:
    """The callables that run a participant's model: its module, and graphs that may replace it."""
    if isinstance(participant, Ensemble):
        return [module for drafter in participant.drafters for module in _modules(drafter)]
    if isinstance(participant, RemoteDrafter):
        return _modules(participant.drafter)
    if members := members_of(participant):
        return [module for member in members for module in _modules(member)]
    model = getattr(participant, "model", None)
    if isinstance(model, TransformersTarget):
        return _modules(model)
    modules = [model, getattr(model, "base_model", model)] if isinstance(model, nn.Module) else []
    steps = (participant.step,) if isinstance(participant, TransformersTarget) else getattr(participant, "steps", ())
    return [*dict.fromkeys(modules), *(step.graph for step in steps if step.graph is not None)]


@torch.inference_mode()
def generate_once(target: TransformersTarget, tokens: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """The new tokens and the seconds of transformers' greedy `generate`.

    Ensembles, which transformers can't run, use plain decoding instead.
    """
    if members_of(target):
        run = run_once(target, Request(list(tokens), max_new_tokens, Sampling()))
        return run.tokens, run.seconds
    began = time.perf_counter()
    inputs = torch.tensor([tokens], device=target.device)
    output = target.generate_plainly(inputs, {
        "attention_mask": torch.ones_like(inputs), "max_new_tokens": max_new_tokens, "do_sample": False,
        "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0,
        "eos_token_id": sorted(target.ends) or None, "pad_token_id": min(target.ends, default=0),
    })  # fmt: skip
    return output[0, len(tokens) :].tolist(), time.perf_counter() - began
