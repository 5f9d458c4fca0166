"""Predicted and measured speed-ups of our own loop: drafters x depths x batches on the demo target."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, cycle, islice, product
from typing import Any, NamedTuple

from outrider import demo, generate, load_drafter, load_target
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.generation import batch, serve
from outrider.measure.tasks.prompts import first_ngram_share
from outrider.plan.acceptance import Acceptance
from outrider.plan.demand import Demand
from outrider.plan.measured import probed, timings
from outrider.plan.measured.probe import FEWEST_FIRST, Encoded, replay_one
from outrider.plan.measured.sample import Question
from outrider.plan.measured.timed import TimedCosts
from outrider.plan.predict import row
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

PAYS = 1.0
"""Speed-up from which drafting is worthwhile in a cell."""
ANSWERS = (1.0, 0.6, 1.4, 0.8, 1.2)
"""Lengths of answers relative to their mean: with equal lengths, plain decoding would finish a whole batch at once,
which never happens in real traffic."""


def measured(
    names: Sequence[str], depths: Sequence[int], batches: Sequence[int], prompts: int, new_tokens: int
) -> dict[str, Any]:  # fmt: skip
    """Every cell, and the distance between prediction and measurement.

    Acceptance comes from a probe of other prompts than the ones on which speed-ups are measured.  Each drafted step is
    measured next to a plain one.  Prompts with repetitive answers are left out of both, as in a probe and a report.
    """
    target = load_target("demo")
    texts = unlooped(target, 2 * prompts, new_tokens)
    known, judged = texts[::2], texts[1::2]
    context = timings.rounded(statistics.fmean(map(len, texts)) + new_tokens / 2, target.spec.context)
    found = timings.measure(
        target, names, batches, depths, context, timings.load_timings(target), lambda name: loaded(name, target)
    )
    timings.save_timings(target, found)
    costs = TimedCosts(found, {name: timings.identity_of(name) for name in names})
    asked = Demand(statistics.fmean(map(len, judged)), new_tokens, 1)
    cells = []
    for name in names:
        drafter = loaded(name, target)
        accepted = acceptance(target, known, new_tokens, name, drafter)
        for slots, depth in product(batches, (each for each in depths if each <= drafter.limit)):
            own = row(costs, name, depth, accepted, asked, slots, None)
            got = speed(target, judged[: max(len(judged) // 2, 3 * slots)], new_tokens, drafter, depth, slots)
            cells.append({"drafter": name, "depth": depth, "batch": slots, "predicted": own.speedup.center,
                          "low": own.speedup.low, "high": own.speedup.high, "measured": got.speedup,
                          "tokens_per_step": own.tokens_per_step.center,
                          "measured_tokens_per_step": got.tokens_per_step})  # fmt: skip
    return {"context": context, "cells": cells, **summary(cells)}


def unlooped(target: TransformersTarget, count: int, new_tokens: int) -> list[list[int]]:
    """The first held-out prompts with answers that do not repeat themselves."""
    found: list[list[int]] = []
    every = (target.encode(text) for _, text in demo.prompts("held_out", 4 * count))
    while len(found) < count and (texts := [*islice(every, 32)]):
        answers = generate(target, texts, max_new_tokens=round(max(ANSWERS) * new_tokens), sampling=Sampling())
        found += [text for text, answer in zip(texts, answers, strict=True)
                  if first_ngram_share(answer.tokens) >= FEWEST_FIRST]  # fmt: skip
    return found[:count]


def loaded(name: str, target: TransformersTarget) -> Drafter:
    return load_drafter(name, target, **({"model": "demo"} if name == "small_model" else {}))


class Speed(NamedTuple):
    speedup: float
    tokens_per_step: float
    """Per text."""


class Step(NamedTuple):
    tokens: int
    seconds: float


def full_steps(
    target: TransformersTarget, texts: Sequence[Sequence[int]], new_tokens: int, drafter: Drafter | None, depth: int,
    slots: int,
) -> Iterator[Step]:  # fmt: skip
    """Decoding steps with all slots busy, which is what a plan describes; excludes the last ones, when short texts have
    ended and no request takes their slots.  Each step is run when it is requested."""
    lengths = cycle(round(share * new_tokens) for share in ANSWERS)
    requests = [Request(list(text), length, Sampling()) for text, length in zip(texts, lengths, strict=False)]
    state = batch(target, slots, ends=frozenset())
    steps = serve(target, requests, drafter, policy=None if drafter is None else Fixed(depth), state=state)
    tokens = served = 0
    for progress in steps:
        if not served:  # the first slot of a new step
            timing, live = state.timing, len(state.rows)
        tokens, served = tokens + len(progress.tokens), served + 1
        if served == live:
            if live == slots:
                yield Step(tokens, timing.draft + timing.verify + timing.other)
            tokens = served = 0


def speed(
    target: TransformersTarget, texts: Sequence[Sequence[int]], new_tokens: int, drafter: Drafter, depth: int,
    slots: int,
) -> Speed:  # fmt: skip
    """Speed of drafted steps, each paired with a plain one, so that both see the same machine.

    Texts early in a run differ from those at its end, so only whole runs are used: one of plain steps, and the runs of
    drafted steps that end within it.
    """
    runs = ((run, step) for run in count() for step in full_steps(target, texts, new_tokens, drafter, depth, slots))
    pairs = list(zip(runs, full_steps(target, texts, new_tokens, None, 0, slots), strict=False))
    last = max(1, pairs[-1][0][0])
    drafted = [step for (run, step), _ in pairs if run < last]
    own, usual = (Step(*map(sum, zip(*steps, strict=True))) for steps in (drafted, [plain for _, plain in pairs]))
    rates = own.tokens / own.seconds, usual.tokens / usual.seconds
    return Speed(rates[0] / rates[1], own.tokens / slots / len(drafted))


def acceptance(
    target: TransformersTarget, texts: Sequence[Sequence[int]], new_tokens: int, name: str, drafter: Drafter
) -> Acceptance:  # fmt: skip
    """The acceptance that a probe of these texts measures."""
    reads = [Encoded(Question(i, "code", "", new_tokens, Sampling()), list(text)) for i, text in enumerate(texts)]
    found = probed.acceptance([replay_one(target, name, drafter, read) for read in reads], f"{len(texts)} prompts")
    assert found is not None
    return found


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors, decisions, and the loss of the chosen depths compared with the best."""
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
