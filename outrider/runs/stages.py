"""The stages of a run file: prepare, train, calibrate and evaluate."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch

from outrider import machine
from outrider.checkpoint import MANIFEST, amend, load_model, manifest_of, whole
from outrider.config import located
from outrider.data.answers import regenerate
from outrider.data.answers.ledger import Ledger
from outrider.data.answers.store import Answer, answers_for, hold_out, iterate_answers
from outrider.data.overlap.hash_files import named
from outrider.data.sources import manifest
from outrider.data.sources.choosing import NOT_CHOSEN
from outrider.data.sources.conversations import Skipped
from outrider.diagnosis import run as diagnosis
from outrider.diagnosis.conditions import KEY as CONDITIONS
from outrider.drafters import trained, trains_target
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.generation import generate
from outrider.launcher import machines
from outrider.measure.row import training_of
from outrider.measure.tasks.names import Prompt, prompts
from outrider.measure.tasks.prompts import as_tokens
from outrider.nn.draft_model import DraftModel, FeatureSource
from outrider.plan.paper.hardware import Place
from outrider.processes import ALONE, Processes
from outrider.report.schema import Report
from outrider.runs import evaluation, readers
from outrider.runs import features as run_features
from outrider.runs import reporter as events
from outrider.runs.baselines import metrics_of
from outrider.runs.file import RunConfig, load
from outrider.runs.forecast import on_accelerator, training_plan
from outrider.runs.forecast.checks import Inputs, check
from outrider.runs.forecast.preview import Line, answers_bytes, preview, written_bytes
from outrider.runs.forecast.weights import why_weights
from outrider.runs.provenance import write_config, write_provenance
from outrider.runs.readers import Roles
from outrider.runs.reporter import Reporter
from outrider.runs.start import take_weights
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target, work_for_first
from outrider.targets.remote.served import RunTarget, ServedTarget, load_served
from outrider.training import trainer
from outrider.training.config import Config as TrainConfig
from outrider.training.fitting import calibrate as calibration
from outrider.training.parallel import distributed
from outrider.training.progress import resume
from outrider.training.progress.held_out import facts as held_out_facts

log = logging.getLogger(__name__)
NOT_SERVED = ("activations", "adapter", "compile", "device_map", "tensor_parallel")
"""Settings that apply only to a target with local weights."""
Stage = Literal["prepare", "train", "evaluate"]


def run(
    file: str | Path,
    overrides: Sequence[str] = (),
    *,
    stages: Sequence[Stage] | None = None,
    reporter: Reporter | None = None,
    force: bool = False,
) -> Report | None:
    """Prepare, train, calibrate and evaluate: all stages of a run file.  Each resumes where it was stopped.

    overrides: `key.path=value`, such as `train.lr=3e-4`.  stages: run only these, in their usual order.  reporter:
    receives plans, progress and results; see `outrider.runs.reporter`.  force: resume a training even if its settings
    changed.  Returns the report, or None if nothing is measured.
    Raises ConfigError, before weights are loaded, for anything wrong with the file and for a stage without a section.
    """
    parts = _parts(file, overrides)
    work_for_first(parts)
    with distributed.joined() if parts == 1 else nullcontext(ALONE) as processes:
        return _run(file, overrides, stages, reporter or Reporter(), force, processes)


def _parts(file: str | Path, overrides: Sequence[str]) -> int:
    """Processes that share the run's target."""
    with suppress(OutriderError):  # reported when the file is read again
        return load(file, overrides)[0].target.tensor_parallel
    return 1


def _run(
    file: str | Path, overrides: Sequence[str], stages: Sequence[Stage] | None, reporter: Reporter, force: bool,
    processes: Processes,
) -> Report | None:  # fmt: skip
    """Like `run`.  processes: those that share the work of every stage."""
    settings, chosen = _chosen(file, overrides, stages)
    with located(file, overrides):
        inputs = check(settings, chosen)
    if not processes.is_first:
        reporter = Reporter()
        logging.getLogger("outrider").setLevel(logging.ERROR)  # only the first process warns
    if "prepare" in chosen:
        reporter.writing(written_bytes(settings, inputs), settings.answers)
    if "evaluate" in chosen:
        evaluation.refuse_fuller(evaluation.of_run(settings))
    roles = readers.roles(settings, chosen, processes)
    target = target_of(settings, reporter, chosen, reads=roles is None or roles.trainers is None)
    if "prepare" in chosen:
        prepare(settings, target, reporter, inputs, processes)
    if "train" in chosen:
        train(settings, target, reporter, inputs, force, processes, roles)
    processes.gather(None)  # wait until the checkpoint is written and calibrated
    return evaluate(settings, target, reporter, inputs) if "evaluate" in chosen else None


def plan(
    file: str | Path, overrides: Sequence[str] = (), *, stages: Sequence[Stage] | None = None, measure: bool = False,
    place: Place | None = None,
) -> list[Line]:  # fmt: skip
    """What `run` will do, with all checks: counts, tokens, steps, memory, disk, time.  Writes nothing.

    measure: also measure two training steps; see `training_plan`.  place: accelerators to compute hours for.
    Raises the errors of `run`.
    """
    settings, chosen = _chosen(file, overrides, stages)
    with located(file, overrides):
        inputs = check(settings, chosen)
        measured = training_plan.lines(settings, inputs) if measure else []
        computed = on_accelerator.lines(settings, inputs, place) if place is not None else ()
        return [*preview(settings, chosen, inputs), *measured, *computed]


def _chosen(
    file: str | Path, overrides: Sequence[str], stages: Sequence[Stage] | None
) -> tuple[RunConfig, list[Stage]]:
    settings, _ = load(file, overrides)
    sections: dict[Stage, object] = {
        "prepare": settings.prepare,
        "train": settings.train,
        "evaluate": settings.evaluate,
    }
    for stage in stages or ():
        if sections[stage] is None:
            raise ConfigError(f"{file} has no `{stage}:` section; add one, at least `{stage}: {{}}`")
    chosen = [s for s, section in sections.items() if section is not None and (stages is None or s in stages)]
    return settings, chosen


def target_of(
    settings: RunConfig, reporter: Reporter, chosen: Sequence[Stage] | None = None, reads: bool = True
) -> Any:  # fmt: skip
    """Load the run's target, with the threads and number types that are fastest on this machine.

    chosen: the stages that use it; returns a `ServedTarget` if they need no weights or another process runs it.
    """
    section = settings.target
    machine.set_up_process()
    if section.tensor_parallel == 1 and section.device_map is None:
        section = section.model_copy(update={"device": distributed.device_of(section.device)})
    reporter.loading(section)
    why = "its weights are needed here" if chosen is None else why_weights(settings, chosen) if reads else None
    decodes = chosen is None or any(stage != "train" for stage in chosen)
    how = section.load_options() if decodes else section.model_dump(exclude={"name"})
    if why is None:
        target: Any = load_served(section.name, **{key: how[key] for key in how if key not in NOT_SERVED})
    else:
        target = load_target(section.name, **how)
    reporter.loaded(target)
    return target


def prepare(
    settings: RunConfig, target: RunTarget, reporter: Reporter, inputs: Inputs,
    processes: Processes = ALONE,
) -> events.Prepared | None:  # fmt: skip
    """Let the target answer the unanswered prompts; returns the result in the first process."""
    config, skipped, conversations = settings.prepare, inputs.skipped, inputs.conversations
    if machines() > 1 and config.regenerate and not config.servers:
        raise ConfigError(
            f"prepare runs on one machine, but a launcher started processes on {machines()}; prepare on one of them, "
            "or name servers in prepare.servers"
        )
    most = conversations.most_tokens
    plan = events.Preparing(
        total=len(conversations), done=regenerate.answered(settings.answers, conversations.prompt_hashes),
        tokens=most, size_bytes=answers_bytes(settings, inputs),
        usual_minutes=settings.usual_minutes.get("prepare"), conversations=config.label,
        folder=settings.answers,
        available=conversations.available, servers=config.servers,
        dropped={reason: count for reason, count in conversations.left_out.items() if reason != NOT_CHOSEN},
    )  # fmt: skip
    if processes.is_first:
        manifest.write(settings.answers, conversations)
    with reporter.working(plan) as update:
        tokens = 0

        def tell(done: int, answer: Answer) -> None:
            nonlocal tokens
            tokens += sum(end - start for start, end in answer.learn)
            update(done, tokens=tokens)

        path = regenerate.prepare(
            target, target.tokenizer, conversations, settings.answers, config, on_answer=tell, skipped=skipped,
            processes=processes, held_out=conversations.held_out_hashes,
        )  # fmt: skip
    prepared = _prepared(path, skipped) if processes.is_first else None
    if prepared is not None:
        reporter.finished(prepared)
    if settings.train is not None and settings.prepare.stores_states and trained(settings.drafter["kind"]):
        chosen = inputs.chosen(answers_for(settings.answers, target, target.tokenizer), settings)
        dtyped = processes.same(trainer.with_dtype(settings.train, settings.folder, target.device))
        run_features.fill(settings, dtyped, target, _model(settings, target), chosen, reporter)
        processes.gather(None)  # wait for all shards
    return prepared


def _prepared(path: Path, skipped: Skipped) -> events.Prepared:
    """The state of `prepare` from its file and its ledger."""
    answers = tokens = 0
    for answer in iterate_answers(path):
        answers += 1
        tokens += sum(end - start for start, end in answer.learn)
    with Ledger(path.parent) as ledger:
        counts, facts = ledger.counts(), ledger.facts()
        return events.Prepared(
            path=path, answers=answers, tokens=tokens, left_out=tuple(skipped.reasons), unstable=skipped.unstable,
            unanswered=counts["skipped"], others=answers - counts["answered"], failed=counts["failed"] + counts["open"],
            why_failed=tuple(ledger.reasons("failed")), by_server=ledger.servers(), **facts,
        )  # fmt: skip


def train(
    settings: RunConfig, target: RunTarget, reporter: Reporter, inputs: Inputs, force: bool = False,
    processes: Processes = ALONE, roles: Roles | None = None,
) -> Path:  # fmt: skip
    """Train on the answers to the run's prompts, and calibrate if the run file says so; returns the checkpoint.

    processes: those that train together; the first one writes and reports.  roles: if some read for the others.
    """
    assert settings.train is not None
    config = processes.same(trainer.with_dtype(settings.train, settings.folder, target.device))
    torch.manual_seed(config.seed)
    reference = load_model(config.reference, target) if config.reference is not None else None
    kind, model = settings.drafter["kind"], _model(settings, target)
    resume.changes(settings.folder / "checkpoint", model, config.model_dump(mode="json"), force)  # fails early
    if (origin := settings.drafter.get("from")) is not None:
        take_weights(model, origin, target)
    answers = inputs.chosen(answers_for(settings.answers, target, target.tokenizer), settings)
    learnt, held_out = hold_out(answers, config.held_out, inputs.openings, inputs.conversations.held_out_hashes)
    _fill_features(settings, config, target, model, answers, reporter, processes, roles)
    features = run_features.sourced(settings, config, target, model)
    source = features(learnt, named(settings.answers))
    if roles is not None:
        if roles.trainers is None:
            roles.serve(source, lambda: features(held_out))
            return settings.folder / "checkpoint"
        processes = roles.trainers
    config = trainer.with_steps(config, source)
    facts, weights = source.manifest, sum(weight.numel() for weight in model.parameters())
    about = {
        "texts": facts.texts, "tokens": facts.tokens, "taps": facts.taps, "parameters": weights,
        "data": manifest.read(settings.answers), "world_size": processes.count,
    }  # fmt: skip
    if processes.is_first:
        write_config(settings)
        write_provenance(settings.folder, settings.model_dump(mode="json"), about)
    usual = settings.usual_minutes.get("train")
    before, each = _steps_done(settings.folder / "checkpoint"), config.accumulate * facts.tokens / source.steps_per_pass
    plan = events.TrainingPlan(
        total=config.last_step, done=before, usual_minutes=usual, model=model, source=source,
        accumulate=config.accumulate, schedule=resume.joining(config, settings.folder),
    )  # fmt: skip
    with reporter.working(plan) as update, nullcontext() if roles is None else roles.link() as link:
        place = trainer.train(
            model, readers.sent(source, readers.LEARNT, link), config, settings.folder, reference=reference,
            origin=origin, force=force, processes=processes,
            probe=_probe(settings, target, inputs, lambda: readers.sent(features(held_out), readers.HELD_OUT, link)),
            on_step=lambda step, row: update(
                step, tokens=step * each, loss=row["loss"], tokens_per_step=row.get("expected_tokens_per_step"),
                mfu=row.get("mfu"), reading_s=source.reading_s,
            ),
        )  # fmt: skip
    if not processes.is_first:
        return place
    if trains_target(kind):
        model.save_target(evaluation.target_folder(settings))
    metrics = metrics_of(place)
    _settle(place, model, metrics)
    _record(place, settings, target, learnt, held_out)
    probed = next((row["probe_tokens_per_step"] for row in reversed(metrics) if "probe_tokens_per_step" in row), None)
    logged = next((tuple(row["acceptance"]) for row in reversed(metrics) if row.get("acceptance")), ())
    reporter.finished(events.Trained(place, training_of(manifest_of(place), metrics), logged, probed))
    if config.calibrate and settings.evaluate is not None and "calibration" not in manifest_of(place):
        assert not isinstance(target, ServedTarget)  # by `why_weights`
        # other prompts than the measured ones, if the task has enough
        task, seed = settings.evaluate.tasks[0], settings.evaluate.seed + 1
        calibrate(place, target, task, prompts(task, config.calibrate, seed), seed=seed, reporter=reporter)
    return place


def _settle(place: Path, model: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Apply to a checkpoint the settings derived from the measurement on held-out answers; its manifest has them."""
    manifest = manifest_of(place)
    measured = (row["held_out"] for row in metrics if row["step"] == manifest["training"]["step"] and "held_out" in row)
    facts = next(measured, None)
    if facts is not None and "held_out" not in manifest and (weights := model.settled(facts)):
        amend(place, weights, {"held_out": facts})


def _record(
    place: Path, settings: RunConfig, target: RunTarget, learnt: Sequence[Answer], held_out: Sequence[Answer]
) -> None:  # fmt: skip
    """Write what a drafter was trained with, and its acceptance on held-out answers, for `outrider diagnose`."""
    if isinstance(target, ServedTarget) or target.tokenizer is None or trains_target(settings.drafter["kind"]):
        return
    conditions = diagnosis.record(settings.prepare, load_model(place, target), target, learnt, held_out)
    amend(place, {}, {"training": manifest_of(place)["training"] | {CONDITIONS: conditions.as_json()}})


def _fill_features(
    settings: RunConfig, config: TrainConfig, target: RunTarget, model: DraftModel, answers: Sequence[Answer],
    reporter: Reporter, processes: Processes, roles: Roles | None,
) -> None:  # fmt: skip
    """`features.fill`, with ConfigErrors for what several processes can't train."""
    trainer.check_shared(model, config, processes.count if roles is None else roles.count)
    if processes.count > 1:
        kind = settings.drafter["kind"]
        if trains_target(kind):
            raise ConfigError(
                f"drafter {kind!r} trains the target itself, which needs a single process; start `outrider train` "
                "without a launcher"
            )
    run_features.fill(settings, config, target, model, answers, reporter)
    processes.gather(None)  # wait for all shards


def _model(settings: RunConfig, target: RunTarget) -> Any:
    """A new draft model for the run."""
    return trained(settings.drafter["kind"])(settings.drafter_config, target).to(target.device)


def _steps_done(checkpoint: Path) -> int:
    """Steps of an existing checkpoint; 0 without one."""
    return int(manifest_of(checkpoint)["training"]["step"]) if (whole(checkpoint) / MANIFEST).exists() else 0


def _probe(
    settings: RunConfig, target: RunTarget, inputs: Inputs, held_out: Callable[[], FeatureSource]
) -> Callable[[DraftModel], dict[str, Any]]:
    """A function that measures acceptance at the end of training, on held-out answers and on a few evaluation
    prompts."""
    chosen, prepare = settings.evaluate, settings.prepare
    drawn_at = (
        None if not prepare.regenerate else prepare.temperature if (prepare.top_p, prepare.top_k) == (1, 0) else 0.0
    )

    def probe(model: DraftModel) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        with suppress(DataError):  # no held-out answers, or all are too short
            facts["held_out"] = held_out_facts(model, held_out(), drawn_at, settings.train)
        if chosen is None or trains_target(settings.drafter["kind"]):
            return facts
        if isinstance(target, ServedTarget):
            log.warning("no prompt is measured at the end of training: %s is not loaded here", target.spec.name)
            return facts
        texts = [as_tokens(target, prompt) for prompt in inputs.drawn[chosen.tasks[0]].prompts[:4]]
        most = min(48, chosen.max_new_tokens)
        generations = generate(target, texts, model.drafter(), max_new_tokens=most, policy="fixed")
        tokens = sum(len(generation.tokens) for generation in generations)
        return facts | {"probe_tokens_per_step": tokens / sum(generation.steps for generation in generations)}

    return probe


def calibrate(
    drafter: str | Path, target: TransformersTarget, task: str, drawn: Iterable[Prompt], *, out: Path | None = None,
    max_new_tokens: int = 96, temperature: float = 1.0, shifting: bool = True, seed: int = 1, reporter: Reporter,
) -> calibration.Calibration:  # fmt: skip
    """Calibrate a drafter's confidences on prompts of a task; see `outrider.training.fitting.calibrate`."""
    checkpoint = out or Path(drafter)
    texts = [as_tokens(target, prompt) for prompt in drawn]
    most = len(texts) * max_new_tokens
    plan = events.Calibrating(total=len(texts), checkpoint=checkpoint, task=task, tokens=most, temperature=temperature)
    with reporter.working(plan) as update:
        outcome = calibration.calibrate(
            drafter, target, texts, out=out, max_new_tokens=max_new_tokens, temperature=temperature,
            shifting=shifting, seed=seed, on_prompt=update,
        )  # fmt: skip
    reporter.finished(events.Calibrated(checkpoint, outcome))
    return outcome


def evaluate(settings: RunConfig, target: TransformersTarget, reporter: Reporter, inputs: Inputs) -> Report | None:
    """Measure the run's drafter and its baselines; see `runs.evaluation`."""
    run_evaluation = evaluation.of_run(settings)
    if run_evaluation.target != settings.target:  # the target was trained
        reporter.loading(run_evaluation.target)
        target = load_target(run_evaluation.target.name, **run_evaluation.target.load_options())
        reporter.loaded(target)
    return evaluation.measure(run_evaluation, target, inputs.drawn, reporter)
