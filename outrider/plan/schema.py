"""What a plan found, as its JSON has it.  The names are a promise under `outrider_plan` 1; more may come.  No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.report.parts import Part, Range

Decision = Literal["ENABLE", "BATCH INSTEAD", "NEED DATA"]


class Row(Part):
    """One method at one depth under one load.  Seconds are of a step of all texts together."""

    method: str
    depth: int
    concurrency: float
    context: float
    """Tokens of a text in the middle of its answer."""
    tokens_per_step: Range
    """Bonus token included."""
    speedup: Range
    """Speed of decoding over plain decoding's, with what acceptance and the model of costs leave open."""
    request_speedup: float
    """Of a whole request, the reading of its prompt by both models included."""
    plain_s: float
    draft_s: float
    verify_s: float
    other_s: float
    tokens_per_s: float
    """Of all texts together."""
    plain_tokens_per_s: float
    tpot_ms: float
    plain_tpot_ms: float
    memory_bytes: float | None
    """What the drafter takes of the room for keys and values; null where the size of memory is not known."""
    slots: int | None
    """Texts that fit beside the drafter."""
    plain_slots: int | None
    fits: bool | None
    """So many texts fit beside the drafter."""
    break_even_tokens: float | None
    """Length of an answer from which on drafting wins what reading its prompt cost; null where it wins nothing."""
    basis: Literal["probe", "report", "checkpoint", "published"]
    """Where acceptance is from."""
    meets_slo: bool | None = None


class BreakEven(Part):
    """What a method must reach to pay."""

    method: str
    depth: int
    concurrency: float
    tokens_per_step: float
    """From which on a drafted step wins over plain ones."""
    acceptance: float | None
    """The same as a chance per token, equal at every depth; null where not even all tokens accepted would do."""
    crossover: int | None = None
    """The most requests at once at which it pays by its acceptance; null where it pays at all that were looked at."""
    pays: bool | None = None
    """Whether it pays at one request at once by its acceptance; null where that is not known."""


class Cost(Part):
    """Hours, bytes and money at one share of the traffic."""

    traffic: float
    """Share of the given rate: 0.5, 1 or 2."""
    concurrency: float | None = None
    """Null where the server can't keep up."""
    speedup: float | None = None
    device_hours_per_day: float | None = None
    """Of all accelerators, without a drafter."""
    device_hours_saved_per_day: float | None = None
    """The hours that the same tokens would not take, which a smaller or shared machine can use."""
    memory_bytes: float | None = None
    """What the drafter takes of the room for keys and values at this load."""
    spent_per_day: float | None = None
    """Money for the hours, without a drafter."""
    saved_per_day: float | None = None
    """Money for the hours that are saved."""
    pays_back_after_days: float | None = None
    """From the money spent on data, training and a year's storage; null where nothing is saved or no price is known."""


class Once(Part):
    """What a drafter costs before it serves; null where it is not known."""

    data_hours: float | None = None
    training_hours: float | None = None
    storage_bytes: float | None = None
    data_money: float | None = None
    """Hours of all accelerators at their price; so is training_money."""
    training_money: float | None = None
    storage_money: float | None = None
    """A year of it; null where storage has no price."""
    money: float | None = None
    """All three, as far as they have a price."""
    assumed: tuple[str, ...] = ()


class Rule(Part):
    """A rule of the field, beside what this plan and our own measurements say of it."""

    name: Literal["size", "acceptance", "training", "utilisation"]
    says: str
    """The rule, as articles have it."""
    here: str
    """What this plan computes of it; why it can't, where it can't."""
    holds: bool | None
    """Whether it decides here as the plan does; null where the plan can't tell."""
    measured: str
    """What our own measurements say of it."""
    sources: tuple[str, ...]
    """Files of benchmarks/results that have them."""


class Profile(Part):
    """What a plain step of the target waits for on the device of this machine, by a short profile."""

    device: str
    concurrency: int
    context: int
    busy: float
    """Share of the step in which at least one kernel ran: what monitors call utilisation."""
    launch: float
    """Share of the step in which none did."""
    memory: float
    """Share of the step that its bytes need at the speed of a copy here."""
    compute: float
    """Share of the step that its products need at the speed of a large product here."""
    bound: Literal["memory", "compute", "launch"]
    """The largest of the three."""


class ProbedRow(Part):
    """One method on the requests of one category that were replayed, or of all."""

    method: str
    category: str
    """code, math, extraction, language, chat, other; or `all`."""
    requests: int
    steps: int
    tokens: int
    tokens_per_step: Range
    """Bonus token included.  Its interval, as the others here, is over requests; null of fewer than five."""
    survival: tuple[Range, ...]
    """[k]: share of all steps that accept at least k + 1 drafted tokens."""


class Probed(Part):
    """Requests of the log, replayed on the target."""

    requests: int
    """That figures are of."""
    wanted: int
    """That were to be drawn."""
    because: str | None = None
    """Why none were replayed, or fewer than wanted; null where all were."""
    calls: int
    """Of the whole log."""
    categories: dict[str, int]
    """Requests of the whole log that have a text, by category."""
    left_out: dict[str, int]
    """By reason."""
    seed: int
    new_tokens: int
    """Of an answer at the most."""
    rows: tuple[ProbedRow, ...] = ()


class Plan(Part):
    """The decision, the numbers, and the one that decided."""

    outrider_plan: Literal[1] = 1
    decision: Decision
    because: str
    method: str | None = None
    depth: int | None = None
    depths: dict[str, int] = Field(default_factory=dict)
    """Depth of the chosen method by requests at once."""
    target: str
    hardware: str
    measured: bool
    demand: dict[str, Any] | None = None
    rows: tuple[Row, ...] = ()
    break_even: tuple[BreakEven, ...] = ()
    once: Once | None = None
    costs: tuple[Cost, ...] = ()
    acceptance: dict[str, str] = Field(default_factory=dict)
    """Source of each method's acceptance."""
    rules: tuple[Rule, ...] = ()
    """Of the field; none without traffic."""
    profile: Profile | None = None
    """Null where nothing was timed, or there is no device but the CPU."""
    probe: Probed | None = None
    """Null where no log was given, or none of it was to be replayed."""
    notes: tuple[str, ...] = ()
