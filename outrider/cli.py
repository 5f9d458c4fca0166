"""The command line: one verb per stage.  Heavy modules load inside the verbs, so `--help` is instant."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from outrider.errors import ConfigError, DataError, OutriderError, TargetError

if TYPE_CHECKING:
    from outrider.nn.draft_model import DraftModel
    from outrider.run import RunConfig
    from outrider.targets.transformers import TransformersTarget

app = typer.Typer(
    name="outrider",
    help="Speculative decoding, the whole road: prepare, train, evaluate, decode.  The output is the target's own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
note = Console(stderr=True)

Recipe = Annotated[Path, typer.Argument(help="Run file (YAML).", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, such as train.lr=3e-4", show_default=False)]
JsonTo = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - is standard output.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count rows that can't be read instead of stopping at the first.")]


def main() -> None:
    """Entry point: errors of ours are one sentence and an exit code, not a traceback."""
    try:
        code = app(standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into a code that it returns
            raise KeyboardInterrupt
        if isinstance(code, int) and code:
            raise SystemExit(code)
    except OutriderError as error:
        _fail(str(error))
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except OSError as error:
        _fail(f"{error}; what was written before is kept")
        raise SystemExit(1) from None
    except (KeyboardInterrupt, typer.Abort):
        note.print("\nstopped; what was done is kept, the same command goes on from there")
        raise SystemExit(130) from None
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # wrong use of the command line
            error.show()
            raise SystemExit(error.exit_code) from None
        raise


# ── stages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def run(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None, skip_bad: SkipBad = False) -> None:
    """Prepare, train and evaluate: all stages that the run file has."""
    _place_of_json(json_to)
    settings = _load(recipe, overrides, skip_bad)
    target = _target(settings)
    _prepare(settings, target)
    if settings.train is not None:
        _train(settings, target)
    if settings.evaluate is not None:
        _evaluate(settings, target, json_to)


@app.command()
def prepare(recipe: Recipe, overrides: Overrides = None, skip_bad: SkipBad = False) -> None:
    """Let the target answer the prompts; goes on where it was stopped."""
    settings = _load(recipe, overrides, skip_bad)
    _prepare(settings, _target(settings))


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train the drafter on the target's answers; goes on where it was stopped."""
    settings = _load(recipe, overrides)
    if settings.train is None:
        raise ConfigError(f"{recipe} has no `train:` section; add one, if only `train: {{}}`")
    _train(settings, _target(settings))


@app.command()
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
    _quiet()
    _place_of_json(json_to)
    from outrider.targets.transformers import load_target
    from outrider.train.checkpoint import manifest_of

    loaded = load_target(target or manifest_of(checkpoint)["target"]["name"])
    found = _calibrate(checkpoint, loaded, prompts, count, max_new_tokens, temperature, shifts)
    _write_json(json_to, found)


@app.command()
def evaluate(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None) -> None:
    """Measure the trained drafter, and those beside it, against the target alone."""
    _place_of_json(json_to)
    settings = _load(recipe, overrides)
    if settings.evaluate is None:
        raise ConfigError(f"{recipe} has no `evaluate:` section; add one, if only `evaluate: {{}}`")
    _evaluate(settings, _target(settings), json_to)


def _load(recipe: Path, overrides: list[str] | None, skip_bad: bool = False) -> RunConfig:
    _quiet()
    from outrider.run import load

    settings, _ = load(recipe, [*(overrides or []), *(["prepare.skip_bad=true"] if skip_bad else [])])
    return settings


def _target(settings: RunConfig) -> TransformersTarget:
    from outrider.targets.transformers import load_target

    chosen = settings.target
    target = load_target(
        chosen.name,
        device=chosen.device,
        dtype=chosen.dtype,
        quantize=chosen.quantize,
        revision=chosen.revision,
        trust_remote_code=chosen.trust_remote_code,
        compile=_said(chosen.compile),
    )
    spec = target.spec
    out.print(
        f"target    {spec.name}: {spec.layers} layers x {spec.hidden}, {_count(target.model.num_parameters())} parameters, "
        f"{spec.precision} on {target.device}",
        highlight=False,
    )
    return target


def _said(compile: bool | None) -> bool | None:
    """The choice as it is; what takes a minute is said before."""
    if compile:
        note.print("compiling the step: about a minute, once", style="dim", highlight=False)
    return compile


def _compile(drafter: Any) -> None:
    """Have a drafter's own passes compiled, where it has such; it works without."""
    from torch import nn

    from outrider.compiled import NotCompiled

    # a module's method of that name is torch's and does something else
    if not hasattr(drafter, "compile") or isinstance(drafter, nn.Module):
        return
    try:
        drafter.compile()
    except NotCompiled as reason:
        note.print(f"the drafter stays plain: {reason}", style="dim", markup=False, highlight=False)


def _prepare(settings: RunConfig, target: TransformersTarget) -> None:
    from outrider.prepare import conversations, regenerate

    config, skipped = settings.prepare, conversations.Skipped()
    asked = list(conversations.read(config, skipped))
    if skipped:
        out.print(f"prepare   {len(skipped)} rows left out; the first: {skipped.reasons[0]}", highlight=False, soft_wrap=True)
    there = len(regenerate.repair(settings.answers / regenerate.ANSWERS))
    most = len(asked) * (config.max_new_tokens if config.regenerate else config.length)
    out.print(
        f"prepare   {len(asked)} prompts from {config.conversations}, {there} answered before; at most {_count(most)} tokens "
        f"to write, {_size(most * 6)} in {settings.answers}",
        highlight=False,
    )
    with _bar("answers", len(asked), there) as update:
        path = regenerate.prepare(
            target, target.tokenizer, asked, settings.answers, config, on_answer=lambda done, _: update(done)
        )
    answers = regenerate.read_answers(path)
    learnt = sum(end - start for answer in answers for start, end in answer.learn)
    out.print(f"          {len(answers)} answers, {_count(learnt)} tokens to learn, in {path}", highlight=False)
    lost = {conversation.id for conversation in asked} - {answer.id for answer in answers}
    if lost:
        out.print(f"          {len(lost)} prompts left out: no room for an answer, or none given", highlight=False)


def _train(settings: RunConfig, target: TransformersTarget) -> None:
    """Train on the answers that are there."""
    import torch

    from outrider.drafters import find
    from outrider.prepare.conversations import template_hash
    from outrider.prepare.features import LiveFeatures
    from outrider.prepare.regenerate import ANSWERS, read_answers
    from outrider.run import write_config, write_provenance
    from outrider.train.checkpoint import load_model, manifest_of
    from outrider.train.trainer import train as fit

    config, kind = settings.train, settings.drafter["kind"]
    assert config is not None
    module = find(kind)
    if not hasattr(module, "Model"):
        raise ConfigError(f"drafter {kind!r} has nothing to train; leave the `train:` section out")
    torch.manual_seed(config.seed)
    reference = load_model(config.reference, target) if config.reference is not None else None
    model = module.Model(settings.drafter_config, target).to(target.device)
    source = LiveFeatures(
        target, read_answers(settings.answers / ANSWERS), model.taps, batch=config.batch, length=settings.prepare.length,
        seed=config.seed, dtype=config.dtype, template=template_hash(target.tokenizer),
    )  # fmt: skip
    facts = source.manifest
    weights = sum(p.numel() for p in model.parameters())
    passes = config.steps / source.steps_per_pass
    kept = f"in {_size(source.bytes)} of memory" if source.keeps else "live"
    write_config(settings)
    write_provenance(settings, {"texts": facts.texts, "tokens": facts.tokens, "taps": facts.taps, "parameters": weights})
    out.print(
        f"train     {kind}: {_count(weights)} parameters, taps {list(model.taps)}; {config.steps} steps of {config.batch} "
        f"texts, {passes:.1f} passes over {_count(facts.tokens)} tokens; features {kept}, 0 bytes of disk; "
        f"checkpoint {_size(weights * 12)}",
        highlight=False,
    )
    with _bar("steps", config.steps) as update:

        def show(step: int, found: Any) -> None:
            reached = found.get("expected_tokens_per_step")
            update(step, f"loss {found['loss']:.3f}, expected {reached:.2f} tokens per step" if reached else None)

        place = fit(model, source, config, settings.folder, on_step=show, probe=_probe(settings, target), reference=reference)
    out.print(f"          checkpoint in {place}", highlight=False)
    if config.calibrate and settings.evaluate is not None and "calibration" not in manifest_of(place):
        # other prompts than those that are measured, where the task has enough of them
        _calibrate(place, target, settings.evaluate.tasks[0], config.calibrate, seed=settings.evaluate.seed + 1)


def _calibrate(
    place: Path, target: TransformersTarget, task: str, count: int, max_new_tokens: int = 96, temperature: float = 1.0,
    shifts: bool = True, seed: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Calibrate a checkpoint's confidences and print what it was worth."""
    from dataclasses import asdict

    from outrider.evaluate.measure import as_tokens
    from outrider.evaluate.tasks import prompts
    from outrider.train.calibrate import calibrate as fit

    texts = [as_tokens(target, prompt) for prompt in prompts(task, count, seed)]
    out.print(
        f"calibrate {place}: {len(texts)} prompts of {task}, at most {_count(len(texts) * max_new_tokens)} tokens to write at "
        f"temperature {temperature:g}",
        highlight=False,
    )
    with _bar("prompts", len(texts)) as update:
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
    out.print(table)
    out.print(
        f"          scaled on {found.drafts[0]} drafts of {found.prompts[0]} prompts, judged on {found.drafts[1]} of "
        f"{found.prompts[1]} others; error of each slot's survival, {found.bins} bins",
        highlight=False,
        soft_wrap=True,
    )
    return asdict(found)


def _probe(settings: RunConfig, target: TransformersTarget) -> Callable[[DraftModel], dict[str, float]] | None:
    """Real acceptance on a few prompts at the end of training, where the run file says which prompts."""
    from outrider.decoding.generate import generate
    from outrider.evaluate.measure import as_tokens
    from outrider.evaluate.tasks import prompts

    chosen = settings.evaluate
    if chosen is None:
        return None

    def probe(model: DraftModel) -> dict[str, float]:
        texts = [as_tokens(target, prompt) for prompt in prompts(chosen.tasks[0], 4, chosen.seed)]
        found = generate(target, texts, model.drafter(), max_new_tokens=min(48, chosen.max_new_tokens))
        return {"probe_tokens_per_step": sum(len(g.tokens) for g in found) / sum(g.steps for g in found)}

    return probe


def _evaluate(settings: RunConfig, target: TransformersTarget, json_to: str | None) -> None:
    from outrider.evaluate.measure import evaluate as judge
    from outrider.evaluate.measure import training_of
    from outrider.evaluate.report import Report
    from outrider.run import write_provenance
    from outrider.train.checkpoint import load_drafter, manifest_of, trained_on

    config, mine = settings.evaluate, settings.folder / "checkpoint"
    assert config is not None
    drafters, training = {}, {}
    own_choice = str(mine) if settings.train is not None else settings.drafter
    for choice in (*config.beside, own_choice):
        name, own = (choice, {}) if isinstance(choice, str) else _parted(choice)
        if choice is own_choice and config.quantize:
            own["quantize"] = config.quantize
        drafter = load_drafter(name, target, **own)
        if settings.target.compile:
            _compile(drafter)
        is_checkpoint = isinstance(choice, str) and Path(name).exists()
        label = manifest_of(name)["kind"] if is_checkpoint else name
        if label in drafters:  # a second one of its kind
            said = ", ".join(f"{key}={value}" for key, value in own.items())
            label = (
                name if is_checkpoint else f"{label} of {settings.name}" if choice is settings.drafter else f"{label} ({said})"
            )
        drafters[label] = drafter
        if is_checkpoint:
            found = training_of(manifest_of(name), _metrics(Path(name).parent))
            training[label] = found | {"precision": trained_on(manifest_of(name), target)}
    made = len(config.tasks) * config.prompts * config.max_new_tokens
    out.print(
        f"evaluate  {', '.join(drafters)}: {config.prompts} prompts per task of {', '.join(config.tasks)}; about "
        f"{_count(made * (len(drafters) + 2 + 2 * (len(config.temperatures) - 1)))} tokens to write, one interleaved run",
        highlight=False,
    )
    facts = write_provenance(settings, {"drafters": list(drafters), "compiled": bool(target.step.graphs)})
    with _bar("prompts", config.prompts * len(config.tasks)) as update:
        report = judge(
            target, drafters, config, provenance=facts, training=training,
            on_prompt=lambda kept, _, left_out: update(kept, f"{left_out} left out: their text loops"),
        )  # fmt: skip
    if target.spec.quantised and (settings.folder / "report.json").exists():
        report = report.beside(Report.load(settings.folder))
    report.save(settings.folder)
    out.print(report.table())
    out.print(f"          {report.headline()}", highlight=False, soft_wrap=True)
    tried = sum(row.prompts for row in report.rows[:1]) + len(report.left_out)
    out.print(
        f"          {len(report.left_out)} of {tried} prompts left out, because the target's own text loops there",
        highlight=False,
    )
    out.print(f"          {settings.folder / 'report.json'}, {settings.folder / 'report.html'}", highlight=False)
    _write_json(json_to, json.loads((settings.folder / "report.json").read_text()))


def _parted(drafter: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Its kind, and its settings."""
    return drafter["kind"], {key: value for key, value in drafter.items() if key != "kind"}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ── one prompt ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def decode(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; standard input where it is left out or -.")] = None,
    target: Annotated[str, typer.Option(help="`demo`, a folder, or a Hugging Face id.")] = "demo",
    drafter: Annotated[str | None, typer.Option(help="Kind, or checkpoint folder; none decodes plainly.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the drafter, key=value; may be given several times.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    quantize: Annotated[str | None, typer.Option(help="int8: round the target's weights; a drafter's by --set.")] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the steps, or stay plain; unless said, what is on disk is taken."),
    ] = None,
) -> None:
    """Stream a continuation; tokens that were drafted and kept are underlined green, the target's own are plain."""
    _quiet()
    from outrider.config import override
    from outrider.decoding.generate import stream
    from outrider.decoding.sampling import Sampling
    from outrider.targets.transformers import load_target
    from outrider.train.checkpoint import load_drafter

    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise DataError("the prompt is empty; give it as an argument or on standard input")
    if settings and not drafter:
        raise ConfigError(f"--set {settings[0]} is a setting of no drafter; name one with --drafter")
    loaded = load_target(target, quantize=quantize, compile=_said(compile))
    rider = load_drafter(drafter, loaded, **override({}, settings or ())) if drafter else None
    if compile and rider is not None:
        _compile(rider)
    steps = tokens = 0
    colour = out.is_terminal and not out.no_color
    if colour:
        out.print(text, end="", style="dim", markup=False, highlight=False)
    pieces = stream(
        loaded, [[{"role": "user", "content": text}]] if chat else text, rider, max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, seed), stop=stop or (),
    )  # fmt: skip
    for piece in pieces:
        steps, tokens = steps + 1, tokens + len(piece.tokens)
        if not colour:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            continue
        drafted = loaded.decode(piece.tokens[: piece.drafted])
        at = len(drafted) if piece.text.startswith(drafted) else 0
        out.print(piece.text[:at], end="", style="green underline", markup=False, highlight=False)
        out.print(piece.text[at:], end="", markup=False, highlight=False)
    sys.stdout.write("\n")
    note.print(f"{tokens} tokens in {steps} steps, {tokens / max(1, steps):.2f} tokens per step", style="dim", highlight=False)


# ── looking ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def show(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None) -> None:
    """Print a run file with everything resolved, and where each value came from."""
    _quiet()
    from outrider.config import flatten
    from outrider.run import load

    settings, origins = load(recipe, overrides or [])
    values = flatten(settings.model_dump(mode="json"))
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("setting", "value", "from"):
            table.add_column(column, overflow="fold")
        for key, value in values.items():
            table.add_row(key, json.dumps(value), origins[key], style="" if origins[key] != "default" else "dim")
        out.print(table)
    _write_json(json_to, {key: {"value": value, "from": origins[key]} for key, value in values.items()})


@app.command()
def drafters(json_to: JsonTo = None) -> None:
    """List the drafters there are, own and of other distributions."""
    _quiet()
    found = drafter_list()
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("kind", "trains", "taps", "summary"):
            table.add_column(column)
        for entry in found:
            table.add_row(entry["kind"], "yes" if entry["trains"] else "no", "yes" if entry["taps"] else "no", entry["summary"])
        out.print(table)
    _write_json(json_to, found)


def drafter_list() -> list[dict[str, Any]]:
    """[{kind, summary, trains, taps}], by kind."""
    from outrider.drafters import find, kinds

    found = []
    for kind in sorted(kinds()):
        module = find(kind)
        summary = (module.__doc__ or "").strip().splitlines()[0]
        found.append(
            {"kind": kind, "summary": summary, "trains": hasattr(module, "Model"), "taps": "taps" in module.Config.model_fields}
        )
    return found


@app.command()
def doctor(json_to: JsonTo = None) -> None:
    """Say what this machine can do, and what to install for more."""
    _quiet()
    checks = examine()
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("what", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for check in checks:
            table.add_row(check["what"], check["found"], check["advice"], style="" if check["ok"] else "yellow")
        out.print(table)
    _write_json(json_to, checks)


def examine() -> list[dict[str, Any]]:
    """What this machine has: [{what, found, ok, advice}]."""
    import platform
    import shutil
    from importlib.util import find_spec

    import torch

    from outrider import compiled, demo
    from outrider.run import version_of

    checks: list[dict[str, Any]] = []

    def add(what: str, found: object, ok: bool = True, advice: str = "") -> None:
        checks.append({"what": what, "found": str(found), "ok": ok, "advice": "" if ok else advice})

    add("python", platform.python_version(), sys.version_info >= (3, 11), "use Python 3.11 or later")
    for package in ("outrider", "torch", "transformers", "datasets", "safetensors"):
        add(package, version_of(package) or "missing", version_of(package) is not None, f"pip install {package}")
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    add("accelerator", ", ".join(devices) or "none", True)
    add("cpu threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    add("dtypes", ", ".join(_dtypes("cuda" if cuda else "cpu")))
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    add(
        "compiler",
        compiler or "none",
        compiler is not None,
        "install g++ for compiled steps, which take about half the time of plain ones on a CPU; all else runs without",
    )
    packages = [path.stat().st_size for path in compiled.folder().glob("[!.]*.pt2")]
    add("compiled steps", f"{len(packages)} packages, {_size(sum(packages))} in {compiled.folder()}")
    for extra, module, gain in (
        ("tensorboard", "tensorboard", "training curves beside metrics.jsonl"),
        ("accelerate", "accelerate", "device_map and quantised targets"),
        ("quantize", "torchao", "targets and drafters with int8 weights"),
        ("grammar", "llguidance", "output that fits a JSON schema, a regex or a grammar"),
        ("corpus", "pydivsufsort", "building corpora to draft from"),
    ):
        there = find_spec(module) is not None
        add(f"extra {extra}", "installed" if there else "not installed", there, f"pip install 'outrider[{extra}]' for {gain}")
    shipped = (demo.TARGET / "config.json").exists() and (demo.SMALL_MODEL / "config.json").exists()
    add("demo models", demo.TARGET.parent if shipped else "missing", shipped, "install Outrider from a wheel or a full clone")
    try:
        pieces = sum(1 for _ in demo.modules("train"))
        add("library source", f"{pieces} modules to take prompts from")
    except DataError as error:
        add("library source", "missing", False, str(error))
    return checks


def _dtypes(device: str) -> Iterator[str]:
    import torch

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        try:
            torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
        except RuntimeError:
            continue
        yield str(dtype).removeprefix("torch.")


# ── corpora ────────────────────────────────────────────────────────────────────────────────────────────────────────────

corpus = typer.Typer(help="Texts to draft from: add, list, remove, stats, verify.", no_args_is_help=True)
app.add_typer(corpus, name="corpus")

CorpusName = Annotated[str, typer.Argument(help="Name of the corpus.", show_default=False)]
CorpusFolder = Annotated[
    Path | None, typer.Option("--folder", help="Where corpora are; $OUTRIDER_CORPORA or ~/.local/share/outrider/corpora.")
]


@corpus.command("add")
def corpus_add(
    name: CorpusName,
    files: Annotated[list[Path], typer.Argument(help="Text, .jsonl with a `text` a row, or folders.", show_default=False)],
    target: Annotated[str, typer.Option(help="Whose tokenizer: `demo`, a folder, or a Hugging Face id.")] = "demo",
    folder: CorpusFolder = None,
    skip_binary: Annotated[bool, typer.Option("--skip-binary", help="Leave files out that are not UTF-8 text.")] = False,
) -> None:
    """Make a corpus of texts, in the place of one of that name."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    _quiet()
    from outrider.retrieval import corpora, suffix_array
    from outrider.targets.transformers import hash_tokenizer

    path = corpora.place(name, folder)
    skipped: list[Path] | None = [] if skip_binary else None
    paths = corpora.readable(corpora.files_of(files), skipped)
    characters = sum(file.stat().st_size for file in paths)
    if not characters:
        raise DataError(f"nothing to read in {', '.join(map(str, files))}; name files with text")
    tokenizer = _tokenizer_of(target)
    _foretell(name, path, paths, characters, tokenizer)
    used: dict[str, int] = {}
    began = time.perf_counter()
    with _bar("characters", characters) as update, _untouched(name):

        def documents() -> Iterator[list[int]]:
            done = 0
            for batch in _batches(corpora.texts(paths), 1 << 20):
                used.update((str(text.file.absolute()), text.file.stat().st_size) for text in batch)
                yield from _encoded(tokenizer, [text.text for text in batch])
                done += sum(len(text.text) for text in batch)
                update(min(done, characters))

        made = suffix_array.build(
            path, documents(), vocabulary=_ids(tokenizer), tokenizer_hash=hash_tokenizer(tokenizer),
            sources=used.items(), on_stage=lambda stage, tokens: update(characters, f"{stage} {_count(tokens)} tokens"),
        )  # fmt: skip
    header = made.header
    left_out = f", {len(skipped)} files left out, not UTF-8 text" if skipped else ""
    out.print(
        f"          {_count(header['documents'])} documents, {_count(header['tokens'])} tokens in "
        f"{time.perf_counter() - began:.0f} s{left_out}; {_size(corpora.size_of(path))} in {path}",
        highlight=False,
        soft_wrap=True,
    )


@corpus.command("list")
def corpus_list(folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """List the corpora there are."""
    from outrider.retrieval import corpora

    _place_of_json(json_to)
    found = [_corpus_row(name, folder) for name in corpora.names(folder)]
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("corpus", "documents", "tokens", "size", "tokenizer", "made", ""):
            table.add_column(column, justify="right" if column in ("documents", "tokens", "size") else "left", overflow="fold")
        for row in found:
            if row["error"] is None:
                sizes = [_count(row["documents"]), _count(row["tokens"]), _size(row["size_bytes"])]
                table.add_row(row["name"], *sizes, row["tokenizer_hash"], row["made"][:10], "")
            else:
                table.add_row(row["name"], "", "", "", "", "", row["error"], style="yellow")
        out.print(table if found else f"no corpora in {folder or corpora.home()}; make one: outrider corpus add NAME FILES")
    _write_json(json_to, found)


def _corpus_row(name: str, folder: Path | None) -> dict[str, Any]:
    """What `corpus list` says of one; `error` where it can't be opened."""
    from outrider.retrieval import corpora
    from outrider.retrieval.suffix_array import Corpus

    path = corpora.place(name, folder)
    try:
        header = Corpus.open(path).header
    except DataError as error:
        return {"name": name, "error": str(error)}
    facts = {key: header[key] for key in ("documents", "tokens", "vocabulary", "tokenizer_hash", "made")}
    return {"name": name, "error": None, **facts, "size_bytes": corpora.size_of(path), "folder": str(path)}


@corpus.command("stats")
def corpus_stats(name: CorpusName, folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """Say what a corpus holds, and which files it was made of."""
    from outrider.retrieval import corpora
    from outrider.retrieval.suffix_array import Corpus

    _place_of_json(json_to)
    path = corpora.find(name, folder)
    Corpus.open(path)
    row, sources = _corpus_row(name, folder), corpora.sources(path)
    if json_to != "-":
        for key in ("documents", "tokens", "vocabulary", "tokenizer_hash", "made", "folder"):
            out.print(f"{key.removesuffix('_hash'):<12}{row[key]}", highlight=False, soft_wrap=True)
        out.print(f"{'size':<12}{_size(row['size_bytes'])}", highlight=False)
        out.print(f"{'files':<12}{len(sources)}, {_size(sum(size for _, size in sources))}; the largest:", highlight=False)
        for source, size in sorted(sources, key=lambda source: -source[1])[:10]:
            out.print(f"{'':<12}{_size(size):>9}  {source}", highlight=False, markup=False, soft_wrap=True)
    _write_json(json_to, row | {"sources": [{"name": source, "size_bytes": size} for source, size in sources]})


@corpus.command("remove")
def corpus_remove(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Delete a corpus."""
    from outrider.retrieval import corpora

    out.print(f"removed {name}, {_size(corpora.remove(name, folder))}", highlight=False)


@corpus.command("verify")
def corpus_verify(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Read a whole corpus and compare it with its checksums."""
    from outrider.retrieval import corpora
    from outrider.retrieval.suffix_array import verify

    path = corpora.find(name, folder)
    with _bar("bytes", corpora.size_of(path)) as update:
        done = verify(path, update)
    out.print(f"{name} is as it was built: {_size(done)} read, every checksum holds", highlight=False)


@contextmanager
def _untouched(name: str) -> Iterator[None]:
    """Ctrl-C says that a build which was stopped leaves nothing."""
    try:
        yield
    except KeyboardInterrupt:
        note.print(f"\nstopped; of corpus {name} nothing was changed", highlight=False)
        raise SystemExit(130) from None


def _tokenizer_of(target: str) -> Any:
    """A target's tokenizer, without its weights."""
    from transformers import AutoTokenizer

    from outrider import demo

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(demo.TARGET) if target == "demo" else target)
        # where there are no files, transformers makes up a tokenizer of special tokens alone
        reason = "" if len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens) else "its vocabulary is empty"
    except (OSError, ValueError, KeyError) as error:
        tokenizer, reason = None, str(error).strip().splitlines()[0]
    if reason:
        raise TargetError(
            f"can't load the tokenizer of {target!r}: {reason}; give `demo`, a folder with a tokenizer, or a Hugging Face id "
            "(which needs the network the first time)"
        )
    return tokenizer


def _foretell(name: str, path: Path, files: list[Path], characters: int, tokenizer: Any) -> None:
    """Say how big a corpus becomes and how long it takes, by its first texts; refuse what has no room."""
    from itertools import islice

    from outrider.retrieval import corpora

    _encoded(tokenizer, ["warm"])
    began = time.perf_counter()
    sample = [text.text[: 1 << 16] for text in islice(corpora.texts(files), 16)]
    tokens = sum(map(len, _encoded(tokenizer, sample)))
    rate = (time.perf_counter() - began) / max(1, sum(map(len, sample)))
    tokens = int(characters * tokens / max(1, sum(map(len, sample))))
    token_bytes = 2 if _ids(tokenizer) < 1 << 16 else 4
    needed = tokens * (token_bytes + 4)
    near = next(folder for folder in path.parents if folder.exists())
    free = shutil.disk_usage(near).free
    if needed > free:
        raise DataError(
            f"corpus {name!r} needs about {_size(needed)} for {_count(tokens)} tokens, {near} has {_size(free)} left; "
            "name fewer files, or another --folder"
        )
    replaces = ", in the place of the one there is" if path.exists() else ""
    seconds = characters * rate + tokens * 4e-7  # sorting and writing 10 M tokens takes 3 to 4 s
    out.print(
        f"corpus    {name}: {len(files)} files, {_size(characters)}; about {_count(tokens)} tokens, {_size(needed)} on disk, "
        f"{_size(2e8 + tokens * 8 * token_bytes)} of memory, {seconds:.0f} s{replaces}",
        highlight=False,
        soft_wrap=True,
    )


def _batches(texts: Iterator[Any], characters: int) -> Iterator[list[Any]]:
    """Several texts at a time, about so many characters together."""
    held: list[Any] = []
    for text in texts:
        held.append(text)
        if sum(len(one.text) for one in held) >= characters:
            yield held
            held = []
    if held:
        yield held


def _ids(tokenizer: Any) -> int:
    """All ids lie below it; there may be gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def _encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return found


# ── small things ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _quiet() -> None:
    """transformers and datasets talk less; what the user must know we say ourselves."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # transformers loads torchao where it is installed, which warns of every extension for another machine
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _bar(unit: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error; gives update(done, note).  It goes when its work is done."""
    columns = (
        TextColumn("          {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    # drawn when it moves and at no other time: a thread that draws would slow down what is being measured
    with Progress(*columns, console=note, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(unit, total=total, completed=done, note="")

        def update(done: int, note: str | None = None) -> None:
            progress.update(task, completed=done)
            if note is not None:
                progress.update(task, note=note)
            progress.refresh()

        yield update


def _place_of_json(to: str | None) -> None:
    """Refuse a place that can't be written before the work; where it is standard output, all else goes to standard error."""
    if to == "-":
        out.file = sys.stderr
    elif to is not None and not Path(to).absolute().parent.is_dir():
        raise DataError(f"can't write {to}: no such folder; name a file in a folder that exists")


def _write_json(to: str | None, value: Any) -> None:
    if to is None:
        return
    text = json.dumps(value, indent=2) + "\n"
    if to == "-":
        sys.stdout.write(text)
        return
    try:
        Path(to).write_text(text)
    except OSError as error:
        raise DataError(f"can't write {to}: {error.strerror}; name a file in a folder that exists") from None


def _count(number: float) -> str:
    """1234567 as 1.2 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def _size(size_bytes: float) -> str:
    return f"{_count(size_bytes)}B"


def _fail(message: str) -> None:
    note.print("[bold red]error[/] " + message.replace("[", "\\["), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
