"""How much of a run fits into a number of minutes: answers, steps and evaluation prompts, by measured rates.

A quarter of the time goes to the evaluation.  The rest is divided so that the training makes `PASSES` passes over the
answers: with fewer passes answers are wasted, with more the drafter overfits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from outrider import machine
from outrider.data.answers.store import Answer
from outrider.data.features.live import LiveFeatures
from outrider.drafters import find
from outrider.errors import ConfigError
from outrider.generation import generate
from outrider.nn.draft_model import DraftModel
from outrider.runs.file import RunConfig
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import default_device
from outrider.targets.sketch import Sketch
from outrider.training.optimizers import Optimizers
from outrider.training.step import optimise
from outrider.training.trainer import with_dtype

PASSES, MOST_PASSES = 6, 12
"""Passes over the answers: the goal, and the maximum if there are no more prompts."""
FEWEST_ANSWERS, FEWEST_STEPS = 48, 40
"""Minimum for a useful drafter."""
EVALUATION, PROMPTS = 0.25, (3, 24)
"""Share of the time for the evaluation, and the minimum and maximum number of prompts per task."""
STARTING_S, COMPILING_S = 20.0, 60.0
"""Time to load and check a run, and to compile a drafter's block, greedy and sampled, on two cores."""
PLANNED = 0.9
"""Share of the time to plan for: a stage can take up to a tenth more than its rates predict."""


SIZES: dict[str, Any] = {"layers": 2, "block": 4, "siblings": [1, 1], "anchors": 48}
"""Settings of block drafters trained within minutes."""
DRAFTED = 8192
"""Draft vocabulary of such a drafter, if the target's is at least twice as large."""


class Rates(NamedTuple):
    """Times on this machine, in seconds."""

    answer: float
    """Per answer, in a batch."""
    alone: float
    """Per token of a single text."""
    reference: float
    """The same with transformers' own `generate`, the baseline of an evaluation."""
    read: float
    """Per text whose states are computed."""
    step: float
    """Per training step."""


class Plan(NamedTuple):
    """What fits into a budget."""

    answers: int
    steps: int
    prompts: int
    """Of each task."""
    minutes: dict[str, float]
    """By stage."""

    @property
    def line(self) -> str:
        parts = {"prepare": f"{self.answers:,} answers", "train": f"{self.steps:,} steps"}
        parts["evaluate"] = f"{self.prompts} prompts of each task"
        return ", ".join(f"{what} ({self.minutes[stage]:.1f} min)" for stage, what in parts.items())


def sizes(kind: str, vocabulary: int) -> dict[str, Any]:
    """Settings of a block drafter that trains within minutes, for a target with this vocabulary; empty for other
    kinds."""
    fields = find(kind).Config.model_fields
    if not fields.keys() >= SIZES.keys():
        return {}
    settings = SIZES | ({"vocabulary": DRAFTED} if "vocabulary" in fields and vocabulary >= 2 * DRAFTED else {})
    if "nodes" in fields:  # dflash2 has its own tree; same number of nodes
        settings["nodes"] = settings["block"] + sum(settings.pop("siblings"))
    return (
        settings
        | ({"rank": 128} if "rank" in fields else {})
        | ({"confidence": False} if "confidence" in fields else {})
    )


def refuse_too_large(target: Sketch) -> None:
    """Raises ConfigError for a target whose weights do not fit into this machine's memory."""
    needed, free = 4 * target.parameters, machine.free_memory()
    if default_device(None).type == "cpu" and needed > free:
        raise ConfigError(
            f"{target.spec.name} takes {needed / 1e9:.1f} GB in float32, and {free / 1e9:.1f} GB of memory are free; "
            "take a smaller target, or a machine with more memory"
        )


def measured(settings: RunConfig, target: TransformersTarget, prompts: Sequence[list[int]]) -> Rates:
    """Measure the rates of a run's stages.  prompts: some of the run's prompts, as tokens; each stage runs for a few
    seconds, and nothing is stored.

    Raises DataError if no answer can be trained on.
    """
    prepare = settings.prepare
    some = list(prompts[: 2 * prepare.slots])
    how: dict[str, Any] = {
        "slots": prepare.slots, "temperature": prepare.temperature, "top_p": prepare.top_p, "top_k": prepare.top_k,
        "seed": 0,
    }  # fmt: skip
    generate(target, some, max_new_tokens=2, **how)  # warm-up
    began = time.perf_counter()
    written = [one.tokens for one in generate(target, some, max_new_tokens=prepare.max_new_tokens, **how)]
    answer = (time.perf_counter() - began) / len(some)
    longest = max(range(len(some)), key=lambda n: len(written[n]))
    alone = _seconds(lambda: generate(target, some[longest], max_new_tokens=32)) / min(32, len(written[longest]))
    text, model = torch.tensor([some[0]], device=target.device), cast(Any, target.model)
    reference = _seconds(lambda: model.generate(text, max_new_tokens=8, min_new_tokens=8, do_sample=False)) / 8
    answers = [
        Answer("", [*one, *more], [(len(one), len(one) + len(more))]) for one, more in zip(some, written, strict=True)
    ]
    return Rates(answer, alone, reference, *training_rates(settings, target, answers))


def training_rates(
    settings: RunConfig, target: TransformersTarget, answers: Sequence[Answer],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:  # fmt: skip
    """Seconds per text read and per training step, over one pass through these answers, by this clock.

    Raises DataError if none can be trained on.
    """
    config = settings.train
    assert config is not None
    config = with_dtype(config, settings.folder, target.device)
    model: DraftModel = find(settings.drafter["kind"]).Model(settings.drafter_config, target).to(target.device)
    model = model.float().train()
    source = LiveFeatures(
        target, answers, model.taps, batch=config.batch, length=settings.prepare.length, dtype=config.dtype
    )  # fmt: skip
    began = clock()
    batches = [source.batch(number) for number in range(source.steps_per_pass)]
    read = (clock() - began) / len(source.texts)
    model.begin(source.counts)
    dtype = getattr(torch, config.dtype)
    optimizer = Optimizers(model, config.optimizer, target.spec.vocabulary, config.weight_decay, dtype)
    optimise(model, optimizer, batches[:1], config, 0, False)  # warm-up
    began = clock()
    for number, batch in enumerate(batches, 1):
        optimise(model, optimizer, [batch], config, number, False)
    return read, (clock() - began) / len(batches)


def planned(settings: RunConfig, rates: Rates, seconds: float, available: int | None) -> Plan:
    """What fits into this time.  available: number of prompts; None if unlimited.

    Raises ConfigError if not even the smallest run fits.
    """
    usable = PLANNED * seconds
    prompts, evaluating = _evaluation(settings, rates, EVALUATION * usable)
    rest, batch = usable - STARTING_S - evaluating, settings.train.batch if settings.train else 1
    answers = int(rest / (rates.answer + rates.read + PASSES * rates.step / batch))
    if available is not None and answers > available:
        answers = available
    steps = int((rest - answers * (rates.answer + rates.read)) / rates.step) if answers > 0 else 0
    steps = min(steps, MOST_PASSES * answers // batch)
    if answers < FEWEST_ANSWERS or steps < FEWEST_STEPS:
        _, least = _evaluation(settings, rates, 0)
        few = FEWEST_ANSWERS * max(1.0, FEWEST_STEPS * batch / (PASSES * FEWEST_ANSWERS))
        least += STARTING_S + few * (rates.answer + rates.read + PASSES * rates.step / batch)
        raise ConfigError(
            f"{max(seconds, 0) / 60:.1f} minutes are left, enough for {max(answers, 0)} answers and {max(steps, 0)} "
            f"steps; a drafter needs at least {FEWEST_ANSWERS} and {FEWEST_STEPS}; give about "
            f"{max(1, math.ceil((least / PLANNED - seconds) / 60))} more --minutes, or a smaller target"
        )
    minutes = {
        "prepare": (STARTING_S + answers * rates.answer) / 60,
        "train": (answers * rates.read + steps * rates.step) / 60,
        "evaluate": evaluating / 60,
    }
    return Plan(answers, steps, prompts, minutes)


def _evaluation(settings: RunConfig, rates: Rates, seconds: float) -> tuple[int, float]:
    """Prompts per task that fit, and their time in seconds."""
    config = settings.evaluate
    assert config is not None
    drafters, tokens = 1 + len(config.baselines), config.max_new_tokens
    each = len(config.tasks) * tokens * ((1 + drafters) * len(config.temperatures) * rates.alone + rates.reference)
    fewest, most = PROMPTS
    prompts = min(most, max(fewest, int((seconds - COMPILING_S) / each)))
    return prompts, COMPILING_S + prompts * each


def _seconds(work: Callable[[], Any]) -> float:
    """Time of the faster of two runs."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
