"""An evaluation: drafters measured on a target, in one process or several, into a folder where it goes on after a
stop."""

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
"""Settings that change no measurement of a prompt: with others of these, what was measured before is still used."""
COMPARED = ("max_new_tokens", "seed", "policy", "verification", "batch", "thinking", "min_first_ngrams")
"""Settings in which a report may not differ from the one that it replaces."""
REMEDY = (
    "add --overwrite, or evaluate.overwrite=true in a run file, to replace it, "
    "or choose another folder (--out, or name=)"
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Which drafters are measured on which target, and the folder of the results."""

    name: str
    target: TargetConfig
    drafters: tuple[Choice, ...]
    """The last is the run's own."""
    config: Config
    folder: Path
    written: Mapping[str, Any]
    """The settings as the report's provenance has them."""
    checkpoint: Path | None = None
    """Gets the figures of its drafter into its manifest."""
    usual_minutes: float | None = None


def of_run(settings: RunConfig) -> Evaluation:
    """The evaluation of a run file that has one: its baselines and its own drafter."""
    config, target = settings.evaluate, settings.target
    assert config is not None
    checkpoint = chosen(settings.folder) if settings.train is not None else None
    own = settings.drafter.get("from", settings.drafter) if checkpoint is None else str(checkpoint)
    if checkpoint is not None and trains_target(settings.drafter["kind"]):
        target = target.model_copy(update={"name": str(target_folder(settings)), "revision": None})
        own, checkpoint = settings.drafter, None
    return Evaluation(
        settings.name, target, (*config.baselines, own),
        config, settings.folder, settings.model_dump(mode="json"), checkpoint, settings.usual_minutes.get("evaluate"),
    )  # fmt: skip


def target_folder(settings: RunConfig) -> Path:
    """Where a run whose training changes the target saves it."""
    return settings.folder / "target"


def of_drafters(
    drafters: Sequence[str], config: Config, folder: Path | None = None, target: TargetConfig | None = None
) -> Evaluation:
    """The evaluation of drafters by name: kinds, folders of trained drafters, or their Hugging Face ids.

    target: the one that the trained drafters were made for unless given.  folder: in `runs/` unless given.  Raises
    ConfigError for a name that is not a drafter, and where the target is not known.
    """
    trained = [describe(name) for name in drafters if name not in kinds()]
    if target is None:
        names = dict.fromkeys(source.target for source in trained if source.target)
        if len(names) != 1:
            given = (
                f"these drafters are for {' and '.join(names)}" if names else f"{', '.join(drafters)} name no target"
            )
            raise ConfigError(f"{given}; name one with --target")
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
    """What `run` will do, with its checks.  Writes nothing and reads no weights."""
    refuse_fuller(evaluation)
    config, names = evaluation.config, [str(choice) for choice in evaluation.drafters]
    found = [Line("target", "name", evaluation.target.name), Line("evaluate", "drafters", ", ".join(names))]
    for task in config.tasks:
        drawn = draw(task, config)
        of = "" if drawn.count is None else f" of {drawn.count:,}"
        found.append(Line("evaluate", f"prompts of {task}", f"{min(config.prompts, len(drawn.prompts)):,}{of}"))
    found.append(Line("evaluate", "tokens to write, about", evaluation_tokens(config, len(names))))
    found.append(Line("evaluate", "results in", str(evaluation.folder)))
    return found


def run(evaluation: Evaluation, reporter: Reporter | None = None) -> Report | None:
    """Load the target, then as `measure`.  Everything wrong is reported before the target loads."""
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
    """Measure all drafters in one interleaved run; writes report.json and report.html.  Goes on where it was stopped.

    Where a launcher such as torchrun started several processes, each measures its share, and the first one writes the
    report; the others return None.  Raises DataError where a report of more than this would be replaced, and where
    another process writes into the folder.
    """
    config, folder = evaluation.config, evaluation.folder
    refuse_fuller(evaluation)
    shard = _shard(evaluation)
    _share_processors(shard)
    found = _load(evaluation, target, drawn, reporter)
    if shard.rank > 0:
        _measure_share(evaluation, target, drawn, found, shard)
        return None
    refuse_fuller(evaluation, list(found.drafters))
    folder.mkdir(parents=True, exist_ok=True)
    busy = DataError(f"another evaluation is writing to {folder}; wait until it ends, or choose another folder")
    with lock.held(folder, busy):
        done = Journal(folder, _facts(evaluation, target, found), again=config.overwrite)
        if done.changed:
            log.warning("all prompts are measured again, since this has changed: %s", "; ".join(done.changed[:4]))
        before = sum(_measured(done, drawn, config).values())
        plan = events.Evaluating(
            total=config.prompts * len(config.tasks), done=before, usual_minutes=evaluation.usual_minutes,
            tasks=config.tasks, drafters=tuple(found.drafters), prompts=config.prompts,
            tokens=evaluation_tokens(config, len(found.drafters)),
        )  # fmt: skip
        facts = {
            "drafters": list(found.drafters), "compiled": target.step.graph is not None, "processes": shard.count,
            "slow_baseline": _slow_baseline(evaluation, target),
        }  # fmt: skip
        provenance = write_provenance(folder, evaluation.written, facts)
        with reporter.working(plan) as update, _others(evaluation, shard) as on_wait:
            report = evaluate(
                target, found.drafters, config, provenance=provenance, training=found.training, overlaps=found.overlaps,
                drawn=drawn, on_prompt=lambda count, _, left_out: update(count, left_out=left_out, **_pace(done)),
                done=done, shard=shard, on_wait=on_wait,
            )  # fmt: skip
        with suppress(DataError):  # there is no earlier report, or none that this version can read
            report = with_losses(report, Report.load(folder))
        save(report, folder)
    if evaluation.checkpoint is not None:
        amend(evaluation.checkpoint, {}, {"report": report.brief(found.own)})
    reporter.finished(events.Evaluated(folder, report))
    return report


def _slow_baseline(evaluation: Evaluation, target: TransformersTarget) -> str | None:
    """Why the target alone is measured by slower steps than it has; None where it is not."""
    step = target.step
    if step.graph is None and evaluation.target.compile is False and (step.is_possible or step.is_on_disk):
        return "compiled steps are possible here (target.compile is no)"
    return None


def _shard(evaluation: Evaluation) -> Shard:
    """The part of this process.  Raises ConfigError for processes that each would need a whole target."""
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
    """Tokens that all drafters wrote so far, and tokens per step of the last one."""
    runs = [one.runs for record in done.records for one in record.prompts]
    last = [own[-1] for own in runs if own]
    steps = sum(run.steps for run in last)
    found = {"tokens": float(sum(len(run.tokens) for own in runs for run in own))}
    return found | ({"tokens_per_step": sum(len(run.tokens) for run in last) / steps} if steps else {})


def _measured(done: Journal, drawn: Mapping[str, PromptSet], config: Config) -> dict[str, int]:
    """Prompts of each task that were measured before."""
    known = {task: done.by_index(task_name(task), own.prompts).values() for task, own in drawn.items()}
    return {task: min(config.prompts, sum(record.left_out is None for record in own)) for task, own in known.items()}


def _facts(evaluation: Evaluation, target: TransformersTarget, found: Loaded) -> dict[str, Any]:
    """What the measurements of a prompt depend on."""
    spec, config = target.spec, evaluation.config
    return {
        "outrider": version("outrider"),
        "target": {
            "weights": spec.weights_hash or spec.name,
            "precision": spec.precision,
            "device": target.device.type,
        },
        "drafters": found.identities,
        "evaluate": config.model_dump(mode="json", exclude=NOT_TIMED),
        "machine": fingerprint(target, drafter_quantised=config.quantize),
    }


# ── a report that is there ────────────────────────────────────────────────────────────────────────────────────────────


def refuse_fuller(evaluation: Evaluation, drafters: Sequence[str] | None = None) -> None:
    """Raises DataError where the folder has a report of more than this one would have, or of other settings.

    drafters: labels of those that are measured, where they are known.
    """
    config, path = evaluation.config, evaluation.folder / "report.json"
    if config.overwrite or not path.exists():
        return
    try:
        old = Report.load(path)
    except DataError:  # a report of another version may not be lost either
        raise DataError(f"{path} can't be read by this version; {REMEDY}") from None
    reasons = []
    if lost := [
        task for task in dict.fromkeys(row.task for row in old.rows) if task not in map(task_name, config.tasks)
    ]:
        reasons.append(f"task {', '.join(lost)}")
    if (most := max((row.prompts for row in old.rows), default=0)) > config.prompts:
        reasons.append(f"{most} prompts per task, and this evaluation {config.prompts}")
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
    """Use as many threads as this process's part of the machine has."""
    if shard.count > 1 and not torch.distributed.is_initialized():  # or it is shared already
        torch.set_num_threads(max(1, torch.get_num_threads() // shard.count))


def _device(evaluation: Evaluation, shard: Shard) -> str | None:
    """The device of a process: GPUs are shared out where none is named."""
    count = torch.cuda.device_count()
    return f"cuda:{shard.rank % count}" if evaluation.target.device is None and count > 1 else evaluation.target.device


@contextmanager
def _others(evaluation: Evaluation, shard: Shard) -> Iterator[Callable[[], None]]:
    """The other processes, started and ended here unless a launcher started them.  Gives a check that they are
    alive."""
    if shard.count == 1 or launched() is not None:
        yield lambda: None
        return
    context = multiprocessing.get_context("spawn")
    shards = [Shard(rank, shard.count) for rank in range(1, shard.count)]
    started = [context.Process(target=_work, args=(evaluation, own, os.getpid()), daemon=True) for own in shards]
    for process in started:
        process.start()

    def check() -> None:
        for rank, process in enumerate(started, 1):
            if process.exitcode not in (None, 0):
                raise DataError(
                    f"process {rank} of {shard.count} ended with code {process.exitcode}; see its messages above, "
                    "and run "
                    "the same command again: it goes on from what was measured"
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
    """A further process: it measures its share, and ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's to report
    machine.set_up_process()
    _share_processors(shard)
    chosen = evaluation.target.load_options() | {"device": _device(evaluation, shard)}
    target = load_target(evaluation.target.name, **chosen)
    drawn = {task: draw(task, evaluation.config) for task in evaluation.config.tasks}
    found = _load(evaluation, target, drawn, Reporter())

    def end_with_parent(*_: int) -> None:
        if os.getppid() != parent:
            os._exit(1)

    _measure_share(evaluation, target, drawn, found, shard, end_with_parent)


def _measure_share(
    evaluation: Evaluation, target: TransformersTarget, drawn: Mapping[str, PromptSet], found: Loaded, shard: Shard,
    on_prompt: Callable[[int, int, int], None] | None = None,
) -> None:  # fmt: skip
    done = Journal(evaluation.folder, _facts(evaluation, target, found), shard.rank)
    entries = entries_of(found.drafters, evaluation.config, found.training)
    prompts = {task: own.prompts for task, own in drawn.items()}
    measure_share(target, entries, evaluation.config, prompts, on_prompt, done, shard)
