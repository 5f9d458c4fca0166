"""lm-evaluation-harness on Outrider's targets, plain and drafted: same prompts, same stops, same scores.

`import outrider.gate.harness` registers the model `outrider` with lm-eval (arguments: target, drafter, and those of
`OutriderLM`).  `both` runs tasks twice, plain and drafted, and compares the results.  Needs lm-eval, the extra `eval`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import ConfigError, DataError
from outrider.gate.language_model import OutriderLM
from outrider.gate.statistics.equivalence import Equivalence, equivalence
from outrider.generation import serve
from outrider.loading import load_drafter
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

Load = Callable[..., Drafter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Settings of a run."""

    tasks: tuple[str, ...]
    target: str = "demo"
    drafter: str = "ngram"
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the drafter."""
    dtype: str | None = None
    limit: int | None = None
    include_path: str | None = None
    slots: int = 1
    chat: bool = False
    """Render prompts with the chat template."""
    margin: float = 0.01
    max_gen_toks: int = 256


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of a task, plain and drafted."""

    metric: str
    plain: float
    drafted: float
    equivalence: Equivalence | None
    """None if the metric has no number per prompt."""


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task, run twice."""

    task: str
    prompts: int
    answers: int
    equal: int
    """Answers, or log-likelihoods, that are the same in both runs."""
    first_different: dict[str, Any] | None
    """The first difference: number, plain, drafted."""
    scores: tuple[Score, ...]
    plain_s: float
    drafted_s: float
    tokens_per_step: float | None
    """Of the drafted run; None if nothing was generated."""
    cut: dict[str, int] = field(default_factory=dict)
    """Requests whose context was truncated at the front, with the tokens lost; for all tasks of a group."""
    is_sampled: bool = False
    """Whether any answer was sampled.  Greedy answers and log-likelihoods have one correct value."""

    @property
    def holds(self) -> bool:
        """Every answer is the same; for sampled answers, no score differs significantly.

        Only texts are available here, not tokens: a rounding tie can't be told from a fault, so no difference is
        excused.
        """
        return self.verdict != "different" if self.is_sampled else self.equal == self.answers

    @property
    def speedup(self) -> float | None:
        """Plain seconds over drafted seconds; None if nothing was generated."""
        return self.plain_s / self.drafted_s if self.tokens_per_step and self.drafted_s else None

    @property
    def verdict(self) -> str:
        """`equal` if all answers are equal, otherwise the worst verdict on the scores."""
        if self.equal == self.answers:
            return "equal"
        verdicts = {score.equivalence.verdict for score in self.scores if score.equivalence is not None}
        return next((word for word in ("different", "not enough prompts", "equivalent") if word in verdicts), "unknown")

    def as_json(self) -> dict[str, Any]:
        scores = [
            asdict(score) | {"equivalence": score.equivalence.as_json() if score.equivalence else None}
            for score in self.scores
        ]
        return asdict(self) | {"speedup": self.speedup, "verdict": self.verdict, "holds": self.holds, "scores": scores}


def both(
    job: Job, on_request: Callable[[str, int, int], None] | None = None, load: Load = load_drafter
) -> list[TaskRun]:
    """Run every task plain, then drafted.  load(name, target, **settings) creates the drafter.

    Tasks that run code written by the model are refused by name, before anything is loaded.  on_request(stage, done,
    of) is called after each answer.  Raises ConfigError for such a task or an unknown one, DataError if a task's data
    can't be loaded.
    """
    manager = manager_of(job)
    if unsafe := unsafe_tasks(manager, job.tasks):
        raise ConfigError(
            f"{', '.join(unsafe)} runs code written by the model; leave the task out, or run it with lm-eval itself in "
            "a container, see docs/parity.md"
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it repeats what our table shows
    target = load_target(job.target, dtype=job.dtype)
    drafter = load(job.drafter, target, **job.settings)
    for arm in (None, drafter):  # warm up: the first passes of a process pay for allocations
        for _ in serve(target, [Request([0], 16, Sampling())], arm):
            pass
    runs: list[TaskRun] = []
    for task in job.tasks:
        pair = []
        for stage, arm in (("plain", None), ("drafted", drafter)):
            on_answer = None if on_request is None else functools.partial(on_request, f"{task}, {stage}")
            model = OutriderLM(target, arm, slots=job.slots, max_gen_toks=job.max_gen_toks, on_request=on_answer)
            pair.append((_evaluated(model, task, manager, job), model))
        runs += _runs(pair, job)
    return runs


def manager_of(job: Job) -> TaskManager:
    """Tasks of the included folder; also lm-eval's own, which takes seconds, if a name is not among them."""
    if job.include_path is not None:
        if not Path(job.include_path).is_dir():
            raise ConfigError(f"--include-path {job.include_path}: no such folder; name one with task files (YAML)")
        included = TaskManager(include_path=job.include_path, include_defaults=False)
        if all(task in included.all_tasks for task in job.tasks):
            return included
    manager = TaskManager(include_path=job.include_path)
    for task in job.tasks:
        if task not in manager.all_tasks:
            raise ConfigError(
                f"lm-eval has no task {task!r}; list its tasks with `lm-eval ls tasks`, or name a folder of your own "
                "tasks with --include-path FOLDER"
            )
    return manager


def unsafe_tasks(manager: TaskManager, names: Iterable[str]) -> list[str]:
    """The tasks, group members included, whose files set `unsafe_code`.  Loads none of them."""
    index = manager.task_index
    unsafe: list[str] = []

    def look(entry: Any, below: frozenset[str]) -> None:
        config = entry if isinstance(entry, Mapping) else {"task": entry}
        name: Any = config.get("task", config.get("group"))
        if config.get("unsafe_code"):
            unsafe.append(str(name))
        if isinstance(name, list):
            for child in name:
                look(child, below)
        elif name in index and name not in below:
            settings = index[name].cfg
            if isinstance(settings, Mapping) and settings.get("unsafe_code"):
                unsafe.append(name)
            if isinstance(settings, Mapping) and isinstance(settings.get("task"), list):
                look({"task": settings["task"]}, below | {name})
            for other, tagged in index.items():
                if name in tagged.tags and other != name:
                    look(other, below | {name})

    for name in names:
        look(name, frozenset())
    return sorted(set(unsafe))


def _evaluated(model: OutriderLM, task: str, manager: TaskManager, job: Job) -> dict[str, Any]:
    try:
        results = evaluator.simple_evaluate(
            model, tasks=[task], limit=job.limit, task_manager=manager, bootstrap_iters=0, apply_chat_template=job.chat
        )
    except (OSError, ConnectionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"can't load the data of task {task}: {first}; without a network, name a folder of task files and data "
            "with --include-path"
        ) from error
    assert results is not None, "one process, so this one has the results"
    return dict(results)


def _runs(pair: Sequence[tuple[dict[str, Any], OutriderLM]], job: Job) -> Iterator[TaskRun]:
    """One per task with samples.  The tasks of a group share its times."""
    (plain, plain_model), (drafted, drafted_model) = pair
    for task, samples in plain["samples"].items():
        others = drafted["samples"][task]
        filters = [sample["filter"] for sample in samples]
        first = [i for i, name in enumerate(filters) if name == filters[0]]
        answers = [[answer for i in first for each in run[i]["resps"] for answer in each] for run in (samples, others)]
        same = [_same(a, b) for a, b in zip(*answers, strict=True)]
        at = same.index(False) if False in same else None
        yield TaskRun(
            task, len(first), len(same), sum(same),
            None if at is None else {"number": at, "plain": answers[0][at], "drafted": answers[1][at]},
            tuple(_scores(task, plain, drafted, job.margin)),
            plain_model.seconds, drafted_model.seconds,
            drafted_model.tokens / drafted_model.steps if drafted_model.steps else None,
            dict(drafted_model.cuts.lost),
            any(_is_sampled(arguments) for i in first for arguments in samples[i]["arguments"]),
        )  # fmt: skip


def _is_sampled(arguments: Sequence[Any]) -> bool:
    """Whether a request's settings enable sampling; requests for log-likelihoods have no settings."""
    settings = arguments[1] if len(arguments) > 1 else None
    if not isinstance(settings, Mapping):
        return False
    kwargs: Mapping[str, Any] = normalize_gen_kwargs(dict(settings))
    return bool(kwargs["do_sample"] and kwargs.get("temperature"))


def _same(one: Any, other: Any) -> bool:
    """Texts must be equal, log-likelihoods equal up to rounding."""
    if isinstance(one, str):
        return bool(one == other)
    return bool(abs(float(one[0]) - float(other[0])) <= 1e-4 * max(1.0, abs(float(one[0]))) and one[1:] == other[1:])


def _scores(task: str, plain: dict[str, Any], drafted: dict[str, Any], margin: float) -> Iterator[Score]:
    for key, value in plain["results"][task].items():
        metric, _, name = key.partition(",")
        if not name or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        values = [
            [sample.get(metric) for sample in run["samples"][task] if sample["filter"] == name]
            for run in (plain, drafted)
        ]
        has_numbers = all(isinstance(value, int | float) for run in values for value in run) and len(values[0])
        span = max([1.0, *(abs(float(value)) for run in values for value in run)]) if has_numbers else 1.0
        judged = equivalence(values[1], values[0], margin * span, span=span) if has_numbers else None
        yield Score(key, float(value), float(drafted["results"][task][key]), judged)
