"""`outrider verify-export`: does an engine keep as much of an exported drafter as we do, and if not, why?"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, place_of_json, quiet, write_json
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.deploy.parity import Parity
    from outrider.nn.draft_model import DraftModel
    from outrider.targets.transformers import TransformersTarget

LOOKED_AT = 3
"""Texts on which causes are looked for."""


@console.started_anew("comparison")
def verify_export(
    folder: Annotated[Path, typer.Argument(help="Folder that `outrider export` wrote.", show_default=False)],
    engine: Annotated[
        str, typer.Option("--engine", help="vllm, which is run; sglang or transformers: the folder is read.")
    ] = "vllm",
    python: Annotated[str | None, typer.Option("--python", help="The python of the engine's own environment.")] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="What it was exported from; causes need it.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Where the target is, if not where it was in training.")
    ] = None,
    prompts: Annotated[str, typer.Option("--prompts", help="`stdlib`, a task, or a file of prompts.")] = "stdlib",
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts.")] = 24,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=8)] = 88,
    json_to: JsonTo = None,
) -> None:
    """Run an exported drafter in its engine and here, on the same token ids: same text, same tokens kept at every depth?

    Exit code 1 where they differ, with the cause by its name.
    """
    quiet()
    place_of_json(json_to)
    from outrider.deploy import parity

    if engine not in parity.ENGINES:
        raise ConfigError(f"engine {engine!r} is not known; choose from {', '.join(parity.ENGINES)}")
    if engine == "vllm" and python is None:
        raise ConfigError("vLLM lives in an environment of its own: name its python with --python VENV/bin/python")
    if engine != "vllm" and checkpoint is None:
        raise ConfigError(
            f"{engine} is not run here, its folder is read and compared: name the --checkpoint it was exported from"
        )
    loaded, model = _sides(folder, checkpoint, target)
    if engine != "vllm" and model.config.kind not in parity.READ[engine]:
        kinds = ", ".join(parity.READ[engine])
        raise ConfigError(
            f"of {engine}'s folders those of {kinds} are read; a {model.config.kind} can be run with --engine vllm"
        )
    ids = prompt_tokens(loaded, prompts, count)
    found = verified(folder, engine, python, loaded, model, checkpoint is not None, ids, max_new_tokens)
    if engine == "vllm":
        parity.write_verified(folder, found)
    _print(found, folder)
    write_json(json_to, asdict(found) | {"is_equal": found.is_equal, "texts_hold": found.texts_hold})
    if found.is_equal is False or found.causes or found.error:
        raise typer.Exit(1)


def _sides(folder: Path, checkpoint: Path | None, target: str | None) -> tuple[TransformersTarget, DraftModel]:
    from outrider.checkpoint import load_model, manifest_of
    from outrider.export.folder import read_json
    from outrider.export.formats import imported
    from outrider.targets.transformers import load_target

    beside = read_json(folder / "outrider.json") if (folder / "outrider.json").exists() else {}
    name = target or (manifest_of(checkpoint) if checkpoint else beside).get("target", {}).get("name")
    if name is None:
        raise ConfigError(f"{folder} doesn't say which target it drafts for; name it with --target")
    loaded = load_target(name, dtype="float32", compile=False)
    return loaded, load_model(checkpoint, loaded) if checkpoint else imported(folder, loaded)


def prompt_tokens(target: TransformersTarget, task: str, count: int) -> list[list[int]]:
    from outrider.evaluate.measure import as_tokens
    from outrider.evaluate.tasks import prompts

    return [as_tokens(target, prompt) for prompt in prompts(task, count)]


def verified(
    folder: Path, engine: str, python: str | None, target: TransformersTarget, model: DraftModel, known: bool,
    prompts: list[list[int]], max_new_tokens: int, mend: tuple[str, ...] = (), prefix_caching: bool = False,
) -> Parity:  # fmt: skip
    """The whole comparison.  known: `model` is what the folder was made from, not what was read from it."""
    from outrider.deploy import parity

    kind, length = model.config.kind, parity.length_of(model)
    about = {"kind": kind, "format": _format(folder), "length": length}
    if engine != "vllm":
        own = parity.ours(target, parity.as_engine(model), prompts[:LOOKED_AT], [[]] * len(prompts[:LOOKED_AT]), 32, length)
        causes, stage = _causes(folder, engine, target, model, prompts, own.tokens, length)
        return parity.Parity(
            engine, None, **about, causes=causes, stage=stage, warnings=(f"{engine} was not run: the folder was read",)
        )
    job = {
        "target": place_of(target), "speculative": parity.speculative(folder, kind, length), "prompts": prompts,
        "max_new_tokens": max_new_tokens, "slots": 8, "dtype": "float32", "mend": mend, "prefix_caching": prefix_caching,
    }  # fmt: skip
    said = f"running {engine} on {len(prompts)} prompts x {max_new_tokens} tokens: about a minute to load, then silence"
    console.note.print(said, style="dim", highlight=False)
    answer = parity.asked(str(python), job)
    bad = tuple(parity.known_bad(engine, answer["version"], kind))
    if "error" in answer:
        return parity.Parity(engine, answer["version"], **about, error=answer["error"], warnings=bad)
    theirs = parity.side_of(answer)
    own = parity.ours(target, parity.as_engine(model), prompts, [text[:1] for text in theirs.tokens], max_new_tokens, length)
    found = parity.Parity(
        engine, answer["version"], **about, **parity.compared(target, prompts, own, theirs, length), warnings=bad
    )
    look = (folder, engine, target, model, prompts, theirs.tokens, length)
    causes, stage = _causes(*look) if known else ((), None)
    guesses = _guesses(target, model, prompts, theirs, length) if found.is_equal is False and not causes else ()
    from dataclasses import replace

    return replace(found, causes=causes, stage=stage, guesses=guesses)


def _causes(
    folder: Path, engine: str, target: TransformersTarget, model: DraftModel, prompts: list[list[int]],
    texts: list[list[int]], length: int,
) -> tuple[tuple[Any, ...], tuple[str, float] | None]:  # fmt: skip
    """What in the folder changes drafts, and the first stage that comes out otherwise."""
    from outrider.deploy import parity_causes, readers

    if model.config.kind not in readers.KINDS:
        return (), None
    pairs = list(zip(prompts, texts, strict=False))[:LOOKED_AT]
    seen = [(readers.states(target, [*prompt, *text]), len(prompt)) for prompt, text in pairs]
    read, own = readers.of_folder(folder, engine), readers.of_model(model)
    found = tuple(parity_causes.causes(read, own, seen, length))
    text, begun = seen[0]
    return found, parity_causes.first_difference(read, own, text, begun, length) if found else None


def _guesses(
    target: TransformersTarget, model: DraftModel, prompts: list[list[int]], theirs: Any, length: int
) -> tuple[tuple[str, str, float], ...]:
    from outrider.deploy import parity, parity_causes, readers

    if model.config.kind not in readers.KINDS:
        return ()
    steps = parity.engine_steps(prompts, theirs, length)
    some = list(zip(prompts, theirs.tokens, steps, strict=True))[:LOOKED_AT]
    texts = [(readers.states(target, [*prompt, *text]), kept) for prompt, text, kept in some]
    found = parity_causes.guesses(readers.of_model(model), texts, length)[:3]
    return tuple((guess.name, guess.what, guess.share) for guess in found)


def place_of(target: TransformersTarget) -> str:
    """Where the engine finds the target."""
    from outrider import demo

    name = target.spec.name
    return str(demo.TARGET) if name == "demo" else str(Path(name).absolute()) if Path(name).exists() else name


def _format(folder: Path) -> str:
    from outrider.export.folder import read_json

    beside = read_json(folder / "outrider.json") if (folder / "outrider.json").exists() else {}
    return str(beside.get("format", "unknown"))


def _print(found: Parity, folder: Path) -> None:
    def say(text: str, style: str | None = None) -> None:
        console.out.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    where = f"{found.engine} {found.version or ''}".rstrip()
    say(f"verify    {found.kind} as {found.format}, {found.length} tokens a step, in {where}")
    for warning in found.warnings:
        say(f"          {warning}", "yellow")
    if found.error is not None:
        say(f"          not loaded: {found.error}", "red")
    if found.depths:
        _print_depths(found, say)
    for cause in found.causes:
        say(f"cause     {cause.name}: {cause.what} ({cause.changed:.1%} of our drafted tokens change)", "red")
    if found.stage is not None:
        say(f"          the first stage that comes out otherwise: {found.stage[0]}, by {found.stage[1]:.2g} of its size")
    if found.guesses:
        say("cause     not in the folder, which reads as it should; what would explain the engine's steps:", "yellow")
        for name, what, share in found.guesses:
            say(f"          {share:7.1%}  {name}: {what}")
    if found.engine == "vllm":
        say(f"          written to {folder / 'outrider.json'}")
    elif not found.causes:
        say("          nothing in the folder changes a drafted token; texts and acceptance: not measured")


def _print_depths(found: Parity, say: Any) -> None:
    ties = f", {len(found.parted)} part" if found.parted else ""
    where = "; ".join(f"prompt {each.prompt} at token {each.token}, gap {each.gap}" for each in found.parted[:3])
    say(f"texts     {found.texts_equal} of {found.prompts} equal{ties}{': ' + where if where else ''}")
    say(f"steps     {found.steps[0]} here, {found.steps[1]} in the engine; {found.steps_equal:.1%} keep the same number")
    table = Table(box=None, pad_edge=False)
    for column in ("depth", "kept here", "kept there", "difference", ""):
        table.add_column(column, justify="left" if not column else "right")
    for number, depth in enumerate(found.depths, 1):
        word = "" if depth.is_equal else "differs"
        table.add_row(str(number), f"{depth.ours:.4f}", f"{depth.engine:.4f}", f"{depth.engine - depth.ours:+.4f}", word)
    console.out.print(table)
    if found.is_equal:
        say("result    the engine drafts what we draft")
    else:
        say("result    the engine drafts otherwise", "red")


if __name__ == "__main__":
    sys.exit("run `outrider verify-export`")
