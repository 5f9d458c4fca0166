"""Raw measurements: every step of every run, in counts and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.decoding.protocols import Drafter, Policy
from outrider.measure.tasks.names import Prompt
from outrider.report.parts import Rejections, TracedPrompt


@dataclass(frozen=True, slots=True)
class Entry:
    """One drafter to measure, at one temperature."""

    name: str
    drafter: Drafter
    temperature: float = 0.0
    trained_on: str | None = None
    """Precision of the target during its training, such as float32."""
    predicted: tuple[float, ...] = ()
    """[k]: share of drafts accepted up to depth k + 1, as training measured it on similar texts."""


@dataclass(slots=True)
class Run:
    """One prompt continued once, with all its turns."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    """Accepted draft tokens of each step."""
    reached: list[int] = field(default_factory=list)
    """Depth of each step's draft; if the text ended within it, the depth that was judged."""
    seconds: float = 0.0
    """In a batch: its share of the batch's time, by tokens."""
    first_s: float = 0.0
    """Until its first tokens."""
    done_s: float = 0.0
    """Until its last tokens; 0 if equal to `seconds`."""
    gaps_s: list[float] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    model_s: float = 0.0
    invalid: int = 0
    tv_distance: float = 0.0
    """Sum over its tokens of the total variation distance from the target's distribution."""
    nodes: list[int] = field(default_factory=list)
    """Drafted tokens verified in each step, on all branches; empty for chains, see `reached`."""
    turns: list[int] = field(default_factory=list)
    """Tokens of each turn; empty for a single turn."""
    positions: list[int] = field(default_factory=list)
    """Tokens before each step, prompt included; empty in older records."""
    committed: list[int] = field(default_factory=list)
    """Tokens committed by each step, parallel to `positions`."""
    memory_peak_bytes: int | None = None
    lost: float | None = None
    """Share of its time lost to other programs."""
    repeats: int = 0
    """How often it was repeated because of that."""

    def joined(self, other: Run) -> Run:
        """This run and the next turn's as one.  Seconds to the first token add up, since a user waits for each."""
        peaks = [run.memory_peak_bytes for run in (self, other) if run.memory_peak_bytes is not None]
        lost = [run.lost for run in (self, other) if run.lost is not None]
        added = (
            "tokens", "steps", "accepted", "reached", "positions", "committed", "nodes", "seconds", "first_s", "done_s",
            "gaps_s", "draft_s", "verify_s", "other_s", "model_s", "invalid", "tv_distance", "repeats",
        )  # fmt: skip
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in added}
        turns = [*(self.turns or [len(self.tokens)]), *(other.turns or [len(other.tokens)])]
        return Run(**sums, turns=turns, memory_peak_bytes=max(peaks, default=None), lost=max(lost, default=None))


@dataclass(slots=True)
class Sample:
    """One prompt with one entry, and plain decoding of the same prompt."""

    prompt: Prompt
    run: Run
    plain: Run
    reference: list[list[int]]
    """Output of transformers' generate in each turn."""
    generate_s: float
    group: int | None = None
    """Number of its batch; None if it was served alone."""


@dataclass(slots=True)
class Measured:
    """All measurements of one entry."""

    entry: Entry
    task: str
    samples: list[Sample] = field(default_factory=list)
    rule: str | None = None
    """Name and settings of a lossy rule."""
    policy: str = "fixed"
    chosen: Policy | None = None
    """The policy object, one for all prompts of the task."""
    batch: int = 1
    processes: int = 1
    """Number of processes that measured side by side on this machine."""
    verification: str = "standard"
    traced: list[TracedPrompt] = field(default_factory=list)
    rejections: Rejections | None = None
    overlap: list[float] = field(default_factory=list)
    """sum(min(p, q)) of every judged token of the traced prompts."""


class Overlaps(NamedTuple):
    """Which prompts occur in the texts that a drafter was trained on or drafts from."""

    contaminated: Mapping[tuple[str, str], bool]
    """By task and prompt id; prompts that were not checked are missing."""
    rule: str = ""
    """Description of what counts as an occurrence."""
