"""An evaluation: measure drafters on a target, in one or several processes.  It can be stopped and resumed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from outrider import machine
from outrider.checkpoint import amend
from outrider.drafters import kinds, trains_target
from outrider.errors import ConfigError, DataError
from outrider.launcher import launched
from outrider.loading import describe
from outrider.measure.config import Config
from outrider.measure.fingerprint import fingerprint
from outrider.measure.journal import Journal, Shard
from outrider.measure.run import entries_of, evaluate, measure_share
from outrider.measure.tasks.names import PromptSet, task_name
from outrider.measure.tasks.prompts import draw
from outrider.report.compare import with_losses
from outrider.report.page import save
from outrider.report.schema import Report
from outrider.runs import reporter as events
from outrider.runs.baselines import Choice, Loaded, load_all
from outrider.runs.file import RunConfig, TargetConfig
from outrider.runs.forecast.preview import Line, evaluation_tokens
from outrider.runs.provenance import write_provenance
from outrider.runs.reporter import Reporter
from outrider.storage import lock
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target, work_for_first
from outrider.training.progress.checkpoints import chosen

log = logging.getLogger(__name__)

NOT_TIMED = {
    "tasks", "prompts", "baselines", "processes", "overwrite", "data", "revisions",
}  # fmt: skip
"""Settings that do not affect the measurement of a prompt; after a change, earlier measurements are still used."""
COMPARED = ("max_new_tokens", "seed", "policy", "verification", "batch", "thinking", "min_first_ngrams")
"""Settings that must be the same in a report and in the one that it replaces."""
REMEDY = (
    "add --overwrite, or evaluate.overwrite=true in a run file, to replace it, "
    "or choose another folder (--out, or name=)"
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The drafters and target of an evaluation, and the folder of the results."""

    name: str
    target: TargetConfig
    drafters: tuple[Choice, ...]
    """The last one is the run's own."""
    config: Config
    folder: Path
    written: Mapping[str, Any]
    """Settings for the report's provenance."""
    checkpoint: Path | None = None
    """Checkpoint whose manifest gets the results."""
    usual_minutes: float | None = None
    fine_tuned: str | None = None
    """The trained drafter that the run's own was fine-tuned from."""

    def before(self, loaded: Loaded) -> str | None:
        """The label of `fine_tuned`, if it is measured too."""
        if self.fine_tuned is None or self.fine_tuned not in self.drafters[:-1]:
            return None
        return list(loaded.drafters)[self.drafters.index(self.fine_tuned)]


def of_run(settings: RunConfig) -> Evaluation:
    """The evaluation of a run file: its baselines and its own drafter."""
    config, target = settings.evaluate, settings.target
    assert config is not None
    checkpoint = chosen(settings.folder) if settings.train is not None else None
    drafter = settings.drafter.get("from", settings.drafter) if checkpoint is None else str(checkpoint)
    if checkpoint is not None and trains_target(settings.drafter["kind"]):
        target = target.model_copy(update={"name": str(target_folder(settings)), "revision": None})
        drafter, checkpoint = settings.drafter, None
    return Evaluation(
        settings.name, target, (*config.baselines, drafter),
        config, settings.folder, settings.model_dump(mode="json"), checkpoint, settings.usual_minutes.get("evaluate"),
        None if checkpoint is None else settings.drafter.get("from"),
    )  # fmt: skip


def target_folder(settings: RunConfig) -> Path:
    """Where a run that trains its target saves the target."""
    return settings.folder / "target"


def of_drafters(
    drafters: Sequence[str], config: Config, folder: Path | None = None, target: TargetConfig | None = None
) -> Evaluation:
    """The evaluation of drafters by name: kinds, folders of trained drafters, or their Hugging Face ids.

    target: by default the one that the trained drafters were made for.  folder: by default in `runs/`.  Raises
    ConfigError for a name that is not a drafter, and if the target is unknown.
    """
    trained = [describe(name) for name in drafters if name not in kinds()]
    if target is None:
        names = dict.fromkeys(source.target for source in trained if source.target)
        if len(names) != 1:
            problem = (
                f"these drafters are for {' and '.join(names)}" if names else f"{', '.join(drafters)} name no target"
            )
            raise ConfigError(f"{problem}; name one with --target")
        target = TargetConfig(name=next(iter(names)) or "")
    labels = "-".join(dict.fromkeys(name if name in kinds() else describe(name).kind for name in drafters))
    written = {
        "target": target.model_dump(mode="json"),
        "drafters": list(drafters),
        "evaluate": config.model_dump(mode="json"),
    }
    return Evaluation(
        f"evaluate-{labels}", target, tuple(drafters), config, folder or Path("runs", f"evaluate-{labels}"), written
    )


def plan(evaluation: Evaluation) -> list[Line]:
    """What `run` will do, with all checks.  Writes nothing and reads no weights."""
    refuse_fuller(evaluation)
    config, names = evaluation.config, [str(choice) for choice in evaluation.drafters]
    lines = [Line("target", "name", evaluation.target.name), Line("evaluate", "drafters", ", ".join(names))]
    for task in config.tasks:
        drawn = draw(task, config)
        of = "" if drawn.count is None else f" of {drawn.count:,}"
        lines.append(Line("evaluate", f"prompts of {task}", f"{min(config.prompts, len(drawn.prompts)):,}{of}"))
    lines.append(Line("evaluate", "tokens to generate, about", evaluation_tokens(config, len(names))))
    lines.append(Line("evaluate", "results in", str(evaluation.folder)))
    return lines


def run(evaluation: Evaluation, reporter: Reporter | None = None) -> Report | None:
    """Load the target and call `measure`.  All problems are reported before the target loads."""
    work_for_first(evaluation.target.tensor_parallel)
    refuse_fuller(evaluation)
    drawn = {task: draw(task, evaluation.config) for task in evaluation.config.tasks}
    reporter = reporter or Reporter()
    machine.set_up_process()
    reporter.loading(evaluation.target)
    target = load_target(evaluation.target.name, **evaluation.target.load_options())
    reporter.loaded(target)
    return measure(evaluation, target, drawn, reporter)


def measure(
    evaluation: Evaluation, target: TransformersTarget, drawn: Mapping[str, PromptSet], reporter: Reporter
) -> Report | None:
    """Measure all drafters in one interleaved run; writes report.json and report.html.  Resumes after a stop.

    With several processes of a launcher such as torchrun, each measures its share and the first one writes the report;
    the others return None.  Raises DataError if a larger report would be replaced, or if another process writes to the
    folder.
    """
    config, folder = evaluation.config, evaluation.folder
    refuse_fuller(evaluation)
    shard = _shard(evaluation)
    _share_processors(shard)
    loaded = _load(evaluation, target, drawn, reporter)
    if shard.rank > 0:
        _measure_share(evaluation, target, drawn, loaded, shard)
        return None
    refuse_fuller(evaluation, list(loaded.drafters))
    folder.mkdir(parents=True, exist_ok=True)
    busy = DataError(f"another evaluation is writing to {folder}; wait until it ends, or choose another folder")
    with lock.held(folder, busy):
        done = Journal(folder, _facts(evaluation, target, loaded), again=config.overwrite)
        if done.changed:
            log.warning("all prompts are measured again because of changes: %s", "; ".join(done.changed[:4]))
        before = sum(_measured(done, drawn, config).values())
        plan = events.Evaluating(
            total=config.prompts * len(config.tasks), done=before, usual_minutes=evaluation.usual_minutes,
            tasks=config.tasks, drafters=tuple(loaded.drafters), prompts=config.prompts,
            tokens=evaluation_tokens(config, len(loaded.drafters)),
        )  # fmt: skip
        facts = {
            "drafters": list(loaded.drafters), "compiled": target.step.graph is not None, "processes": shard.count,
            "slow_baseline": _slow_baseline(evaluation, target),
        }  # fmt: skip
        provenance = write_provenance(folder, evaluation.written, facts)
        with reporter.working(plan) as update, _others(evaluation, shard) as on_wait:
            report = evaluate(
                target, loaded.drafters, config, provenance=provenance, training=loaded.training,
                overlaps=loaded.overlaps, drawn=drawn,
                on_prompt=lambda count, _, left_out: update(count, left_out=left_out, **_pace(done)),
                done=done, shard=shard, on_wait=on_wait,
            )  # fmt: skip
        with suppress(DataError):  # no earlier report, or not readable by this version
            report = with_losses(report, Report.load(folder))
        save(report, folder)
    if evaluation.checkpoint is not None:
        amend(evaluation.checkpoint, {}, {"report": report.brief(loaded.own)})
    reporter.finished(events.Evaluated(folder, report, evaluation.before(loaded)))
    return report


def _slow_baseline(evaluation: Evaluation, target: TransformersTarget) -> str | None:
    """Why the baseline uses slower steps than possible; None if it does not."""
    step = target.step
    if step.graph is None and evaluation.target.compile is False and (step.is_possible or step.is_on_disk):
        return "compiled steps are possible here (target.compile is no)"
    return None


def _shard(evaluation: Evaluation) -> Shard:
    """This process's share of the work.  Raises ConfigError for several processes with a split target."""
    count, parts = evaluation.config.processes, evaluation.target.tensor_parallel
    if parts == 1:
        return Shard(*(launched() or (0, count)))
    if count > 1:
        raise ConfigError(
            f"evaluate.processes {count} would load the target {count} times, and target.tensor_parallel {parts} "
            "shares out one; set one of them to 1"
        )
    return Shard()


def _load(
    evaluation: Evaluation, target: TransformersTarget, drawn: Mapping[str, PromptSet], reporter: Reporter
) -> Loaded:
    config = evaluation.config
    return load_all(
        evaluation.drafters, target, drawn, reporter, evaluation.name, config.quantize, evaluation.target.compile
    )


def _pace(done: Journal) -> dict[str, float]:
    """Tokens generated by all drafters so far, and tokens per step of the last one."""
    by_prompt = [prompt.runs for record in done.records for prompt in record.prompts]
    last = [runs[-1] for runs in by_prompt if runs]
    steps = sum(run.steps for run in last)
    pace = {"tokens": float(sum(len(run.tokens) for runs in by_prompt for run in runs))}
    return pace | ({"tokens_per_step": sum(len(run.tokens) for run in last) / steps} if steps else {})


def _measured(done: Journal, drawn: Mapping[str, PromptSet], config: Config) -> dict[str, int]:
    """Prompts of each task that are already measured."""
    records = {task: done.by_index(task_name(task), prompts.prompts).values() for task, prompts in drawn.items()}
    return {
        task: min(config.prompts, sum(record.left_out is None for record in of_task))
        for task, of_task in records.items()
    }


def _facts(evaluation: Evaluation, target: TransformersTarget, loaded: Loaded) -> dict[str, Any]:
    """Everything that the measurement of a prompt depends on."""
    spec, config = target.spec, evaluation.config
    return {
        "outrider": version("outrider"),
        "target": {
            "weights": spec.weights_hash or spec.name,
            "precision": spec.precision,
            "device": target.device.type,
        },
        "drafters": loaded.identities,
        "evaluate": config.model_dump(mode="json", exclude=NOT_TIMED),
        "machine": fingerprint(target, drafter_quantised=config.quantize),
    }


# ── an existing report ────────────────────────────────────────────────────────────────────────────────────────────────


def refuse_fuller(evaluation: Evaluation, drafters: Sequence[str] | None = None) -> None:
    """Raises DataError if the folder has a larger report, or one with other settings.

    drafters: labels of the measured drafters, if known.
    """
    config, path = evaluation.config, evaluation.folder / "report.json"
    if config.overwrite or not path.exists():
        return
    try:
        old = Report.load(path)
    except DataError:  # a report from another version must not be lost either
        raise DataError(f"{path} can't be read by this version; {REMEDY}") from None
    reasons = []
    if lost := [
        task for task in dict.fromkeys(row.task for row in old.rows) if task not in map(task_name, config.tasks)
    ]:
        reasons.append(f"task {', '.join(lost)}")
    if (most := max((row.prompts for row in old.rows), default=0)) > config.prompts:
        reasons.append(f"{most} prompts per task, but this evaluation has {config.prompts}")
    if lost := sorted({f"{row.temperature:g}" for row in old.rows if row.temperature not in config.temperatures}):
        reasons.append(f"temperature {', '.join(lost)}")
    if lost := [name for name in dict.fromkeys(row.drafter for row in old.rows) if name not in (drafters or [name])]:
        reasons.append(f"drafter {', '.join(lost)}")
    before = (old.provenance.get("config") or {}).get("evaluate") or {}
    now = config.model_dump(mode="json")
    for key in COMPARED:
        if key in before and before[key] != now[key]:
            reasons.append(f"{key} {json.dumps(before[key])}, and this evaluation {json.dumps(now[key])}")
    if reasons:
        raise DataError(f"{path} has {'; '.join(reasons)}; {REMEDY}")


# ── several processes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _share_processors(shard: Shard) -> None:
    """Use this process's share of the machine's threads."""
    if shard.count > 1 and not torch.distributed.is_initialized():  # otherwise already done
        torch.set_num_threads(max(1, torch.get_num_threads() // shard.count))


def _device(evaluation: Evaluation, shard: Shard) -> str | None:
    """The device of a process; by default GPUs are assigned round-robin."""
    count = torch.cuda.device_count()
    return f"cuda:{shard.rank % count}" if evaluation.target.device is None and count > 1 else evaluation.target.device


@contextmanager
def _others(evaluation: Evaluation, shard: Shard) -> Iterator[Callable[[], None]]:
    """Start and end the other processes, unless a launcher did.  Yields a function that checks that they are alive."""
    if shard.count == 1 or launched() is not None:
        yield lambda: None
        return
    context = multiprocessing.get_context("spawn")
    shards = [Shard(rank, shard.count) for rank in range(1, shard.count)]
    started = [
        context.Process(target=_work, args=(evaluation, shard_of_process, os.getpid()), daemon=True)
        for shard_of_process in shards
    ]
    for process in started:
        process.start()

    def check() -> None:
        for rank, process in enumerate(started, 1):
            if process.exitcode not in (None, 0):
                raise DataError(
                    f"process {rank} of {shard.count} exited with code {process.exitcode}; see its messages above, "
                    "and rerun the same command to resume"
                )

    try:
        yield check
        for process in started:
            process.join(timeout=5)
    finally:
        _end(started)


def _end(started: Sequence[BaseProcess]) -> None:
    for process in started:
        process.terminate()
        process.join()


def _work(evaluation: Evaluation, shard: Shard, parent: int) -> None:
    """Another process: measures its share, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports Ctrl-C
    machine.set_up_process()
    _share_processors(shard)
    chosen = evaluation.target.load_options() | {"device": _device(evaluation, shard)}
    target = load_target(evaluation.target.name, **chosen)
    drawn = {task: draw(task, evaluation.config) for task in evaluation.config.tasks}
    loaded = _load(evaluation, target, drawn, Reporter())

    def end_with_parent(*_: int) -> None:
        if os.getppid() != parent:
            os._exit(1)

    _measure_share(evaluation, target, drawn, loaded, shard, end_with_parent)


def _measure_share(
    evaluation: Evaluation, target: TransformersTarget, drawn: Mapping[str, PromptSet], loaded: Loaded, shard: Shard,
    on_prompt: Callable[[int, int, int], None] | None = None,
) -> None:  # fmt: skip
    done = Journal(evaluation.folder, _facts(evaluation, target, loaded), shard.rank)
    entries = entries_of(loaded.drafters, evaluation.config, loaded.training)
    prompts = {task: prompt_set.prompts for task, prompt_set in drawn.items()}
    measure_share(target, entries, evaluation.config, prompts, on_prompt, done, shard)
