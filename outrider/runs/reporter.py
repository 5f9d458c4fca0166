"""Events of a run: a plan before each stage, progress, and a result."""

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
    """Unit of `total`: answers, steps or prompts."""
    total: int
    done: int = 0
    """Units done by an earlier run."""
    usual_minutes: float | None = None
    """Time of the stage on the machine where the run file was tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing(Plan):
    unit: str = "answers"
    conversations: str
    available: int | None = None
    """Rows of the source; None if not counted."""
    tokens: int
    """Maximum number of tokens to generate."""
    size_bytes: int
    folder: Path
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Unused conversations, by reason."""
    servers: tuple[str, ...] = ()
    """Servers that answer instead of the local target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing(Plan):
    """Store the target's states of all answers."""

    unit: str = "shards"
    tokens: int
    """Tokens of all answers, including those of earlier runs."""
    size_bytes: int
    """Approximate size of all states."""
    free_bytes: int
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(Plan):
    unit: str = "steps"
    model: DraftModel
    source: LiveFeatures | CachedFeatures
    accumulate: int = 1
    """Batches per step."""
    schedule: str = ""
    """How the learning rate continues, if the number of steps changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrating(Plan):
    checkpoint: Path
    task: str
    tokens: int
    """Maximum number of tokens to generate."""
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating(Plan):
    drafters: tuple[str, ...]
    tasks: tuple[str, ...]
    prompts: int
    """Prompts per task."""
    tokens: int
    """Approximate number of tokens to generate."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `prepare`."""

    path: Path
    answers: int
    tokens: int
    """Tokens to train on."""
    left_out: tuple[str, ...]
    """A reason for each omitted row."""
    unanswered: int
    """Prompts without an answer: refused by the chat template, too long, or the source has none."""
    others: int
    """Answers to prompts that are not in this run."""
    unstable: int = 0
    """Answers from the source that are not trained on, because their boundaries in the rendered text are ambiguous."""
    failed: int = 0
    """Prompts that no server answered; the next run sends them again."""
    why_failed: tuple[str, ...] = ()
    """The most frequent reasons."""
    retokenised: int = 0
    """Answers received as text, whose token ids come from the tokenizer."""
    truncated: int = 0
    """Answers cut at a length limit: they are trained on without an end token."""
    by_server: Mapping[str, int] = field(default_factory=dict)
    """Number of answers per server."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored features for training."""

    folder: str
    size_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of `train`."""

    checkpoint: Path
    training: Training
    """Loss, and acceptance on held-out answers."""
    acceptance: tuple[float, ...] = ()
    """Expected acceptance at each depth, given that all earlier tokens were accepted, on the last logged step."""
    probe_tokens_per_step: float | None = None
    """Measured on a few prompts at the end; None without evaluation prompts."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    checkpoint: Path
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Evaluated:
    folder: Path
    report: Report
    before: str | None = None
    """Name, in the report, of the drafter that the run's own was fine-tuned from; None for a new one."""


Result = Prepared | Stored | Trained | Calibrated | Evaluated


Update = Callable[..., None]
"""Called with progress: update(done, **facts), where `done` includes earlier runs.

facts, if known: `tokens` generated or read so far, `loss`, `tokens_per_step` (expected in training), `mfu` of a
training (see `training.progress.throughput`), `reading_s` (see `data.batches.TextFeatures`), `left_out` prompts.
"""


class Reporter:
    """Receives the events of a run and ignores them.  A subclass overrides the methods it needs."""

    def writing(self, size_bytes: int, folder: Path) -> None:
        """At most this much will be written to a folder; raise an exception to refuse it.  Nothing is loaded yet."""

    def loading(self, target: TargetConfig) -> None:
        """The target will be loaded; threads and number types are already chosen."""

    def loaded(self, target: RunTarget) -> None:
        """The target is loaded, or described if servers have its weights."""

    def not_compiled(self, reason: NotCompiled) -> None:
        """A drafter's passes can't be compiled; it runs uncompiled."""

    def looked(self, drafter: str, report: OverlapReport) -> None:
        """How many prompts occur in a drafter's training data or corpora."""

    @contextmanager
    def working(self, plan: Plan) -> Iterator[Update]:
        """Context of a stage; yields the function that receives its progress."""
        yield lambda done, **facts: None

    def finished(self, result: Result) -> None:
        """A stage has ended with this result."""
