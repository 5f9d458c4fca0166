"""Parts of a report: percentiles, prompts, traced tokens, scores, groups, trainings.

Each is frozen, keeps fields that this version does not know, and has null for what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_origin

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationInfo


def finite(value: Any) -> Any:
    """`value` with None for every number that is not finite, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class Part(BaseModel):
    """Base of all below: frozen, keeps fields it doesn't know, turns numbers that are not finite into None."""

    model_config = ConfigDict(frozen=True, extra="allow", coerce_numbers_to_str=True, use_attribute_docstrings=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_finite(cls, data: Any) -> Any:
        return finite(data)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any, info: ValidationInfo) -> Any:
        """A list or a mapping that was not measured may be null in the file; here it is empty."""
        if value is not None:
            return value
        kind = cls.model_fields[info.field_name or ""].annotation
        if (isinstance(kind, type) and issubclass(kind, Part)) or get_origin(kind) is dict:
            return {}
        return () if get_origin(kind) is tuple else None


class Percentiles(Part):
    """Percentiles in milliseconds."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Share(Part):
    """Fractions of a step's time; they sum to 1."""

    draft: float | None = None
    verify: float | None = None
    other: float | None = None


class PromptResult(Part):
    """One prompt under one drafter."""

    id: str
    tokens: int | None = None
    steps: int | None = None
    tokens_per_s: float | None = None
    plain_tokens_per_s: float | None = None
    speedup: float | None = None
    exact: bool | None = None
    first_difference: int | None = None
    """Index of the first token that is not the target's own, from 0."""
    tpot_ms: float | None = None
    plain_tpot_ms: float | None = None
    contaminated: bool | None = None
    """It occurs in what the drafter was trained on or drafts from; null if not checked."""


class Range(Part):
    """A figure with its 95 % interval over prompts."""

    center: float | None = None
    low: float | None = None
    high: float | None = None


class TracedToken(Part):
    """One position where the target judged a drafted token, or wrote one where none was drafted.  Of an untimed run."""

    text: str
    """What the output has there."""
    drafted: str | None = None
    """What was proposed; null where nothing was."""
    accepted: bool = False
    depth: int | None = None
    """Of the proposal, from 1."""
    p: float | None = None
    """The target's chance of the proposal at temperature 1, whatever the run's temperature."""
    q: float | None = None
    """The drafter's chance of it; null where the proposal is deterministic."""
    rank: int | None = None
    """Of the proposal under the target, 1 is its favourite."""
    entropy: float | None = None
    """Of the target's distribution there at temperature 1, nats."""
    kind: str | None = None
    """Class of the proposal: word, number, space, punctuation, symbol, hangul, other script, special."""

    @pydantic.model_serializer(mode="wrap")
    def _without_nulls(self, fields: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """There are thousands of these in a file, and where nothing was proposed most of it is null."""
        return {name: value for name, value in fields(self).items() if value is not None}


class TracedPrompt(Part):
    """One prompt's text with every judgement on it, token by token."""

    id: str
    tokens: tuple[TracedToken, ...] = ()


class Pattern(Part):
    """Judgements of one sort, such as numbers, or positions of high entropy."""

    name: str
    tested: int = 0
    accepted: int = 0


class Rejections(Part):
    """Where drafts are rejected: how often proposals of each sort were tested and accepted."""

    by_kind: tuple[Pattern, ...] = ()
    by_entropy: tuple[Pattern, ...] = ()
    by_rank: tuple[Pattern, ...] = ()
    """By the proposal's rank under the target."""


class Clean(Part):
    """The row without contaminated prompts: those that occur in what the drafter was trained on or drafts from."""

    contaminated: tuple[str, ...] = ()
    """Ids of these prompts."""
    checked: int = 0
    rule: str = ""
    """Such as `one 13-gram of words in common`."""
    tokens_per_step: float | None = None
    speedup: float | None = None


class Group(Part):
    """A row's figures over the prompts of one language or category."""

    name: str
    """As the prompts' rows have it; empty for those whose row names none."""
    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    judged: int = 0
    """Drafted tokens up to the first rejection of each step."""
    accepted: int = 0
    """Of these.  Prompts, tokens, steps, judged and accepted of all groups add up to the row's."""
    tokens_per_step: float | None = None
    token_acceptance: float | None = None
    speedup: float | None = None


class PositionRange(Part):
    """A row's figures over the steps that begin in a range of positions, the prompt's tokens counted."""

    begin: int = 0
    end: int | None = None
    """The position after the last; null for no end."""
    steps: int = 0
    tokens: int = 0
    judged: int = 0
    accepted: int = 0
    """As of a group."""
    tokens_per_step: float | None = None
    token_acceptance: float | None = None


class LeftOut(Part):
    """A prompt that was not measured because the target's own text loops there, or is one token."""

    id: str
    task: str | None = None
    first_ngram_share: float | None = None
    reason: str = "loop"
    """`loop` or `short`."""


class Training(Part):
    """How a drafter was trained."""

    precision: str | None = None
    """Of the target in that training."""
    steps: int | None = None
    seconds: float | None = None
    tokens: int | None = None
    loss_curve: tuple[tuple[float, float | None], ...] = ()
    held_out: int | None = None
    """Answers that did not train: acceptance was measured on them at the end."""
    acceptance: tuple[float | None, ...] = ()
    """[k]: acceptance at depth k + 1, given that all before were accepted, at temperature 1."""
    agreement: tuple[float | None, ...] = ()
    """[k]: the same at temperature 0, along a chain."""
    with_siblings: tuple[float | None, ...] = ()
    """[k]: the same where the token at depth k + 1 has its runners-up beside it; empty where none are drafted."""
    temperature: float | None = None
    """At which the target drew these answers, 0 with top_p or top_k; null where they are not its own."""

    def accepted_by_depth(self, temperature: float) -> tuple[float, ...]:
        """[k]: share of the drafts whose tokens up to depth k + 1 are accepted, which serving at `temperature` can be
        compared with; empty where the texts of the training are too unlike.

        Hotter texts are harder to draft, whatever the drafter.  Nothing is drafted behind a runner-up.
        """
        if self.temperature is None or temperature > self.temperature:
            return ()
        chain = self.agreement if temperature == 0 else self.acceptance
        last = self.with_siblings if temperature == 0 and self.with_siblings else chain
        before, found = 1.0, []
        for share, own in zip(chain, last, strict=True):
            if share is None or own is None:
                break
            found.append(before * own)
            before *= share
        return tuple(found)


class TaskSource(Part):
    """Where a task's prompts are from."""

    source: str = ""
    revision: str | None = None
    """Commit of the data set, or `sha256:` and the start of a file's hash."""
    prompts: int | None = None
    """Of the whole set; those measured are drawn from them."""


class Load(Part):
    """What other programs took while the runs were measured; means over the runs, by their time."""

    runs: int = 0
    repeated: int = 0
    """Runs that were measured again because other programs took too much of their time."""
    contended: int = 0
    """Runs that lost much time even so."""
    waited: float | None = None
    """Share of the time in which this process waited for a processor."""
    stolen: float | None = None
    """Share of the processors' time that the host gave to other guests."""
    others: float | None = None
    """Processors that worked for other programs."""
    queue: float | None = None
    """Processes that could run, this one among them."""
