"""A diagnosis of a drafter by name, and the record of a training that later diagnoses compare with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.diagnosis import changes, search
from outrider.diagnosis.bench import Bench, Messages, Setup, Text, everywhere, states_of, steps_of
from outrider.diagnosis.conditions import Conditions, conditions_of, language_of, recorded, shares
from outrider.diagnosis.search import Diagnosis, Texts
from outrider.diagnosis.walk import Steps
from outrider.drafters import kinds, trains_target
from outrider.errors import ConfigError
from outrider.loading import Source, describe, with_settings
from outrider.measure.tasks.names import Prompt
from outrider.nn.draft_model import DraftModel
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.traffic.logs.categories import category_of

log = logging.getLogger(__name__)
MOST_NEW = 96
"""Tokens of each answer, also of the held-out answers that give the promise."""
PROMPTS = 24


@dataclass(frozen=True, slots=True)
class Options:
    """How the drafter is used here."""

    temperature: float | None = None
    """Temperature of the requests; the training's unless given."""
    thinking: bool | None = None
    """Whether requests let the target think, if its chat template has `enable_thinking`."""
    template: str | None = None
    """Chat template that renders the prompts, as text; empty for none.  The target's unless given."""
    trained_target: str | None = None
    """The target that the drafter was trained on; what its folder names unless given."""


def source_of(drafter: str) -> Source:
    """The folder of a drafter that can be diagnosed.  Raises ConfigError for one without a draft model."""
    if drafter in kinds():
        raise ConfigError(
            f"{drafter} is a kind without trained weights, so nothing was promised for it; name the folder of a "
            "trained drafter, or use `outrider evaluate`"
        )
    source = describe(drafter)
    if trains_target(source.kind):
        raise ConfigError(f"{drafter} is of kind {source.kind}, which trains its target; use `outrider evaluate`")
    return source


def run(
    drafter: str, target: TransformersTarget, prompts: Sequence[Prompt], options: Options | None = None,
    trained_on: Sequence[Prompt] = (), on_try: Callable[[str], None] = lambda _: None,
) -> Diagnosis:  # fmt: skip
    """Find out why a drafter accepts less than it could on these prompts.

    trained_on: prompts like those of the training, for a drafter whose folder does not record its acceptance.
    Raises as `loading.load_drafter` does, and ConfigError for a drafter without a draft model.
    """
    options = options or Options()
    source = source_of(drafter)
    before = recorded(source.manifest)
    setup = _setup(target, options, before)
    name = options.trained_target or source.target
    bench = Bench(source, target, _messages(prompts), MOST_NEW, lambda: load_target(str(name), compile=False))
    precision = (source.manifest.get("target") or {}).get("precision")
    differing = [*changes.of_target(target.spec, precision, name)]
    if before is not None:
        differing += changes.recorded(setup, before)
    candidates = list(_candidates(bench, setup, before))
    bench.layers = tuple(sorted({tap for change in candidates if change.cause == "taps" for tap in change.value}))
    result, corrected = search.diagnose(bench.measured, setup, differing, candidates, before is not None, on_try)
    reference = _reference(bench, before, corrected, target, trained_on)
    if reference is not None:
        on_try("texts")
        texts = _texts(target, bench, setup)
        search.compare_texts(result, bench.measured(corrected), reference[0], texts, reference[1])
    return result


def _candidates(bench: Bench, setup: Setup, before: Conditions | None) -> Iterator[changes.Change]:
    """The alternatives for what is not recorded."""
    model = bench.base("here")
    yield from changes.of_length(max(len(text.tokens) for text in bench.answers(setup)), before)
    yield from changes.of_drafter(model, bench.target("here"))
    yield from changes.of_vocabulary(model)
    if before is None:
        yield from changes.of_rendering(setup, bench.target("here"))


def _setup(target: TransformersTarget, options: Options, before: Conditions | None) -> Setup:
    template = getattr(target.tokenizer, "chat_template", None) if options.template is None else options.template
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if before is None else before.sampling
    thinking = before.thinking if options.thinking is None and before is not None else options.thinking
    return Setup(temperature, template or None, thinking, tuple(sorted(target.ends)))


def _messages(prompts: Sequence[Prompt]) -> list[Messages]:
    return [prompt.messages() for prompt in prompts]


def _texts(target: TransformersTarget, bench: Bench, setup: Setup) -> Texts:
    requests = ["\n".join(str(one["content"]) for one in messages) for messages in bench.prompts]
    whole = [target.decode(list(text.tokens)) for text in bench.answers(setup)]
    return Texts(shares(map(language_of, whole)), shares(map(category_of, requests)))


def _reference(
    bench: Bench, before: Conditions | None, corrected: Setup, target: TransformersTarget, trained_on: Sequence[Prompt]
) -> tuple[list[Steps], Texts] | None:
    """The steps that the drafter is expected to reach, and on which texts; None if nothing is known of it."""
    if trained_on:
        like = Bench(bench.source, target, _messages(trained_on), MOST_NEW, lambda: bench.target("trained"))
        return like.measured(corrected), _texts(target, like, corrected)
    if before is None:
        return None
    promise = before.promise(corrected.temperature) or before.promise(0.0)
    return (promise, Texts(before.languages, before.categories)) if promise else None


def record(
    prepare: Any, model: DraftModel, target: Any, learnt: Sequence[Any], held_out: Sequence[Any]
) -> Conditions:  # fmt: skip
    """The conditions of a training, with the trained model's steps on held-out answers."""
    before = conditions_of(prepare, target, target.tokenizer, learnt)
    texts = [
        Text(list(answer.tokens[: start + MOST_NEW]), [(start, min(end, start + MOST_NEW))])
        for answer in held_out
        for start, end in answer.learn[:1]
        if end - start > 1
    ]
    temperatures = sorted({0.0, before.sampling})
    promises: dict[str, list[Any]] = {f"{temperature:g}": [] for temperature in temperatures}
    try:
        whole = with_settings(model.eval(), everywhere(model), "the drafter")
        for text in texts:  # one by one, since the states of all may not fit into memory
            states = states_of(target, text, whole.taps)
            for temperature in temperatures:
                steps = steps_of(whole, states, text, temperature)
                promises[f"{temperature:g}"].append([round(value, 2) for value in steps])
    except Exception as error:  # a method may have rows of another kind, and its training must not be lost
        log.info("no steps on held-out answers are recorded: %s", error)
        promises = {}
    return Conditions(**(before.as_json() | {"held_out": promises}))
