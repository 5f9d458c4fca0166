"""What a run reports while it works: a plan before each stage, its progress, and its result."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from outrider.data.features.cached import CachedFeatures
from outrider.data.features.live import LiveFeatures
from outrider.data.overlap.contamination import OverlapReport
from outrider.fast import NotCompiled
from outrider.nn.draft_model import DraftModel
from outrider.report.parts import Training
from outrider.report.schema import Report
from outrider.runs.file import TargetConfig
from outrider.targets.remote.served import RunTarget
from outrider.training.fitting.calibrate import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a stage is about to do."""

    unit: str = "prompts"
    """What is counted: answers, steps or prompts."""
    total: int
    done: int = 0
    """Units that an earlier run has done."""
    usual_minutes: float | None = None
    """What the stage takes where the run file was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing(Plan):
    unit: str = "answers"
    conversations: str
    available: int | None = None
    """Rows of the source, used or not; None where it is not counted."""
    tokens: int
    """At most, to write."""
    size_bytes: int
    folder: Path
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Conversations that are not used, by reason."""
    servers: tuple[str, ...] = ()
    """Which answer in place of the target here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing(Plan):
    """The target's states of all answers are about to be written."""

    unit: str = "shards"
    tokens: int
    """Of all answers, those of former runs included."""
    size_bytes: int
    """About, of all of them."""
    free_bytes: int
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(Plan):
    unit: str = "steps"
    model: DraftModel
    source: LiveFeatures | CachedFeatures
    accumulate: int = 1
    """Batches of a step."""
    schedule: str = ""
    """How the learning rate goes on, where the number of steps is another than before."""


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
    """The result of `prepare`."""

    path: Path
    answers: int
    tokens: int
    """To learn from."""
    left_out: tuple[str, ...]
    """A reason for each row that was left out."""
    unanswered: int
    """Prompts without an answer: refused by the template, no room for one, or none given."""
    others: int
    """Answers to prompts that are not asked here."""
    unstable: int = 0
    """Given answers that do not train: where they begin or end in the rendering is not sure."""
    failed: int = 0
    """Prompts that no server answered; the next run asks again."""
    why_failed: tuple[str, ...] = ()
    """The most frequent reasons."""
    retokenised: int = 0
    """Answers that came as text, whose token ids are the tokenizer's."""
    truncated: int = 0
    """Answers that ended for want of room: they train without an end."""
    by_server: Mapping[str, int] = field(default_factory=dict)
    """Answers by the server that wrote them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The features that training will read."""

    folder: str
    size_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of `train`."""

    checkpoint: Path
    training: Training
    """Loss, and acceptance on answers that were held out."""
    acceptance: tuple[float, ...] = ()
    """Expected at each depth, given that all before were accepted; over the texts of the last logged step."""
    probe_tokens_per_step: float | None = None
    """Measured on a few prompts at the end; None where the run file names none."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    checkpoint: Path
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Evaluated:
    folder: Path
    report: Report


Result = Prepared | Stored | Trained | Calibrated | Evaluated


Update = Callable[..., None]
"""Called as units of a plan are done: update(done, **facts), done with those of an earlier run.

facts, where they are known: `tokens` written or read so far, `loss`, `tokens_per_step` (in training the expected ones),
`mfu` of a training (see `training.progress.throughput`), `reading_s` (see `data.batches.TextFeatures`), `left_out`
prompts.
"""


class Reporter:
    """Receives the events of a run and ignores them.  A subclass overrides the methods it needs."""

    def writing(self, size_bytes: int, folder: Path) -> None:
        """So much, at most, is about to be written to a folder; raise to refuse it.  Nothing is loaded yet."""

    def loading(self, target: TargetConfig) -> None:
        """The target is about to be loaded; threads and number types of this machine are chosen."""

    def loaded(self, target: RunTarget) -> None:
        """Called when the target is loaded, or described where servers have its weights."""

    def not_compiled(self, reason: NotCompiled) -> None:
        """A drafter's passes can't be compiled; it works without."""

    def looked(self, drafter: str, report: OverlapReport) -> None:
        """How many prompts occur in what a drafter was trained on or drafts from."""

    @contextmanager
    def working(self, plan: Plan) -> Iterator[Update]:
        """Context of a stage's work; gives the function that is called with its progress."""
        yield lambda done, **facts: None

    def finished(self, result: Result) -> None:
        """A stage has ended with this result."""
