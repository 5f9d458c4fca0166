"""The stages of a run file: prepare, train, calibrate, evaluate, and all of them in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
import yaml
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, Overrides, Recipe, SkipBad, bar, counted, place_of_json, quiet, sized, write_json
from outrider.errors import ConfigError, DataError

if TYPE_CHECKING:
    from outrider.decoding.protocols import Drafter
    from outrider.measure.row import Overlaps
    from outrider.measure.run import Drawn
    from outrider.nn.draft_model import DraftModel
    from outrider.report.schema import Training
    from outrider.run import RunConfig
    from outrider.targets.transformers import TransformersTarget


def run(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None, skip_bad: SkipBad = False) -> None:
    """Prepare, train and evaluate: all stages that the run file has."""
    place_of_json(json_to)
    settings = _load(recipe, overrides, skip_bad)
    target = _target(settings)
    _prepare(settings, target)
    if settings.train is not None:
        _train(settings, target)
    if settings.evaluate is not None:
        _evaluate(settings, target, json_to)


def prepare(recipe: Recipe, overrides: Overrides = None, skip_bad: SkipBad = False) -> None:
    """Let the target answer the prompts; goes on where it was stopped."""
    settings = _load(recipe, overrides, skip_bad)
    _prepare(settings, _target(settings))


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train the drafter on the target's answers; goes on where it was stopped."""
    settings = _load(recipe, overrides)
    if settings.train is None:
        raise ConfigError(f"{recipe} has no `train:` section; add one, if only `train: {{}}`")
    _train(settings, _target(settings))


def calibrate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a drafter with a confidence head.", show_default=False)],
    prompts: Annotated[str, typer.Option(help="`stdlib`, or a file of prompts; none that it was trained on.")] = "stdlib",
    count: Annotated[int, typer.Option(min=2, help="Prompts; every second one is kept apart to judge on.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    target: Annotated[str | None, typer.Option(help="Where the target is, if not where it was in training.")] = None,
    shifts: Annotated[bool, typer.Option("--shifts/--no-shifts", help="Shift logits too, or scale them alone.")] = True,
    json_to: JsonTo = None,
) -> None:
    """Make confidences mean what they say: scale them by what was kept on held-out prompts, and say how far off they were."""
    quiet()
    place_of_json(json_to)
    from outrider.checkpoint import manifest_of
    from outrider.targets.transformers import load_target

    loaded = load_target(target or manifest_of(checkpoint)["target"]["name"])
    found = _calibrate(checkpoint, loaded, prompts, count, max_new_tokens, temperature, shifts)
    write_json(json_to, found)


def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of prompt sets, in place of the hub.")] = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run written code, walled in, where a task is scored by its tests.")
    ] = False,
    json_to: JsonTo = None,
) -> None:
    """Measure the trained drafter, and those beside it, against the target alone."""
    place_of_json(json_to)
    # as YAML text: a folder may be called null, or 2024
    said = [f"evaluate.data={yaml.safe_dump(str(data))}"] if data is not None else []
    said += ["evaluate.allow_code_execution=true", "evaluate.score=true"] if allow_code_execution else []
    settings = _load(recipe, [*(overrides or []), *said])
    if settings.evaluate is None:
        raise ConfigError(f"{recipe} has no `evaluate:` section; add one, if only `evaluate: {{}}`")
    _evaluate(settings, _target(settings), json_to)


def _load(recipe: Path, overrides: list[str] | None, skip_bad: bool = False) -> RunConfig:
    quiet()
    from outrider.run import load

    settings, _ = load(recipe, [*(overrides or []), *(["prepare.skip_bad=true"] if skip_bad else [])])
    return settings


def _target(settings: RunConfig) -> TransformersTarget:
    from outrider import machine
    from outrider.targets.transformers import default_device, load_target

    chosen = settings.target
    machine.settle()
    console.out.print(f"machine   {machine.describe(default_device(chosen.device))}", highlight=False, soft_wrap=True)
    target = load_target(
        chosen.name,
        device=chosen.device,
        dtype=chosen.dtype,
        quantize=chosen.quantize,
        revision=chosen.revision,
        trust_remote_code=chosen.trust_remote_code,
        compile=said(chosen.compile),
    )
    spec = target.spec
    console.out.print(
        f"target    {spec.name}: {spec.layers} layers x {spec.hidden}, {counted(target.model.num_parameters())} parameters, "
        f"{spec.precision} on {target.device}",
        highlight=False,
    )
    return target


def said(compile: bool | None) -> bool | None:
    """The choice as it is; what takes a minute is said before."""
    if compile:
        console.note.print(
            "compiling the step: about a minute, once; two the first time on a machine", style="dim", highlight=False
        )
    return compile


def compile_drafter(drafter: Any) -> None:
    """Have a drafter's own passes compiled, where it has such; it works without."""
    from outrider.compiled import NotCompiled, compile_passes

    try:
        compile_passes(drafter)
    except NotCompiled as reason:
        console.note.print(f"the drafter stays plain: {reason}", style="dim", markup=False, highlight=False)


def _prepare(settings: RunConfig, target: TransformersTarget) -> None:
    from outrider.data import conversations, regenerate
    from outrider.data.answers import read_answers
    from outrider.data.sources import Skipped

    config, skipped = settings.prepare, Skipped()
    asked = list(conversations.read(config, skipped))
    there = regenerate.answered(settings.answers, asked, config)
    most = len(asked) * (config.max_new_tokens if config.regenerate else config.length)
    console.out.print(
        f"prepare   {len(asked)} prompts from {config.conversations}, {there} answered before; at most {counted(most)} tokens "
        f"to write, {sized(most * 6)} in {settings.answers}",
        highlight=False,
    )
    with bar("answers", len(asked), there, usual_minutes=settings.usual_minutes.get("prepare")) as update:
        path = regenerate.prepare(
            target, target.tokenizer, asked, settings.answers, config, on_answer=lambda done, _: update(done), skipped=skipped
        )
    if skipped:
        console.out.print(f"          {len(skipped)} rows left out; the first: {skipped.reasons[0]}", highlight=False)
    answers = read_answers(path)
    learnt = sum(end - start for answer in answers for start, end in answer.learn)
    console.out.print(f"          {len(answers)} answers, {counted(learnt)} tokens to learn, in {path}", highlight=False)
    hashes = {one.prompt_hash for one in regenerate.as_asked(asked, config)}
    if lost := len(hashes - {answer.prompt_hash for answer in answers}):
        console.out.print(
            f"          {lost} prompts without an answer: refused by the template, no room for an answer, or none given",
            highlight=False,
        )
    if others := sum(answer.prompt_hash not in hashes for answer in answers):
        console.out.print(
            f"          {others} answers to prompts that are not asked here (edited since, or another run's); they train too: "
            "name another prepare.folder to leave them out",
            highlight=False,
            soft_wrap=True,
        )


def _train(settings: RunConfig, target: TransformersTarget) -> None:
    """Train on the answers that are there."""
    import torch

    from outrider.checkpoint import load_model, manifest_of
    from outrider.data.answers import answers_for
    from outrider.data.features import LiveFeatures
    from outrider.data.hash_files import named
    from outrider.data.rendering import template_hash
    from outrider.drafters import find
    from outrider.run import write_config, write_provenance
    from outrider.training.trainer import settled
    from outrider.training.trainer import train as fit

    kind = settings.drafter["kind"]
    assert settings.train is not None
    config = settled(settings.train, settings.folder, target.device)
    module = find(kind)
    if not hasattr(module, "Model"):
        raise ConfigError(f"drafter {kind!r} has nothing to train; leave the `train:` section out")
    torch.manual_seed(config.seed)
    reference = load_model(config.reference, target) if config.reference is not None else None
    model = module.Model(settings.drafter_config, target).to(target.device)
    source = LiveFeatures(
        target, answers_for(settings.answers, target, target.tokenizer), model.taps, batch=config.batch,
        length=settings.prepare.length, seed=config.seed, dtype=config.dtype, template=template_hash(target.tokenizer),
        grams=named(settings.answers),
    )  # fmt: skip
    facts = source.manifest
    weights = sum(p.numel() for p in model.parameters())
    passes = config.steps / source.steps_per_pass
    kept = f"in {sized(source.bytes)} of memory" if source.keeps else "live"
    write_config(settings)
    write_provenance(settings, {"texts": facts.texts, "tokens": facts.tokens, "taps": facts.taps, "parameters": weights})
    console.out.print(
        f"train     {kind}: {counted(weights)} parameters, taps {list(model.taps)}; {config.steps} steps of {config.batch} "
        f"texts, {passes:.1f} passes over {counted(facts.tokens)} tokens; features {kept}, 0 bytes of disk; "
        f"checkpoint {sized(weights * 12)}",
        highlight=False,
    )
    with bar("steps", config.steps, is_steady=True, usual_minutes=settings.usual_minutes.get("train")) as update:

        def show(step: int, found: Any) -> None:
            reached = found.get("expected_tokens_per_step")
            update(step, f"loss {found['loss']:.3f}, expected {reached:.2f} tokens per step" if reached else None)

        place = fit(model, source, config, settings.folder, on_step=show, probe=_probe(settings, target), reference=reference)
    console.out.print(f"          checkpoint in {place}", highlight=False)
    if config.calibrate and settings.evaluate is not None and "calibration" not in manifest_of(place):
        # other prompts than those that are measured, where the task has enough of them
        _calibrate(place, target, settings.evaluate.tasks[0], config.calibrate, seed=settings.evaluate.seed + 1)


@console.started_anew("calibration")
def _calibrate(
    place: Path, target: TransformersTarget, task: str, count: int, max_new_tokens: int = 96, temperature: float = 1.0,
    shifts: bool = True, seed: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Calibrate a checkpoint's confidences and print what it was worth."""
    from dataclasses import asdict

    from outrider.measure.run import as_tokens
    from outrider.measure.tasks import prompts
    from outrider.training.calibrate import calibrate as fit

    texts = [as_tokens(target, prompt) for prompt in prompts(task, count, seed)]
    console.out.print(
        f"calibrate {place}: {len(texts)} prompts of {task}, at most {counted(len(texts) * max_new_tokens)} tokens to write at "
        f"temperature {temperature:g}",
        highlight=False,
    )
    with bar("prompts", len(texts)) as update:
        found = fit(
            place, target, texts, max_new_tokens=max_new_tokens, temperature=temperature, shifting=shifts, seed=seed,
            on_prompt=update,
        )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for column in ("slot", "error before", "after", "of which noise", "temperature", "shift"):
        table.add_column(column, justify="right")
    errors = list(zip(found.before, found.after, found.noise, strict=True))
    said = [f"{100 * sum(column) / len(errors):.1f} %" for column in zip(*errors, strict=True)]
    for slot, own in enumerate(errors):
        scaled = (f"{found.temperatures[slot]:.2f}", f"{found.shifts[slot]:.2f}")
        table.add_row(str(slot), *(f"{100 * error:.1f} %" for error in own), *scaled)
    table.add_row("mean", *said, "", "")
    console.out.print(table)
    console.out.print(
        f"          scaled on {found.drafts[0]} drafts of {found.prompts[0]} prompts, judged on {found.drafts[1]} of "
        f"{found.prompts[1]} others; error of each slot's survival, {found.bins} bins",
        highlight=False,
        soft_wrap=True,
    )
    return asdict(found)


def _probe(settings: RunConfig, target: TransformersTarget) -> Callable[[DraftModel], dict[str, float]] | None:
    """Real acceptance on a few prompts at the end of training, where the run file says which prompts."""
    from outrider.generation import generate
    from outrider.measure.run import as_tokens, draw

    chosen = settings.evaluate
    if chosen is None:
        return None

    def probe(model: DraftModel) -> dict[str, float]:
        texts = [as_tokens(target, prompt) for prompt in draw(chosen.tasks[0], chosen).prompts[:4]]
        found = generate(target, texts, model.drafter(), max_new_tokens=min(48, chosen.max_new_tokens))
        return {"probe_tokens_per_step": sum(len(g.tokens) for g in found) / sum(g.steps for g in found)}

    return probe


def _evaluate(settings: RunConfig, target: TransformersTarget, json_to: str | None) -> None:
    from outrider.checkpoint import amend
    from outrider.measure.run import draw
    from outrider.measure.run import evaluate as judge
    from outrider.report.schema import Report
    from outrider.run import write_provenance

    config = settings.evaluate
    assert config is not None
    drawn = {task: draw(task, config) for task in config.tasks}
    riders = _riders(settings, target, drawn)
    made = len(config.tasks) * config.prompts * config.max_new_tokens
    watched = len(config.tasks) * min(config.observed, config.prompts) * config.max_new_tokens
    rounds = len(riders.drafters) + 2 + 2 * (len(config.temperatures) - 1)
    console.out.print(
        f"evaluate  {', '.join(riders.drafters)}: {config.prompts} prompts per task of {', '.join(config.tasks)}; about "
        f"{counted(made * rounds + watched * (len(riders.drafters) + len(config.temperatures) - 1))} tokens to write, one "
        "interleaved run",
        highlight=False,
    )
    facts = write_provenance(settings, {"drafters": list(riders.drafters), "compiled": target.step.graph is not None})
    usual, count = settings.usual_minutes.get("evaluate"), config.prompts * len(config.tasks)
    with console.started_anew("evaluation"), bar("prompts", count, usual_minutes=usual) as update:
        report = judge(
            target, riders.drafters, config, provenance=facts, training=riders.training, overlaps=riders.overlaps, drawn=drawn,
            on_prompt=lambda kept, _, left_out: update(kept, f"{left_out} left out"),
        )  # fmt: skip
    if (settings.folder / "report.json").exists():
        with suppress(DataError):  # a report that this version can't read says nothing of what a precision lost
            report = report.beside(Report.load(settings.folder))
    report.save(settings.folder)
    if settings.train is not None:
        amend(settings.folder / "checkpoint", {}, {"report": report.brief(riders.own)})
    console.out.print(report.table())
    console.out.print(f"          {report.headline()}", highlight=False, soft_wrap=True, markup=False)
    tried = sum({row.task: row.prompts for row in report.rows}.values()) + len(report.left_out)
    console.out.print(
        f"          {len(report.left_out)} of {tried} prompts left out, {report.left_out_because}",
        highlight=False,
    )
    console.out.print(f"          {settings.folder / 'report.json'}, {settings.folder / 'report.html'}", highlight=False)
    write_json(json_to, json.loads((settings.folder / "report.json").read_text()))


class Riders(NamedTuple):
    """The drafters that are measured together, by label."""

    drafters: dict[str, Drafter]
    training: dict[str, Training]
    """What their training said, of those that were trained."""
    overlaps: dict[str, Overlaps]
    own: str
    """Label of the run's own."""


def _riders(settings: RunConfig, target: TransformersTarget, drawn: Mapping[str, Drawn]) -> Riders:
    """Load the run's drafter and those beside it, and see which prompts each has seen before."""
    from outrider.checkpoint import load_drafter, manifest_of, trained_on
    from outrider.measure.row import training_of

    config = settings.evaluate
    assert config is not None
    drafters, training = {}, {}
    overlaps: dict[str, Overlaps] = {}
    own_choice = str(settings.folder / "checkpoint") if settings.train is not None else settings.drafter
    for choice in (*config.beside, own_choice):
        name, own = (choice, {}) if isinstance(choice, str) else _parted(choice)
        if choice is own_choice and config.quantize:
            own["quantize"] = config.quantize
        drafter = load_drafter(name, target, **own)
        if settings.target.compile:
            compile_drafter(drafter)
        is_checkpoint = isinstance(choice, str) and Path(name).exists()
        label = manifest_of(name)["kind"] if is_checkpoint else name
        if label in drafters:  # a second one of its kind
            said = ", ".join(f"{key}={value}" for key, value in own.items())
            label = (
                name if is_checkpoint else f"{label} of {settings.name}" if choice is settings.drafter else f"{label} ({said})"
            )
        drafters[label] = drafter
        overlaps |= _overlaps(label, choice, drawn)
        if is_checkpoint:
            manifest = manifest_of(name)
            found = training_of(manifest, _metrics(Path(name).parent))
            training[label] = found.model_copy(update={"precision": trained_on(manifest, target)})
    return Riders(drafters, training, overlaps, label)


def _overlaps(name: str, choice: str | dict[str, Any], drawn: Mapping[str, Drawn]) -> dict[str, Overlaps]:
    """Which prompts stand in what a drafter was trained on, or draws from; {} for one that has no texts of its own."""
    from outrider.data.contamination import check
    from outrider.data.origins import sources_of
    from outrider.measure.row import Overlaps
    from outrider.measure.tasks import task_name

    sources = sources_of(choice)
    if not sources:
        return {}
    prompts = {task_name(task): own.prompts for task, own in drawn.items()}
    found = check(prompts, sources)
    console.out.print(f"overlap   {name}: {found.line()}", highlight=False, soft_wrap=True, markup=False)
    return {name: Overlaps(found.overlaps(prompts), found.rule)}


def _parted(drafter: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Its kind, and its settings."""
    return drafter["kind"], {key: value for key, value in drafter.items() if key != "kind"}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
