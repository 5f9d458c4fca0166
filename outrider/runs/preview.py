"""What a run will do, as far as its files and its target's config tell: counts, tokens, steps, memory, disk, time."""

import math
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import torch

from outrider import checkpoint
from outrider.data import conversations, encodings, regenerate
from outrider.data.answers import ANSWERS, read_answers
from outrider.measure.config import Config as EvaluateConfig
from outrider.runs.checks import Inputs
from outrider.runs.file import RunConfig
from outrider.targets.load import default_device


class Line(NamedTuple):
    """One fact of a stage."""

    stage: str
    what: str
    value: int | float | str
    unit: Literal["", "bytes", "minutes"] = ""


def preview(settings: RunConfig, stages: Collection[str], inputs: Inputs) -> list[Line]:
    """What these stages will do.  Writes nothing and reads no weights."""
    found = [*_target(settings, inputs)]
    for stage, lines in (("prepare", _prepare), ("train", _train), ("evaluate", _evaluate)):
        if stage in stages:
            found += lines(settings, inputs)
            if (minutes := settings.usual_minutes.get(stage)) is not None:  # type: ignore[call-overload]
                found.append(Line(stage, "time where the file was tried", minutes, "minutes"))
    return found


def _target(settings: RunConfig, inputs: Inputs) -> Iterator[Line]:
    yield Line("target", "name", settings.target.name)
    if inputs.target is None:
        yield Line("target", "sizes", "unknown: its config can't be reached")
        return
    asked, spec = settings.target.dtype, inputs.target.spec
    is_cpu = default_device(settings.target.device).type == "cpu"
    dtype = asked if asked not in (None, "auto") else "float32" if is_cpu and asked is None else spec.dtype
    count = inputs.target.parameters
    size_bytes = 1 if settings.target.quantize else getattr(torch, dtype).itemsize
    yield Line("target", "parameters", count)
    yield Line("target", f"memory of its weights in {settings.target.quantize or dtype}", count * size_bytes, "bytes")


def _prepare(settings: RunConfig, inputs: Inputs) -> Iterator[Line]:
    config, used = settings.prepare, len(inputs.asked)
    there = conversations.available(config)
    of = "" if there is None or there == used else f" of {there:,}"
    done = regenerate.answered(settings.answers, inputs.asked, config)
    tokens = regenerate.most_tokens(inputs.asked, config) if done < used else 0
    yield Line("prepare", f"from {config.conversations}", f"{used:,}{of} prompts")
    if inputs.skipped.reasons:
        yield Line("prepare", "rows left out", f"{len(inputs.skipped.reasons)}; the first: {inputs.skipped.reasons[0]}")
    yield Line("prepare", "answered before", done)
    yield Line("prepare", "tokens to write, at most", tokens)
    yield Line("prepare", f"disk, at most, in {settings.answers}", 6 * tokens, "bytes")
    taps = inputs.paper.values.get("drafter.taps") or settings.drafter.get("taps") or ()
    if config.features != "live" and inputs.target is not None:
        each = encodings.bytes_per_token(
            config.feature_encoding, inputs.target.spec.hidden, len(taps), config.top_logprobs, config.rotate
        )
        yield Line("prepare", "disk of a token's features, about", round(each), "bytes")


def _train(settings: RunConfig, inputs: Inputs) -> Iterator[Line]:
    assert settings.train is not None
    config, path = settings.train, settings.answers / ANSWERS
    answers = inputs.chosen(read_answers(path), settings) if path.exists() else []
    texts = max(len(inputs.asked), 1) if len(answers) < len(inputs.asked) else len(answers)
    per_pass = math.ceil(texts / config.batch)
    steps = config.steps or math.ceil((config.epochs or 0) * per_pass)
    place = settings.folder / "checkpoint"
    if (checkpoint.whole(place) / checkpoint.MANIFEST).exists():
        yield Line("train", "goes on from step", checkpoint.manifest_of(place)["training"].get("step", 0))
    passes = f"{steps / per_pass:.1f} passes over {texts:,} texts"
    yield Line("train", "length", f"{steps:,} steps of {config.batch} texts, {passes}")
    if inputs.paper.parameters is not None:
        yield Line("train", f"parameters of {settings.drafter['kind']}", inputs.paper.parameters)
        yield Line(
            "train", "memory of weights, gradients and moments", inputs.paper.sizes["sizes.training_bytes"], "bytes"
        )
        yield Line("train", f"disk, in {place}", 12 * inputs.paper.parameters, "bytes")


def _evaluate(settings: RunConfig, inputs: Inputs) -> Iterator[Line]:
    config = settings.evaluate
    assert config is not None
    names = [choice if isinstance(choice, str) else choice["kind"] for choice in (*config.baselines, settings.drafter)]
    yield Line("evaluate", "drafters", ", ".join(names))
    for task, drawn in inputs.drawn.items():
        of = "" if drawn.count is None else f" of {drawn.count:,}"
        yield Line("evaluate", f"prompts of {task}", f"{min(config.prompts, len(drawn.prompts)):,}{of}")
    yield Line("evaluate", "tokens to write, about", evaluation_tokens(config, len(names)))


def evaluation_tokens(config: EvaluateConfig, drafters: int) -> int:
    """Tokens that an evaluation of so many drafters writes at most, the target's own texts included."""
    of_baselines = config.temperatures if config.baseline_temperatures is None else config.baseline_temperatures
    entries = len(config.temperatures) + (drafters - 1) * len(of_baselines)
    timed = config.prompts * (1 + len(config.temperatures) + entries)
    traced = min(config.traced_prompts, config.prompts) * entries
    return len(config.tasks) * (timed + traced) * config.max_new_tokens
