"""A set-up and its expected tokens per step: answers are generated and read once, and a change recomputes only what
depends on it.

S tokens of a text, T taps, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from outrider.data.rendering import prompt_tokens
from outrider.decoding.draft import to_device
from outrider.diagnosis.walk import Steps, chances_by_position
from outrider.drafters import method
from outrider.generation import generate
from outrider.loading import Source, draft_model, with_settings
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.heads import ReducedHead, VocabularyModel
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts

EVERYWHERE = 1 << 20
"""More anchors than a text has positions."""
Vocabulary = Literal["its own", "all tokens", "ids + 1", "ids - 1", "ids as offsets"]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Setup:
    """How a target and a drafter are used together."""

    temperature: float = 0.0
    template: str | None = None
    thinking: bool | None = None
    ends: tuple[int, ...] = ()
    """Tokens after which no answer continues."""
    target: Literal["here", "trained"] = "here"
    """The served target, or the one that the drafter was trained on."""
    window: int | None = None
    """Maximum number of tokens of a text that the drafter reads; None for all."""
    vocabulary: Vocabulary = "its own"
    """Which tokens the columns of a reduced vocabulary stand for."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The drafter's settings that differ from its own."""

    def with_change(self, name: str, value: Any) -> Setup:
        """This set-up with another value of a field or, by `settings.NAME`, of a drafter's setting."""
        if name.startswith("settings."):
            return replace(self, settings={**self.settings, name.removeprefix("settings."): value})
        change: dict[str, Any] = {name: value}
        return replace(self, **change)

    def undone(self, name: str, before: Setup) -> Setup:
        """This set-up with a field or setting as it was before."""
        if not name.startswith("settings."):
            return self.with_change(name, {each: getattr(before, each) for each in self.__dataclass_fields__}[name])
        name = name.removeprefix("settings.")
        others = {key: value for key, value in self.settings.items() if key != name}
        return replace(self, settings=others | {key: before.settings[key] for key in [name] if key in before.settings})


class Text(NamedTuple):
    """Tokens, and the spans [start, end) that the target wrote."""

    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]]

    @property
    def written(self) -> int:
        return sum(end - start for start, end in self.spans)


class States(NamedTuple):
    """A target's states of one text: taps [S, T, H] of `layers`, and hidden [S, H]."""

    layers: tuple[int, ...]
    taps: Tensor | None
    hidden: Tensor

    def of(self, layers: tuple[int, ...]) -> Tensor:
        """Taps [S, T, H] of these layers."""
        if self.taps is None or not layers:
            return self.hidden[:, None, :0]
        return self.taps[:, [self.layers.index(layer) for layer in layers]]


class Bench:
    """A drafter, a target and prompts, on which set-ups are measured."""

    def __init__(
        self, source: Source, target: TransformersTarget, prompts: Sequence[Messages], max_new_tokens: int,
        trained_target: Callable[[], TransformersTarget] | None = None,
    ):  # fmt: skip
        """trained_target: loads the target that the drafter was trained on, if it is another one."""
        self.source, self.prompts, self.max_new_tokens = source, prompts, max_new_tokens
        self._targets: dict[str, TransformersTarget] = {"here": target}
        self._trained_target = trained_target
        self._answers: dict[str, list[Text]] = {}
        self._states: dict[tuple[str, tuple[int, ...]], States] = {}
        """By target and tokens of a text."""
        self._bases: dict[str, DraftModel] = {}
        self._models: dict[str, DraftModel] = {}
        self.layers: tuple[int, ...] = ()
        """Layers that are read in a target's pass, besides a model's own taps."""

    def target(self, name: str) -> TransformersTarget:
        if name not in self._targets:
            assert self._trained_target is not None
            self._targets[name] = self._trained_target()
        return self._targets[name]

    def measured(self, setup: Setup, only: slice = slice(None)) -> list[Steps]:
        """The expected steps of every answer.  only: of these prompts."""
        model = self.model(setup)
        return [self._steps(model, setup, text) for text in self.answers(setup)[only]]

    # ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def answers(self, setup: Setup) -> list[Text]:
        """The served target's answers to all prompts, cut after the first end token."""
        key = repr((setup.template, setup.thinking, setup.temperature))
        if key not in self._answers:
            self._answers[key] = self._generated(setup)
        return [cut(text, setup.ends) for text in self._answers[key]]

    def _generated(self, setup: Setup) -> list[Text]:
        target = self.target("here")
        tokenizer = copy.copy(target.tokenizer)
        tokenizer.chat_template = setup.template
        room, cuts = target.spec.context - self.max_new_tokens - 1, Cuts()
        prompts = [
            cuts.fit(prompt_tokens(tokenizer, messages, setup.thinking), room, str(number))
            for number, messages in enumerate(self.prompts)
        ]
        generations = generate(
            target, prompts, max_new_tokens=self.max_new_tokens, temperature=setup.temperature,
            seed=0 if setup.temperature else None,
        )  # fmt: skip
        return [
            Text([*prompt, *generation.tokens], [(len(prompt), len(prompt) + len(generation.tokens))])
            for prompt, generation in zip(prompts, generations, strict=True)
        ]

    # ── the draft model ───────────────────────────────────────────────────────────────────────────────────────────────

    def model(self, setup: Setup) -> DraftModel:
        """The drafter with the settings of a set-up, drafting from every position."""
        key = repr((setup.target, setup.vocabulary, setup.settings))
        if key not in self._models:
            base = self.base(setup.target)
            model = with_settings(base, everywhere(base) | dict(setup.settings), self.source.name)
            if setup.vocabulary != "its own":
                model = with_vocabulary(model, setup.vocabulary)
            self._models = {**dict(list(self._models.items())[-1:]), key: model}
        return self._models[key]

    def base(self, target: str) -> DraftModel:
        """The drafter as it is loaded for one of the targets."""
        if target not in self._bases:
            self._bases[target] = draft_model(self.source, self.target(target))
        return self._bases[target]

    def _steps(self, model: DraftModel, setup: Setup, text: Text) -> Steps:
        key = setup.target, tuple(text.tokens)
        states = self._states.get(key)
        if states is None or not {*model.taps} <= {*states.layers}:
            layers = tuple(sorted({*self.layers, *model.taps}))
            states = self._states[key] = states_of(self.target(setup.target), text, layers)
        return steps_of(model, states, text, setup.temperature, setup.window)


def cut(text: Text, ends: Sequence[int]) -> Text:
    """A text with one answer, cut after the answer's first end token."""
    [(start, end)] = text.spans
    at = next((i + 1 for i in range(start, end) if text.tokens[i] in ends), end)
    return text if at == end else Text(text.tokens[:at], [(start, at)])


def states_of(target: Any, text: Text, layers: tuple[int, ...]) -> States:
    """The target's states of a text, from one pass."""
    hidden, taps = target.read(to_device([list(text.tokens)], target.device), layers)
    return States(layers, None if taps is None else taps[0], hidden[0])


def steps_of(model: DraftModel, states: States, text: Text, temperature: float, window: int | None = None) -> Steps:
    """The expected steps of a text's answers.  window: most tokens before a step that the drafter reads."""
    if window is None or window >= len(text.tokens):
        pieces = [(0, len(text.tokens), text.spans, text.written)]
    else:
        pieces = [piece for span in text.spans for piece in _windows(len(text.tokens), span, window, model)]
    chances = []
    for start, end, spans, counted in pieces:
        batch = _batch(text.tokens[start:end], [(a - start, b - start) for a, b in spans], states, start, model)
        chances.append(chances_by_position(model, batch, temperature)[:counted])
    return Steps.of(torch.cat(chances), text.written)


def _windows(
    length: int, span: tuple[int, int], window: int, model: DraftModel
) -> Iterator[tuple[int, int, list[tuple[int, int]], int]]:
    """Start and end of each window over a span, the span that is drafted in it, and how many positions count."""
    depth = getattr(model.config, method(model.config.kind).length)
    stride = max(1, (window - depth) // 2)
    for begin in range(*span, stride):
        counted = min(stride, span[1] - begin)
        end = min(begin + counted + depth, span[1])
        yield max(0, end - window), end, [(begin, end)], counted


def _batch(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], states: States, start: int, model: DraftModel
) -> Batch:
    """A batch of one text, whose states begin at `start`."""
    ids = to_device([list(tokens)], states.hidden.device)
    loss_mask = torch.zeros_like(ids, dtype=torch.bool)
    for begin, end in spans:
        loss_mask[:, begin:end] = True
    part = slice(start, start + len(tokens))
    taps = states.of(model.taps)[part].to(model.dtype)
    return Batch(ids, loss_mask, torch.ones_like(ids), taps[None], states.hidden[None, part])


def everywhere(model: DraftModel) -> dict[str, Any]:
    """Settings with which a model drafts from every position of a text, as deep as in serving."""
    fields = type(model.config).model_fields
    settings: dict[str, Any] = {"anchors": EVERYWHERE} if "anchors" in fields else {}
    return settings | ({"ttt": model.config.length} if "ttt" in fields else {})


def with_vocabulary(model: DraftModel, vocabulary: Vocabulary) -> DraftModel:
    """The model with other tokens behind the columns of its reduced vocabulary, or with columns for all tokens."""
    drafted = model.head if isinstance(model, VocabularyModel) else model.reduced
    assert drafted is not None
    if vocabulary == "all tokens":
        if not isinstance(model, VocabularyModel):
            return model.over_all_tokens()
        model.head = _whole_head(model, drafted.ids)
        return model
    ids = drafted.ids
    count = model.target.spec.vocabulary
    moved = {"ids + 1": ids + 1, "ids - 1": ids - 1}.get(vocabulary, ids - torch.arange(len(ids), device=ids.device))
    moved = moved.clamp(0, count - 1)
    if isinstance(drafted, ReducedHead):
        drafted.d2t.copy_(moved - torch.arange(len(ids), device=ids.device))
    else:
        drafted.ids.copy_(moved)
    return model


def _whole_head(model: DraftModel, ids: Tensor) -> ReducedHead:
    """A head over all tokens: the model's rows where it has them, else the target's."""
    assert isinstance(model, VocabularyModel) and model.head is not None
    count = model.target.spec.vocabulary
    head = ReducedHead(model.target, count).to(ids.device, model.dtype)
    head.lm_head.weight[ids] = model.head.lm_head.weight
    return head.requires_grad_(False)
