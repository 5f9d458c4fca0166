"""What a run tells while it works: a plan before each stage, its progress, and what came of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.compiled import NotCompiled
from outrider.data.contamination import Found
from outrider.data.features import LiveFeatures
from outrider.nn.draft_model import DraftModel
from outrider.report.schema import Report
from outrider.runs.file import TargetConfig
from outrider.targets.transformers import TransformersTarget
from outrider.training.calibrate import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a stage is about to do."""

    unit: str = "prompts"
    """Of which progress is counted: answers, steps, prompts."""
    total: int
    done: int = 0
    """By an earlier run."""
    usual_minutes: float | None = None
    """What the stage takes where the run file was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing(Plan):
    unit: str = "answers"
    conversations: str
    tokens: int
    """At most, to write."""
    size_bytes: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Plan):
    unit: str = "steps"
    model: DraftModel
    source: LiveFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrating(Plan):
    checkpoint: Path
    task: str
    tokens: int
    """At most, to write."""
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating(Plan):
    drafters: tuple[str, ...]
    tasks: tuple[str, ...]
    prompts: int
    """Of each task."""
    tokens: int
    """About, to write."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The answers there are."""

    path: Path
    answers: int
    tokens: int
    """That train."""
    left_out: tuple[str, ...]
    """Why, a reason for each row that was left out."""
    unanswered: int
    """Prompts without an answer: refused by the template, no room for one, or none given."""
    others: int
    """Answers to prompts that are not asked here."""


@dataclass(frozen=True, slots=True)
class Trained:
    checkpoint: Path


@dataclass(frozen=True, slots=True)
class Calibrated:
    checkpoint: Path
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Evaluated:
    folder: Path
    report: Report


Result = Prepared | Trained | Calibrated | Evaluated


Update = Callable[..., None]
"""Called as units of a plan are done: update(done, **facts), done with those of an earlier run.

facts: `loss` and `tokens_per_step` (expected, where it is known) of a training, `left_out` prompts of an evaluation.
"""


class Reporter:
    """Hears of a run; as it is, it tells nobody.  A subclass overrides what it wants to hear."""

    def loading(self, target: TargetConfig) -> None:
        """Before the target is loaded, threads and types of this machine are settled."""

    def loaded(self, target: TransformersTarget) -> None:
        """The target is there."""

    def not_compiled(self, reason: NotCompiled) -> None:
        """A drafter whose passes can't be compiled; it works without."""

    def looked(self, drafter: str, found: Found) -> None:
        """How many prompts stand in what a drafter was trained on, or drafts from."""

    @contextmanager
    def working(self, plan: Plan) -> Iterator[Update]:
        """Around the work of a stage; gives what is called with its progress."""
        yield lambda done, **facts: None

    def finished(self, result: Result) -> None:
        """What came of a stage."""
