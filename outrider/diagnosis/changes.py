"""The changes that are tried: back to what the drafter was trained with where that is recorded, else the alternatives.

A change of the drafter's own settings can't raise the acceptance of a sound drafter, so these are always tried; a
change of the texts can, so it is tried only if something differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from outrider.diagnosis.bench import Setup
from outrider.diagnosis.conditions import Conditions
from outrider.nn.draft_model import DraftModel
from outrider.nn.heads import ReducedHead, VocabularyModel
from outrider.nn.masks import LEARNT
from outrider.nn.shape import PLAIN
from outrider.targets.protocol import TargetSpec
from outrider.targets.text.turns import closing_of

THETAS = (1e4, 1e5, 5e5, 1e6)
"""Common bases of rotary frequencies."""
SHIFTS = (-1, 1, -2, 2)
WINDOWS = (2048, 1024, 512, 256, 128)
"""Contexts that are tried if the length of the training's texts is unknown."""


class Change(NamedTuple):
    """One part of a set-up that is changed back."""

    cause: str
    field: str
    """As in `Setup.with_change`."""
    value: Any
    here: str
    """What it is in the set-up."""
    instead: str
    advice: str

    @property
    def described(self) -> tuple[str, str, str]:
        return self.cause, self.here, self.instead

    def applied(self, setup: Setup) -> Setup:
        return setup.with_change(self.field, self.value)


def recorded(setup: Setup, before: Conditions) -> Iterator[Change]:
    """Parts of the set-up that differ from the conditions of the training."""
    if setup.template != before.template:
        yield Change(
            "template", "template", before.template, _named(setup.template), "the training's",
            "render prompts with the chat template of the training, or prepare and train with this one",
        )  # fmt: skip
    if setup.thinking != before.thinking and "enable_thinking" in (before.template or ""):
        yield Change(
            "thinking", "thinking", before.thinking, _mode(setup.thinking), _mode(before.thinking),
            f"request thinking {_mode(before.thinking)}, or train on answers with thinking {_mode(setup.thinking)}",
        )  # fmt: skip
    if before.temperature is not None and setup.temperature != before.temperature:
        yield Change(
            "temperature", "temperature", before.temperature, f"{setup.temperature:g}", f"{before.temperature:g}",
            "lower the temperature of the requests, or train on answers at theirs",
        )  # fmt: skip
    if missing := {*before.ends} - {*setup.ends}:
        yield Change(
            "end tokens", "ends", (*setup.ends, *sorted(missing)), str(sorted(setup.ends)), str(sorted(before.ends)),
            "end texts at these tokens too: generation_config.eos_token_id, or stop_token_ids of the requests",
        )  # fmt: skip


def of_target(spec: TargetSpec, trained_precision: str | None, name: str | None) -> Iterator[Change]:
    """The target that the drafter was trained on, if its weights have another precision.  name: of that target."""
    if name is not None and spec.quantised != (trained_precision if trained_precision in _QUANTISED else None):
        yield Change(
            "quantised target", "target", "trained", spec.precision, trained_precision or f"{name}, not quantised",
            "train or fine-tune the drafter on the target as it is served, or serve it in the training's precision",
        )  # fmt: skip


_QUANTISED = ("int8",)
"""Precisions with which a target can be loaded."""


def of_length(longest: int, before: Conditions | None) -> Iterator[Change]:
    """Less context for the drafter, if the texts are longer than those of the training, or their length is unknown."""
    for window in WINDOWS if before is None else (before.length,):
        if 0 < window <= longest * (0.5 if before is None else 0.8):
            yield Change(
                "text length", "window", window, f"{longest} tokens", f"the last {window}",
                "train on longer texts (prepare.length), or limit the context that the drafter reads",
            )  # fmt: skip


def of_drafter(model: DraftModel, target: Any) -> Iterator[Change]:
    """Other values of settings that the shapes of the weights do not determine."""
    fields, config = type(model.config).model_fields, model.config
    if model.taps and "taps" in fields:
        yield from _taps(model)
    if "rope_theta" in fields:
        yield from _rotary(config, target.spec)
    if "mask_token" in fields and config.mask_token is not None and config.mask_token != LEARNT:
        yield from _masks(config.mask_token, target)
    for name in ("anchor_predicts", "norm_before_residual", "norm_output"):
        if name in fields and not (name == "anchor_predicts" and config.block == 1):
            yield _setting("layout", name, not getattr(config, name), getattr(config, name))
    drafted = model.head if isinstance(model, VocabularyModel) else model.reduced
    if drafted is not None:
        for moved in ("ids + 1", "ids - 1", *["ids as offsets"] * isinstance(drafted, ReducedHead)):
            advice = "correct d2t and t2d of the folder: they name other tokens than the weights were trained for"
            yield Change("vocabulary map", "vocabulary", moved, "its own", moved, advice)


def of_vocabulary(model: DraftModel) -> Iterator[Change]:
    """All tokens instead of a reduced vocabulary."""
    drafted = model.head if isinstance(model, VocabularyModel) else model.reduced
    if drafted is not None and len(drafted.ids) < model.target.spec.vocabulary:
        yield Change(
            "vocabulary", "vocabulary", "all tokens", f"{len(drafted.ids):,} tokens", "all tokens",
            "train with a larger vocabulary, or choose its tokens from texts like these",
        )  # fmt: skip


def _taps(model: DraftModel) -> Iterator[Change]:
    layers, taps = model.target.spec.layers, model.taps
    usual = type(model)(model.config.model_copy(update={"taps": None}), model.target).taps
    candidates = [tuple(tap + shift for tap in taps) for shift in SHIFTS]
    candidates += [usual] if len(usual) == len(taps) else []
    for moved in dict.fromkeys(candidates):
        if moved != taps and all(0 <= tap < layers for tap in moved):
            yield _setting("taps", "taps", moved, taps)


def _rotary(config: Any, spec: TargetSpec) -> Iterator[Change]:
    sizes = spec.sizes
    bases = dict.fromkeys((*(() if sizes is None else (sizes.rope_theta,)), *THETAS))
    scalings: list[Any] = [PLAIN]
    if sizes is not None and sizes.rope_scaling is not None:
        scalings.append(dict(sizes.rope_scaling))
    yield from (_setting("rope", "rope_theta", base, config.rope_theta) for base in bases if base != config.rope_theta)
    current = config.rope_scaling or PLAIN
    yield from (_setting("rope", "rope_scaling", each, current) for each in scalings if each != current)
    share = 1.0 if sizes is None else sizes.partial_rotary_factor
    if config.partial_rotary_factor != share:
        yield _setting("rope", "partial_rotary_factor", share, config.partial_rotary_factor)


def _masks(current: int, target: Any) -> Iterator[Change]:
    for token in dict.fromkeys((target.mask_token, target.spec.unused)):
        if token is not None and token != current:
            yield _setting("mask token", "mask_token", token, current)


def _setting(cause: str, name: str, value: Any, current: Any) -> Change:
    here, instead = (
        f"{name} {'yes' if each is True else 'no' if each is False else each}" for each in (current, value)
    )
    advice = f"set {instead} in the drafter's config: the weights were trained with it"
    return Change(cause, f"settings.{name}", value, here, instead, advice)


def _named(template: str | None) -> str:
    return "none" if template is None else "another"


def _mode(thinking: bool | None) -> str:
    return "by the template" if thinking is None else "on" if thinking else "off"


def of_rendering(setup: Setup, target: Any) -> Iterator[Change]:
    """The target's own rendering, if the set-up has another and the training's is unknown."""
    template = getattr(target.tokenizer, "chat_template", None)
    if setup.template != template:
        advice = "render prompts with the target's chat template"
        yield Change("template", "template", template, _named(setup.template), "the target's", advice)
    if setup.thinking is not None and "enable_thinking" in (template or ""):
        other = not setup.thinking
        advice = f"request thinking {_mode(other)}, or train on answers with thinking {_mode(setup.thinking)}"
        yield Change("thinking", "thinking", other, _mode(setup.thinking), _mode(other), advice)
    named = {target.tokenizer.eos_token_id if target.tokenizer is not None else None}
    closing = closing_of(target.tokenizer)
    named |= set() if closing is None else {closing.end}
    if missing := {end for end in named if end is not None} - {*setup.ends}:
        advice = "end texts at these tokens too: generation_config.eos_token_id, or stop_token_ids of the requests"
        ends = (*setup.ends, *sorted(missing))
        yield Change("end tokens", "ends", ends, str(sorted(setup.ends)), str(sorted(ends)), advice)
