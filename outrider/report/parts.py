"""Parts of a report: percentiles, prompts, traced tokens, groups, training runs.

Each is frozen, keeps fields unknown to this version, and uses null for what was not measured.
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
    """Base of all parts: frozen, keeps unknown fields, turns numbers that are not finite into None."""

    model_config = ConfigDict(frozen=True, extra="allow", coerce_numbers_to_str=True, use_attribute_docstrings=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_finite(cls, data: Any) -> Any:
        return finite(data)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any, info: ValidationInfo) -> Any:
        """A list or mapping that was not measured may be null in the file; here it is empty."""
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
    """Index of the first token that differs from the target's own."""
    tpot_ms: float | None = None
    plain_tpot_ms: float | None = None
    contaminated: bool | None = None
    """Whether it occurs in what the drafter was trained on or drafts from; null if not checked."""


class Range(Part):
    """A figure with its 95 % interval over prompts."""

    center: float | None = None
    low: float | None = None
    high: float | None = None


class TracedToken(Part):
    """A position of an untimed run: the target judged a drafted token there, or added one of its own."""

    text: str
    """The output's text."""
    drafted: str | None = None
    """The proposal; null without one."""
    accepted: bool = False
    depth: int | None = None
    """Depth of the proposal, from 1."""
    p: float | None = None
    """The target's probability of the proposal at temperature 1, whatever the run's temperature."""
    q: float | None = None
    """The drafter's probability of the proposal; null if it is deterministic."""
    rank: int | None = None
    """Rank of the proposal under the target; 1 is its most probable token."""
    entropy: float | None = None
    """Of the target's distribution at temperature 1, in nats."""
    kind: str | None = None
    """Class of the proposal: word, number, space, punctuation, symbol, hangul, other script, special."""

    @pydantic.model_serializer(mode="wrap")
    def _without_nulls(self, fields: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A file has thousands of these, and without a proposal most fields are null."""
        return {name: value for name, value in fields(self).items() if value is not None}


class TracedPrompt(Part):
    """A prompt's text with every judgement, token by token."""

    id: str
    tokens: tuple[TracedToken, ...] = ()


class Pattern(Part):
    """Judgements of one kind, such as numbers or positions of high entropy."""

    name: str
    tested: int = 0
    accepted: int = 0


class Rejections(Part):
    """How often proposals of each kind were tested and accepted."""

    by_kind: tuple[Pattern, ...] = ()
    by_entropy: tuple[Pattern, ...] = ()
    by_rank: tuple[Pattern, ...] = ()
    """By the proposal's rank under the target."""


class Clean(Part):
    """The row without contaminated prompts: those that occur in what the drafter was trained on or drafts from."""

    contaminated: tuple[str, ...] = ()
    """Ids of contaminated prompts."""
    checked: int = 0
    rule: str = ""
    """For example `one 13-gram of words in common`."""
    tokens_per_step: float | None = None
    speedup: float | None = None


class Group(Part):
    """A row's figures over the prompts of one language or category."""

    name: str
    """As in the prompts' rows; empty for prompts without a group."""
    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    judged: int = 0
    """Drafted tokens up to the first rejection of each step."""
    accepted: int = 0
    """Accepted ones of these.  Prompts, tokens, steps, judged and accepted of all groups add up to the row's."""
    tokens_per_step: float | None = None
    token_acceptance: float | None = None
    speedup: float | None = None


class PositionRange(Part):
    """A row's figures over the steps that begin in a range of positions, counted from the start of the prompt."""

    begin: int = 0
    end: int | None = None
    """The position after the last; null for no end."""
    steps: int = 0
    tokens: int = 0
    judged: int = 0
    accepted: int = 0
    """As in `Group`."""
    tokens_per_step: float | None = None
    token_acceptance: float | None = None


class LeftOut(Part):
    """A prompt that was not measured because the target's own text loops or is a single token."""

    id: str
    task: str | None = None
    first_ngram_share: float | None = None
    reason: str = "loop"
    """`loop` or `short`."""


class Training(Part):
    """How a drafter was trained."""

    precision: str | None = None
    """Precision of the target during training."""
    steps: int | None = None
    seconds: float | None = None
    tokens: int | None = None
    loss_curve: tuple[tuple[float, float | None], ...] = ()
    held_out: int | None = None
    """Held-out answers, on which acceptance was measured at the end."""
    acceptance: tuple[float | None, ...] = ()
    """[k]: acceptance at depth k + 1, given that all before were accepted, at temperature 1."""
    agreement: tuple[float | None, ...] = ()
    """[k]: the same at temperature 0, along a chain."""
    with_siblings: tuple[float | None, ...] = ()
    """[k]: the same if the token at depth k + 1 is drafted with its runners-up; empty if none are drafted."""
    temperature: float | None = None
    """Temperature at which the target sampled these answers, 0 with top_p or top_k; null if they are not its own."""

    def accepted_by_depth(self, temperature: float) -> tuple[float, ...]:
        """[k]: share of drafts whose tokens up to depth k + 1 are accepted, to compare with serving at `temperature`;
        empty if the training texts are too different.

        Texts at a higher temperature are harder for any drafter.  Nothing is drafted after a runner-up.
        """
        if self.temperature is None or temperature > self.temperature:
            return ()
        chain = self.agreement if temperature == 0 else self.acceptance
        last = self.with_siblings if temperature == 0 and self.with_siblings else chain
        before, shares = 1.0, []
        for share, conditional in zip(chain, last, strict=True):
            if share is None or conditional is None:
                break
            shares.append(before * conditional)
            before *= share
        return tuple(shares)


class TaskSource(Part):
    """Source of a task's prompts."""

    source: str = ""
    revision: str | None = None
    """Commit of the data set, or `sha256:` and the start of a file's hash."""
    prompts: int | None = None
    """Prompts in the whole set, from which those measured are drawn."""


class Load(Part):
    """Load by other programs during the runs; means over the runs, weighted by time."""

    runs: int = 0
    repeated: int = 0
    """Number of runs repeated because other programs took too much of their time."""
    contended: int = 0
    """Number of runs that lost much time nevertheless."""
    waited: float | None = None
    """Share of the time that this process waited for a processor."""
    stolen: float | None = None
    """Share of processor time that the host gave to other guests."""
    others: float | None = None
    """Processors used by other programs."""
    queue: float | None = None
    """Runnable processes, including this one."""
