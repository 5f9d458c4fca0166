"""The stages of a run file, prepare, train, calibrate and evaluate, and all of them in order."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from outrider import machine
from outrider.checkpoint import amend, load_model, manifest_of
from outrider.data import conversations, regenerate
from outrider.data.answers import answers_for, read_answers
from outrider.data.features import LiveFeatures
from outrider.data.hash_files import named
from outrider.data.rendering import template_hash
from outrider.drafters import find
from outrider.errors import ConfigError, DataError
from outrider.generation import generate
from outrider.measure.run import as_tokens, draw
from outrider.measure.run import evaluate as measured
from outrider.measure.tasks import prompts
from outrider.nn.draft_model import DraftModel
from outrider.report.compare import with_losses
from outrider.report.page import save
from outrider.report.schema import Report
from outrider.runs import reporter as events
from outrider.runs.baselines import load_all
from outrider.runs.file import RunConfig, load
from outrider.runs.provenance import write_config, write_provenance
from outrider.runs.reporter import Reporter
from outrider.targets.load import load_target
from outrider.targets.transformers import TransformersTarget
from outrider.training import calibrate as calibration
from outrider.training import trainer

Stage = Literal["prepare", "train", "evaluate"]


def run(
    file: str | Path, overrides: Sequence[str] = (), *, stages: Sequence[Stage] | None = None, reporter: Reporter | None = None
) -> Report | None:
    """Prepare, train, calibrate and evaluate: all stages that a run file has; each goes on where it was stopped.

    overrides: `key.path=value`, such as `train.lr=3e-4`.  stages: these alone, in their order.  reporter: gets plans,
    progress and results; see `outrider.runs.reporter`.
    Returns the report, None where nothing is measured.
    Raises ConfigError for everything wrong with the file, before any weight loads, and for a named stage without a section.
    """
    settings, _ = load(file, overrides)
    reporter = reporter or Reporter()
    sections = {"prepare": settings.prepare, "train": settings.train, "evaluate": settings.evaluate}
    for stage in stages or ():
        if sections[stage] is None:
            raise ConfigError(f"{file} has no `{stage}:` section; add one, if only `{stage}: {{}}`")
    chosen = [stage for stage, section in sections.items() if section is not None and (stages is None or stage in stages)]
    target = target_of(settings, reporter)
    if "prepare" in chosen:
        prepare(settings, target, reporter)
    if "train" in chosen:
        train(settings, target, reporter)
    return evaluate(settings, target, reporter) if "evaluate" in chosen else None


def target_of(settings: RunConfig, reporter: Reporter) -> TransformersTarget:
    """The run's target, loaded, with the threads and types that are fastest on this machine."""
    chosen = settings.target
    machine.settle()
    reporter.loading(chosen)
    target = load_target(chosen.name, **chosen.model_dump(exclude={"name"}))
    reporter.loaded(target)
    return target


def prepare(settings: RunConfig, target: TransformersTarget, reporter: Reporter) -> events.Prepared:
    """Let the target answer the prompts that have no answer yet."""
    config, skipped = settings.prepare, conversations.Skipped()
    asked = list(conversations.read(config, skipped))
    most = len(asked) * (config.max_new_tokens if config.regenerate else config.length)
    plan = events.Preparing(
        total=len(asked), done=regenerate.answered(settings.answers, asked, config), tokens=most, size_bytes=6 * most,
        usual_minutes=settings.usual_minutes.get("prepare"), conversations=config.conversations, folder=settings.answers,
    )  # fmt: skip
    with reporter.working(plan) as update:
        path = regenerate.prepare(
            target, target.tokenizer, asked, settings.answers, config, on_answer=lambda done, _: update(done), skipped=skipped
        )
    answers = read_answers(path)
    hashes = {one.prompt_hash for one in regenerate.as_asked(asked, config)}
    found = events.Prepared(
        path=path, answers=len(answers), tokens=sum(end - start for answer in answers for start, end in answer.learn),
        left_out=tuple(skipped.reasons), unanswered=len(hashes - {answer.prompt_hash for answer in answers}),
        others=sum(answer.prompt_hash not in hashes for answer in answers),
    )  # fmt: skip
    reporter.finished(found)
    return found


def train(settings: RunConfig, target: TransformersTarget, reporter: Reporter) -> Path:
    """Train on the answers in the folder, and calibrate where the file asks for it; returns the checkpoint."""
    assert settings.train is not None
    config = trainer.with_dtype(settings.train, settings.folder, target.device)
    torch.manual_seed(config.seed)
    reference = load_model(config.reference, target) if config.reference is not None else None
    model: DraftModel = find(settings.drafter["kind"]).Model(settings.drafter_config, target).to(target.device)
    source = LiveFeatures(
        target, answers_for(settings.answers, target, target.tokenizer), model.taps, batch=config.batch,
        length=settings.prepare.length, seed=config.seed, dtype=config.dtype,
        template=template_hash(target.tokenizer), ngram_hashes=named(settings.answers),
    )  # fmt: skip
    facts, weights = source.manifest, sum(weight.numel() for weight in model.parameters())
    write_config(settings)
    write_provenance(settings, {"texts": facts.texts, "tokens": facts.tokens, "taps": facts.taps, "parameters": weights})
    usual = settings.usual_minutes.get("train")
    plan = events.Training(total=config.steps, usual_minutes=usual, model=model, source=source)
    with reporter.working(plan) as update:
        place = trainer.train(
            model, source, config, settings.folder, probe=_probe(settings, target), reference=reference,
            on_step=lambda step, row: update(step, loss=row["loss"], tokens_per_step=row.get("expected_tokens_per_step")),
        )  # fmt: skip
    reporter.finished(events.Trained(place))
    if config.calibrate and settings.evaluate is not None and "calibration" not in manifest_of(place):
        # other prompts than the measured ones, where the task has enough of them
        task, seed = settings.evaluate.tasks[0], settings.evaluate.seed + 1
        calibrate(place, target, task, config.calibrate, seed=seed, reporter=reporter)
    return place


def _probe(settings: RunConfig, target: TransformersTarget) -> Callable[[DraftModel], dict[str, float]] | None:
    """Real acceptance on a few prompts at the end of training, where the run file says which prompts."""
    chosen = settings.evaluate
    if chosen is None:
        return None

    def probe(model: DraftModel) -> dict[str, float]:
        texts = [as_tokens(target, prompt) for prompt in draw(chosen.tasks[0], chosen).prompts[:4]]
        found = generate(target, texts, model.drafter(), max_new_tokens=min(48, chosen.max_new_tokens), policy="fixed")
        return {"probe_tokens_per_step": sum(len(g.tokens) for g in found) / sum(g.steps for g in found)}

    return probe


def calibrate(
    checkpoint: Path, target: TransformersTarget, task: str, count: int, *, max_new_tokens: int = 96, temperature: float = 1.0,
    shifting: bool = True, seed: int = 1, reporter: Reporter,
) -> calibration.Calibration:  # fmt: skip
    """Scale a checkpoint's confidences on `count` prompts of a task; see `outrider.training.calibrate`."""
    texts = [as_tokens(target, prompt) for prompt in prompts(task, count, seed)]
    most = len(texts) * max_new_tokens
    plan = events.Calibrating(total=len(texts), checkpoint=checkpoint, task=task, tokens=most, temperature=temperature)
    with reporter.working(plan) as update:
        found = calibration.calibrate(
            checkpoint, target, texts, max_new_tokens=max_new_tokens, temperature=temperature, shifting=shifting, seed=seed,
            on_prompt=update,
        )  # fmt: skip
    reporter.finished(events.Calibrated(checkpoint, found))
    return found


def evaluate(settings: RunConfig, target: TransformersTarget, reporter: Reporter) -> Report:
    """Measure the run's drafter and its baselines in one interleaved run; writes report.json and report.html."""
    config = settings.evaluate
    assert config is not None
    drawn = {task: draw(task, config) for task in config.tasks}
    found = load_all(settings, target, drawn, reporter)
    drafters = len(found.drafters)
    texts = len(config.tasks) * config.prompts * (drafters + 2 * len(config.temperatures))
    traced = len(config.tasks) * min(config.traced_prompts, config.prompts) * (drafters + len(config.temperatures) - 1)
    plan = events.Evaluating(
        total=config.prompts * len(config.tasks), usual_minutes=settings.usual_minutes.get("evaluate"), tasks=config.tasks,
        drafters=tuple(found.drafters), prompts=config.prompts, tokens=(texts + traced) * config.max_new_tokens,
    )  # fmt: skip
    provenance = write_provenance(settings, {"drafters": list(found.drafters), "compiled": target.step.graph is not None})
    with reporter.working(plan) as update:
        report = measured(
            target, found.drafters, config, provenance=provenance, training=found.training, overlaps=found.overlaps,
            drawn=drawn, on_prompt=lambda done, _, left_out: update(done, left_out=left_out),
        )  # fmt: skip
    with suppress(DataError):  # there is no earlier report, or none that this version can read
        report = with_losses(report, Report.load(settings.folder))
    save(report, settings.folder)
    if settings.train is not None:
        amend(settings.folder / "checkpoint", {}, {"report": report.brief(found.own)})
    reporter.finished(events.Evaluated(settings.folder, report))
    return report
