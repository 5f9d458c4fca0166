"""Hours, memory and disk of a run on accelerators from the table, computed from shapes alone: nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from outrider.data.features import encodings
from outrider.errors import ConfigError
from outrider.plan.paper import drafts, weights
from outrider.plan.paper.anatomy import of_sketch
from outrider.plan.paper.hardware import Place
from outrider.plan.paper.roofline import pass_of
from outrider.plan.predict import Memory
from outrider.runs.file import RunConfig
from outrider.runs.forecast import cost
from outrider.runs.forecast.checks import Inputs
from outrider.runs.forecast.preview import Line
from outrider.targets.sketch import Sketch

MOST_SLOTS = 256
"""Most texts that are answered at a time."""


class Texts(NamedTuple):
    """The texts of a run."""

    number: int
    prompt: float
    """Mean tokens of a prompt."""
    answer: float
    """Mean tokens of an answer."""

    @property
    def tokens(self) -> float:
        return self.number * (self.prompt + self.answer)


class Work(NamedTuple):
    """What a run takes."""

    slots: int
    """Texts answered at a time."""
    answer_hours: float
    read_hours: float
    """Hours of the target's passes over the texts."""
    train_hours: float
    device_bytes: float
    """Memory of one accelerator while it trains: its share of the target, the drafter with gradients, two moments and
    float32 weights; without activations."""
    disk_bytes: float
    """Answers, stored states and the checkpoint."""


def work(settings: RunConfig, target: Sketch, place: Place, texts: Texts) -> Work:
    """Hours, memory and disk.  Raises ConfigError for a drafter whose sizes are unknown on paper, and for a target that
    doesn't fit.

    The target is split over all accelerators; the drafter's trainers share the batch.
    """
    assert settings.train is not None
    model = of_sketch(target, weights.stored({"dtype": target.spec.dtype}, settings.target.quantize, target.spec.name))
    settings_of_kind = {key: value for key, value in settings.drafter.items() if key != "kind"}
    draft = drafts.on_paper(settings.drafter["kind"], target, **settings_of_kind)
    if draft.model is None:
        raise ConfigError(f"{draft.kind} is not trained, so a training takes nothing; leave --hardware out")
    slots = min(MOST_SLOTS, Memory(place.memory_bytes, model, {}).slots(texts.prompt + texts.answer))
    if not slots:
        raise ConfigError(
            f"{target.spec.name} takes {model.weight_bytes / 1e9:.0f} GB and {place.devices} "
            f"{place.accelerator.name} have {place.memory_bytes / 1e9:.0f}; give more --devices"
        )
    passes = passes_of(settings, texts.number)
    step = pass_of(model, place, slots, 1, texts.prompt + texts.answer / 2).seconds + place.efficiency.step_s
    prompts = 2 * model.active * texts.number * texts.prompt / place.flops("bf16")
    answering = texts.number * texts.answer * step / slots + prompts
    stored = settings.prepare.stores_states
    times_read = 0 if settings.prepare.features == "text" else 1 if stored else passes
    reading = 2 * model.active * texts.tokens * times_read
    training = draft.training_flops(model, texts.prompt + texts.answer, texts.answer) * texts.number * passes
    each = state_bytes(settings, target, draft.config) if stored else 0.0
    return Work(
        slots, answering / 3600, reading / place.flops("bf16") / 3600, training / place.training_flops / 3600,
        model.weight_bytes / place.devices + 16 * draft.model.parameters,
        (cost.ID_BYTES + each) * texts.tokens + 12 * draft.model.parameters,
    )  # fmt: skip


def passes_of(settings: RunConfig, texts: int) -> float:
    """Passes over the texts."""
    assert settings.train is not None
    per_pass = math.ceil(texts / (settings.train.batch * settings.train.accumulate))
    return settings.train.steps / per_pass if settings.train.steps else float(settings.train.epochs or 0)


def state_bytes(settings: RunConfig, target: Sketch, config: object) -> float:
    """Bytes of a token's stored states."""
    prepare, taps = settings.prepare, getattr(config, "taps", None) or ()
    return encodings.bytes_per_token(prepare.feature_encoding, target.spec.hidden, len(taps), prepare.top_logprobs)


def lines(settings: RunConfig, inputs: Inputs, place: Place) -> Iterator[Line]:
    """What a dry run reports for these accelerators.  Raises ConfigError where nothing can be computed."""
    target, count = inputs.target, len(inputs.conversations)
    if target is None or settings.train is None or not count:
        raise ConfigError(
            "--hardware needs the target's config, prompts and a `train:` section; add what is missing, or leave it out"
        )
    tokens = cost.tokens_of(settings, inputs)
    texts = Texts(count, tokens.source / count, tokens.answers / count)
    work_of_run, name = work(settings, target, place, texts), f"{place.devices} {place.accelerator.name}"
    stage = f"on {name}"
    yield Line(stage, "all of this", "computed, not measured")
    yield Line(stage, "texts answered at a time", work_of_run.slots)
    yield Line(stage, "time to generate the answers, at most", 60 * work_of_run.answer_hours, "minutes")
    yield Line(stage, "time for the target to read them, at most", 60 * work_of_run.read_hours, "minutes")
    yield Line(stage, "time to train, at most", 60 * work_of_run.train_hours, "minutes")
    yield Line(stage, "memory of each, without activations", round(work_of_run.device_bytes), "bytes")
    yield Line(stage, "disk, at most", round(work_of_run.disk_bytes), "bytes")
