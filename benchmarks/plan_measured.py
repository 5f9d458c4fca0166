"""Predicted and measured speed-ups of our own loop: drafters x depths x batches on the demo target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from outrider import demo, load_drafter, load_target
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.generation import batch, serve
from outrider.measure.record import Run
from outrider.measure.timing import run_batch
from outrider.plan import timings
from outrider.plan.acceptance import Acceptance
from outrider.plan.demand import Demand
from outrider.plan.predict import row
from outrider.plan.timed import TimedCosts
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.targets.transformers import TransformersTarget

PAYS = 1.0
"""Speed-up from which on a cell is better drafted."""


def measured(
    names: Sequence[str], depths: Sequence[int], batches: Sequence[int], prompts: int, new_tokens: int
) -> dict[str, Any]:  # fmt: skip
    """Every cell, and how far prediction and measurement are apart.

    Acceptance is taken from other prompts than speed-ups are measured on, one at once and as deep as is asked for.
    """
    target = load_target("demo")
    counts = {slots: max(prompts // 2, 3 * slots if slots < prompts else 2 * slots) for slots in batches}
    texts = [target.encode(text) for _, text in demo.prompts("held_out", prompts + max(counts.values()))]
    known, judged = texts[:prompts], texts[prompts:]
    context = timings.rounded(statistics.fmean(map(len, texts)) + new_tokens / 2, target.spec.context)
    found = timings.measure(
        target, names, batches, depths, context, timings.cached(target), lambda name: loaded(name, target)
    )
    timings.keep(target, found)
    costs = TimedCosts(found, {name: timings.identity_of(name) for name in names})
    asked = Demand(statistics.fmean(map(len, judged)), new_tokens, 1)
    plain = {slots: speed(target, judged[: counts[slots]], new_tokens, None, 0, slots) for slots in batches}
    cells = []
    for name in names:
        drafter = loaded(name, target)
        accepted = acceptance(target, known, new_tokens, drafter, max(depths))
        for slots in batches:
            for depth in (each for each in depths if each <= drafter.limit):
                own = row(costs, name, depth, accepted, asked, slots, None)
                got = speed(target, judged[: counts[slots]], new_tokens, drafter, depth, slots)
                cells.append({"drafter": name, "depth": depth, "batch": slots, "predicted": own.speedup.center,
                              "low": own.speedup.low, "high": own.speedup.high, "measured": got / plain[slots],
                              "tokens_per_step": own.tokens_per_step.center})  # fmt: skip
    return {"context": context, "cells": cells, **summary(cells)}


def loaded(name: str, target: TransformersTarget) -> Drafter:
    return load_drafter(name, target, **({"model": "demo"} if name == "small_model" else {}))


def runs(
    target: TransformersTarget, texts: Sequence[Sequence[int]], new_tokens: int, drafter: Drafter | None, depth: int
) -> list[Run]:  # fmt: skip
    requests = [Request(list(text), new_tokens, Sampling()) for text in texts]
    return run_batch(target, requests, drafter, None if drafter is None else Fixed(depth), ends=False)


def speed(
    target: TransformersTarget, texts: Sequence[Sequence[int]], new_tokens: int, drafter: Drafter | None, depth: int,
    slots: int,
) -> float:  # fmt: skip
    """Tokens a second of decoding while all slots are busy, which is what a plan speaks of: without the steps at the
    end, when texts that took few steps have gone and nobody follows."""
    requests = [Request(list(text), new_tokens, Sampling()) for text in texts]
    state = batch(target, slots, ends=frozenset())
    step, is_full, tokens, seconds = None, False, 0, 0.0
    for progress in serve(target, requests, drafter, policy=None if drafter is None else Fixed(depth), state=state):
        if state.timing is not step:  # the first slot of a new step
            step, is_full = state.timing, len(state.rows) == slots
            seconds += is_full * (step.draft + step.verify + step.other)
        tokens += is_full * len(progress.tokens)
    return tokens / seconds


def acceptance(
    target: TransformersTarget, texts: Sequence[Sequence[int]], new_tokens: int, drafter: Drafter, depth: int
) -> Acceptance:  # fmt: skip
    """How often each node of a draft is offered and accepted."""
    steps = [
        (accepted, reached)
        for text in texts for run in runs(target, [text], new_tokens, drafter, depth)
        for accepted, reached in zip(run.accepted, run.reached, strict=True)
    ]  # fmt: skip
    share = lambda of: tuple(sum(step[of] > k for step in steps) / len(steps) for k in range(depth))
    return Acceptance(share(0), share(0), share(0), "report", f"{len(texts)} prompts of the demo", share(1))


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors, decisions, and what the chosen depths lose against the best."""
    errors = [abs(cell["predicted"] / cell["measured"] - 1) for cell in cells]
    right = [(cell["predicted"] > PAYS) == (cell["measured"] > PAYS) for cell in cells]
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["drafter"], cell["batch"]), []).append(cell)
    losses = []
    for own in groups.values():
        chosen = max(own, key=lambda cell: cell["predicted"])
        best = max(1.0, *(cell["measured"] for cell in own))
        losses.append(1 - (chosen["measured"] if chosen["predicted"] > PAYS else 1.0) / best)
    promised = (
        ("median error", 0.1, statistics.median(errors)),
        ("decisions that are wrong", 0.05, 1 - sum(right) / len(right)),
        ("greatest loss of a chosen depth", 0.05, max(losses)),
    )  # fmt: skip
    rows = [
        {"promise": what, "at_most": most, "found": value, "holds": value <= most} for what, most, value in promised
    ]
    return {"promises": rows}
