"""The JSON of a plan.  Field names are stable under `outrider_plan` 1; fields may be added.  No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.report.parts import Part, Range

Decision = Literal["ENABLE", "BATCH INSTEAD", "NEED DATA"]
Where = Literal["same device", "own device", "cpu"]


class Row(Part):
    """One method at one depth under one load.  Seconds are those of a step of the whole batch."""

    method: str
    depth: int
    concurrency: float
    context: float
    """Tokens of a text in the middle of its answer."""
    tokens_per_step: Range
    """Bonus token included."""
    speedup: Range
    """Decoding speed / plain decoding speed, with the uncertainty of acceptance and costs."""
    request_speedup: float
    """Speed-up of a whole request, including the time both models take to read its prompt."""
    plain_s: float
    draft_s: float
    verify_s: float
    other_s: float
    tokens_per_s: float
    """Total over the batch."""
    plain_tokens_per_s: float
    tpot_ms: float
    plain_tpot_ms: float
    memory_bytes: float | None
    """Memory that the drafter takes from keys and values; null if the size of memory is unknown."""
    slots: int | None
    """Texts that fit beside the drafter."""
    plain_slots: int | None
    fits: bool | None
    """Whether the batch fits beside the drafter."""
    break_even_tokens: float | None
    """Length of an answer at which drafting makes up for reading the prompt; null if it never does."""
    basis: Literal["probe", "report", "checkpoint", "published"]
    """Source of the acceptance."""
    meets_slo: bool | None = None


class Placement(Part):
    """One method at its best depth under the traffic's load, with its drafter at one place.  Computed, not measured."""

    method: str
    where: Where
    depth: int
    concurrency: float
    plain_s: float
    draft_s: float
    """Includes what is sent to the drafter and back."""
    rest_s: float
    speedup: Range
    tokens_per_s: float
    """Total over the batch."""
    devices: int
    """Accelerators of target and drafter."""
    drafter_bytes: float
    """Memory of the drafter at its place."""
    slots: int | None
    """Texts that fit on the target's devices."""


class BreakEven(Part):
    """What a method must reach to pay off."""

    method: str
    depth: int
    concurrency: float
    tokens_per_step: float
    """Above this, drafting is faster than plain decoding."""
    acceptance: float | None
    """The same as an acceptance probability per token, equal at every depth; null if even 1 is not enough."""
    crossover: int | None = None
    """Maximum number of concurrent requests at which it pays at its acceptance; null if it pays at all loads examined.
    """
    pays: bool | None = None
    """Whether it pays for a single request at its acceptance; null if the acceptance is unknown."""


class Cost(Part):
    """Hours, bytes and money at one share of the traffic."""

    traffic: float
    """Share of the given rate: 0.5, 1 or 2."""
    concurrency: float | None = None
    """Null if the server can't keep up."""
    speedup: float | None = None
    device_hours_per_day: float | None = None
    """Total of all accelerators, without a drafter."""
    device_hours_saved_per_day: float | None = None
    """Hours saved for the same tokens, so that a smaller or shared machine suffices."""
    memory_bytes: float | None = None
    """Memory that the drafter takes from keys and values at this load."""
    spent_per_day: float | None = None
    """Cost of the hours, without a drafter."""
    saved_per_day: float | None = None
    """Cost of the saved hours."""
    pays_back_after_days: float | None = None
    """Days until the savings cover data, training and a year of storage; null without savings or prices."""


class Once(Part):
    """Up-front cost of a drafter; null if unknown."""

    data_hours: float | None = None
    training_hours: float | None = None
    storage_bytes: float | None = None
    data_money: float | None = None
    """Hours of all accelerators at their price; likewise training_money."""
    training_money: float | None = None
    storage_money: float | None = None
    """One year; null if storage has no price."""
    money: float | None = None
    """Sum of the items that have a price."""
    assumed: tuple[str, ...] = ()


class Profile(Part):
    """What limits a plain step of the target on this machine's device, from a short profile."""

    device: str
    concurrency: int
    context: int
    busy: float
    """Share of the step in which a kernel ran, which monitors call utilisation."""
    launch: float
    """Share of the step in which no kernel ran."""
    memory: float
    """Share of the step that its bytes take at the speed of a copy."""
    compute: float
    """Share of the step that its matrix products take at the speed of a large one."""
    bound: Literal["memory", "compute", "launch"]
    """The largest of the three."""


class ProbedRow(Part):
    """One method on the replayed requests of one category, or of all."""

    method: str
    category: str
    """code, math, extraction, language, chat, other; or `all`."""
    requests: int
    steps: int
    tokens: int
    tokens_per_step: Range
    """Bonus token included.  Intervals here are over requests; null for fewer than five."""
    survival: tuple[Range, ...]
    """[k]: share of all steps that accept at least k + 1 drafted tokens."""


class Probed(Part):
    """Requests from the log that were replayed on the target."""

    requests: int
    """Number of requests that the figures cover."""
    wanted: int
    """Requests to draw."""
    because: str | None = None
    """Why no requests, or fewer than requested, were replayed; null if all were."""
    calls: int
    """Requests in the log."""
    categories: dict[str, int]
    """Requests of the log that have text, by category."""
    left_out: dict[str, int]
    """Requests left out, by reason."""
    seed: int
    new_tokens: int
    """Maximum number of tokens of an answer."""
    rows: tuple[ProbedRow, ...] = ()


class Plan(Part):
    """The decision and its numbers."""

    outrider_plan: Literal[1] = 1
    decision: Decision
    because: str
    method: str | None = None
    depth: int | None = None
    depths: dict[str, int] = Field(default_factory=dict)
    """Depth of the chosen method by concurrent requests."""
    target: str
    hardware: str
    measured: bool
    demand: dict[str, Any] | None = None
    rows: tuple[Row, ...] = ()
    placements: tuple[Placement, ...] = ()
    """Empty without --hardware or traffic."""
    break_even: tuple[BreakEven, ...] = ()
    once: Once | None = None
    costs: tuple[Cost, ...] = ()
    acceptance: dict[str, str] = Field(default_factory=dict)
    """Source of each method's acceptance."""
    profile: Profile | None = None
    """Null if nothing was timed, or only on the CPU."""
    probe: Probed | None = None
    """Null without a log, or if nothing was to be replayed."""
    notes: tuple[str, ...] = ()
