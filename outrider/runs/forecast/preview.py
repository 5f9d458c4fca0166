"""Preview of a run from its files and its target's config: counts, tokens, steps, memory, disk, time."""

import math
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import torch

from outrider import checkpoint
from outrider.data.answers import regenerate
from outrider.data.answers.store import ANSWERS, StoredAnswers
from outrider.data.corpus import tokenizer_of
from outrider.data.rendering import check_template
from outrider.data.sources.choosing import NOT_CHOSEN
from outrider.errors import DataError, TargetError
from outrider.measure.config import Config as EvaluateConfig
from outrider.plan.paper.weights import NAMED
from outrider.runs.file import RunConfig
from outrider.runs.forecast import cost
from outrider.runs.forecast.checks import Inputs
from outrider.runs.forecast.weights import why_weights
from outrider.targets.load import default_device


class Line(NamedTuple):
    """One fact of a stage."""

    stage: str
    what: str
    value: int | float | str
    unit: Literal["", "bytes", "minutes"] = ""


def preview(settings: RunConfig, stages: Collection[str], inputs: Inputs) -> list[Line]:
    """What these stages will do.  Writes nothing and reads no weights."""
    lines_of_run = [*_target(settings, stages, inputs)]
    for stage, lines in (("prepare", _prepare), ("train", _train), ("evaluate", _evaluate)):
        if stage in stages:
            lines_of_run += lines(settings, inputs)
            if (minutes := settings.usual_minutes.get(stage)) is not None:  # type: ignore[call-overload]
                lines_of_run.append(Line(stage, "time where the file was tried", minutes, "minutes"))
    return lines_of_run


def _target(settings: RunConfig, stages: Collection[str], inputs: Inputs) -> Iterator[Line]:
    yield Line("target", "name", settings.target.name)
    if inputs.target is None:
        yield Line("target", "sizes", "unknown: its config can't be read")
        return
    requested, spec = settings.target.dtype, inputs.target.spec
    is_cpu = default_device(settings.target.device).type == "cpu"
    dtype = requested if requested not in (None, "auto") else "float32" if is_cpu and requested is None else spec.dtype
    count = inputs.target.parameters
    quantize = settings.target.quantize
    size_bytes = NAMED[quantize].bytes if quantize else getattr(torch, dtype).itemsize
    yield Line("target", "parameters", count)
    if why_weights(settings, stages) is None:
        yield Line("target", "weights", "not loaded here: servers have them")
        return
    yield Line("target", f"memory of its weights in {quantize or dtype}", round(count * size_bytes), "bytes")


def answers_bytes(settings: RunConfig, inputs: Inputs) -> int:
    """Approximate size of the answers on disk, in bytes."""
    source_tokens = min(
        inputs.conversations.characters // cost.CHARACTERS, len(inputs.conversations) * settings.prepare.length
    )
    return cost.ID_BYTES * (source_tokens + (inputs.conversations.most_tokens if settings.prepare.regenerate else 0))


def written_bytes(settings: RunConfig, inputs: Inputs) -> int:
    """Approximate number of bytes that `prepare` writes: answers, and features if they are stored."""
    if not settings.prepare.stores_states or inputs.target is None:
        return answers_bytes(settings, inputs)
    each = cost.bytes_per_token(settings, inputs, settings.prepare.feature_encoding)
    return int(answers_bytes(settings, inputs) * (1 + each / cost.ID_BYTES))


def _prepare(settings: RunConfig, inputs: Inputs) -> Iterator[Line]:
    config, used, there = settings.prepare, len(inputs.conversations), inputs.conversations.available
    of = "" if there is None or there == used else f" of {there:,}"
    done = regenerate.answered(settings.answers, inputs.conversations.prompt_hashes)
    tokens = inputs.conversations.most_tokens if done < used else 0
    yield Line("prepare", f"from {config.label}", f"{used:,}{of} prompts")
    for reason, count in inputs.conversations.left_out.items():
        if reason != NOT_CHOSEN:
            yield Line("prepare", f"not used: {reason}", count)
    if inputs.skipped.reasons:
        yield Line("prepare", "rows left out", f"{len(inputs.skipped.reasons)}; the first: {inputs.skipped.reasons[0]}")
    if (refused := _refused(settings, inputs)) is not None:
        yield Line("prepare", "refused by the target's chat template", refused)
    if config.servers:
        yield Line("prepare", "answered by", ", ".join(config.servers))
    yield Line("prepare", "already answered", done)
    yield Line("prepare", "tokens to generate, at most", tokens)
    yield Line("prepare", f"disk, about, in {settings.answers}", answers_bytes(settings, inputs), "bytes")
    if config.stores_states and inputs.target is not None:
        each = cost.bytes_per_token(settings, inputs, config.feature_encoding)
        yield Line("prepare", "disk of a token's features, about", round(each), "bytes")
    if inputs.target is not None and done < used and not config.servers:
        hours = cost.writing_hours(settings, inputs, cost.Tokens(0, tokens))
        yield from _hours("prepare", "time to write them, at most", hours)


def _refused(settings: RunConfig, inputs: Inputs) -> int | None:
    """Number of conversations that the target's chat template refuses; None if its tokenizer can't be loaded.

    Raises DataError with file and line for the first, unless such rows are skipped.
    """
    config, count = settings.prepare, 0
    try:
        tokenizer = tokenizer_of(settings.target.name)
    except TargetError:
        return None
    for conversation in inputs.conversations:
        try:
            check_template(tokenizer, conversation, config.enable_thinking, answered=not config.regenerate)
        except DataError:
            if not config.skip_bad:
                raise
            count += 1
    return count


def _features(settings: RunConfig, inputs: Inputs, passes: float) -> Iterator[Line]:
    """Cost of each way to get features, and the best one."""
    if inputs.target is None or not len(inputs.conversations) or settings.prepare.features == "text":
        return
    tokens, taps = cost.tokens_of(settings, inputs), cost.num_taps(settings, inputs)
    each = ", ".join(f"{cost.bytes_per_token(settings, inputs, kind):,.0f} {kind}" for kind in cost.KINDS)
    yield Line("train", "tokens to read, at most", tokens.all)
    yield Line("train", f"bytes per token, {taps} taps and the final state", each)
    ways = cost.ways(settings, inputs, tokens, passes)
    for way in ways:
        yield Line("train", f"features {way.name}: disk, at most", way.disk_bytes, "bytes")
        yield from _hours("train", f"features {way.name}: time of the target", way.hours)
    name, why = cost.choice(ways, settings, inputs, passes)
    yield Line("train", "best here", f"{name}: {why}")


def _hours(stage: str, what: str, hours: float | None) -> Iterator[Line]:
    if hours is not None:
        yield Line(stage, what, 60 * hours, "minutes")


def _train(settings: RunConfig, inputs: Inputs) -> Iterator[Line]:
    assert settings.train is not None
    config, path = settings.train, settings.answers / ANSWERS
    answers = len(inputs.chosen(StoredAnswers.read(path), settings)) if path.exists() else 0
    texts = max(len(inputs.conversations), 1) if answers < len(inputs.conversations) else answers
    each = config.batch * config.accumulate
    per_pass = math.ceil(texts / each)
    steps = config.steps or math.ceil((config.epochs or 0) * per_pass)
    place = settings.folder / "checkpoint"
    if (checkpoint.whole(place) / checkpoint.MANIFEST).exists():
        yield Line("train", "resumes from step", checkpoint.manifest_of(place)["training"].get("step", 0))
    passes = steps / per_pass
    whole = f"{passes:.1f} passes over {texts:,} texts"
    yield Line("train", "length", f"{steps:,} steps of {each} texts, {whole}")
    yield from _features(settings, inputs, passes)
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
    """Maximum number of tokens that an evaluation generates, including the target's own texts."""
    of_baselines = config.temperatures if config.baseline_temperatures is None else config.baseline_temperatures
    entries = len(config.temperatures) + (drafters - 1) * len(of_baselines)
    timed = config.prompts * (1 + len(config.temperatures) + entries)
    traced = min(config.traced_prompts, config.prompts) * entries
    return len(config.tasks) * (timed + traced) * config.max_new_tokens
