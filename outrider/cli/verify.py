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
    from outrider.engines.parity import Parity
    from outrider.nn.draft_model import DraftModel
    from outrider.targets.transformers import TransformersTarget

LOOKED_AT = 3
"""Texts on which causes are looked for."""


@console.started_anew("comparison")
def verify_export(
    folder: Annotated[Path, typer.Argument(help="Folder that `outrider export` wrote.", show_default=False)],
    engine: Annotated[
        str, typer.Option("--engine", help="vllm or transformers, which are run; sglang: the folder is read.")
    ] = "vllm",
    python: Annotated[str | None, typer.Option("--python", help="The python of vLLM's own environment.")] = None,
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
    from outrider.engines import parity

    _check(folder, engine, python, checkpoint)
    loaded, model = _sides(folder, checkpoint, target)
    _check_kind(engine, model.config.kind)
    ids = prompt_tokens(loaded, prompts, count)
    found = verified(folder, engine, python, loaded, model, checkpoint is not None, ids, max_new_tokens)
    _print(found)
    write_json(json_to, asdict(found) | {"is_equal": found.is_equal, "texts_hold": found.texts_hold})
    if engine in parity.RUN:
        _write(folder, found)
    if found.is_equal is False or found.causes or found.error:
        raise typer.Exit(1)


def _check(folder: Path, engine: str, python: str | None, checkpoint: Path | None) -> None:
    """Refuse what can't be done before anything is loaded."""
    from outrider.engines import parity

    if engine not in parity.ENGINES:
        raise ConfigError(f"engine {engine!r} is not known; choose from {', '.join(parity.ENGINES)}")
    if engine == "vllm" and python is None:
        raise ConfigError("vLLM lives in an environment of its own: name its python with --python VENV/bin/python")
    if engine != "vllm" and python is not None:
        console.note.print(f"          --python has no effect: {engine} needs no environment of its own here", highlight=False)
    if engine not in parity.RUN and checkpoint is None:
        raise ConfigError(
            f"{engine} is not run here, its folder is read and compared: name the --checkpoint it was exported from"
        )
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one that `outrider export` wrote")


def _check_kind(engine: str, kind: str) -> None:
    from outrider.engines import parity

    kinds = parity.READ.get(engine, ("small_model",) if engine == "transformers" else ())
    if kinds and kind not in kinds:
        raise ConfigError(
            f"of {engine}'s folders those of {', '.join(kinds)} are {'run' if engine in parity.RUN else 'read'}; "
            f"a {kind} can be run with --engine vllm"
        )


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
    from outrider.measure.run import as_tokens
    from outrider.measure.tasks import prompts

    return [as_tokens(target, prompt) for prompt in prompts(task, count)]


def verified(
    folder: Path, engine: str, python: str | None, target: TransformersTarget, model: DraftModel, known: bool,
    prompts: list[list[int]], max_new_tokens: int, mend: tuple[str, ...] = (), prefix_caching: bool = False,
) -> Parity:  # fmt: skip
    """The whole comparison.  known: `model` is what the folder was made from, not what was read from it."""
    from outrider.engines import parity, readers

    kind, length = model.config.kind, parity.length_of(model)
    about: dict[str, Any] = {"kind": kind, "format": _format(folder), "length": length}
    if engine not in parity.RUN:
        own = parity.ours(target, parity.as_engine(model), prompts[:LOOKED_AT], [[]] * len(prompts[:LOOKED_AT]), 32, length)
        causes, stage = _causes(folder, engine, target, model, prompts, own.tokens, length)
        return parity.Parity(
            engine, None, **about, causes=causes, stage=stage, warnings=(f"{engine} was not run: the folder was read",)
        )
    if engine == "transformers":
        answer = _assisted(folder, target, prompts, max_new_tokens, length)
    else:
        answer = _served(folder, str(python), target, kind, prompts, max_new_tokens, length, mend, prefix_caching)
    about["platform"], begun = answer.get("platform", ""), parity.RUN[engine]
    bad = tuple(parity.known_bad(engine, answer["version"], kind, about["platform"]))
    if "error" in answer:
        return parity.Parity(engine, answer["version"], **about, error=answer["error"], warnings=bad)
    theirs = parity.side_of(answer)
    first = [text[:begun] for text in theirs.tokens]
    own = parity.ours(target, parity.as_engine(model), prompts, first, max_new_tokens, length)
    same = parity.compared(target, prompts, own, theirs, length, begun)
    found = parity.Parity(engine, answer["version"], **about, **same, warnings=bad)
    return found if kind not in readers.KINDS else _explained(found, folder, target, model, known, prompts, theirs, answer)


def _served(
    folder: Path, python: str, target: TransformersTarget, kind: str, prompts: list[list[int]], max_new_tokens: int,
    length: int, mend: tuple[str, ...], prefix_caching: bool,
) -> dict[str, Any]:  # fmt: skip
    """vLLM's answer."""
    from outrider.engines import parity, readers

    job = {
        "target": place_of(target), "speculative": parity.speculative(folder, kind, length), "prompts": prompts,
        "max_new_tokens": max_new_tokens, "slots": 8, "dtype": "float32", "mend": mend, "prefix_caching": prefix_caching,
        # a cached prompt is not read again, and there would be nothing to hear
        "stages": kind in readers.KINDS and not prefix_caching,
    }  # fmt: skip
    said = f"running vllm on {len(prompts)} prompts x {max_new_tokens} tokens: about a minute to load, then silence"
    console.note.print(said, style="dim", highlight=False)
    return parity.asked(python, job)


def _assisted(
    folder: Path, target: TransformersTarget, prompts: list[list[int]], max_new_tokens: int, length: int
) -> dict[str, Any]:  # fmt: skip
    """transformers' answer."""
    from outrider.engines import verify_transformers

    said = f"running transformers on {len(prompts)} prompts x {max_new_tokens} tokens, one after the other"
    console.note.print(said, style="dim", highlight=False)
    return verify_transformers.answer(folder, target, prompts, max_new_tokens, length)


def _explained(
    found: Parity, folder: Path, target: TransformersTarget, model: DraftModel, known: bool, prompts: list[list[int]],
    theirs: Any, answer: dict[str, Any],
) -> Parity:  # fmt: skip
    """What was measured, with causes.  What a reader can't do is a warning: the engine has run for minutes."""
    from dataclasses import replace

    from outrider.engines import causes, readers

    length = found.length
    try:
        if known:
            those, stage = _causes(folder, found.engine, target, model, prompts, theirs.tokens, length)
            found = replace(found, causes=those, stage=stage)
        if found.is_equal is False and not found.causes:
            found = replace(found, guesses=_guesses(target, model, prompts, theirs, length))
    except Exception as error:
        found = _warned(found, f"causes not looked for: {error}")
    said = answer.get("stages") or {}
    if "rows" not in said:
        return _warned(found, f"its modules were not heard: {said['error']}") if "error" in said else found
    try:
        read = readers.of_folder(folder, found.engine)
        seen = readers.states(target, said["text"])
        heard = causes.heard(read, said["rows"], seen, len(prompts[0]), length)
    except Exception as error:
        return _warned(found, f"its modules were not compared: {error}")
    return replace(found, stages=heard.stages, engine_stage=heard.first)


def _warned(found: Parity, warning: str) -> Parity:
    from dataclasses import replace

    return replace(found, warnings=(*found.warnings, warning))


def _causes(
    folder: Path, engine: str, target: TransformersTarget, model: DraftModel, prompts: list[list[int]],
    texts: list[list[int]], length: int,
) -> tuple[tuple[Any, ...], tuple[str, float] | None]:  # fmt: skip
    """What in the folder changes drafts, and the first stage that comes out otherwise."""
    from outrider.engines import causes, readers

    pairs = list(zip(prompts, texts, strict=False))[:LOOKED_AT]
    seen = [(readers.states(target, [*prompt, *text]), len(prompt)) for prompt, text in pairs]
    read, own = readers.of_folder(folder, engine), readers.of_model(model)
    found = tuple(causes.causes(read, own, seen, length))
    text, begun = seen[0]
    return found, causes.first_difference(read, own, text, begun, length) if found else None


def _guesses(
    target: TransformersTarget, model: DraftModel, prompts: list[list[int]], theirs: Any, length: int
) -> tuple[tuple[str, str, float], ...]:
    from outrider.engines import causes, parity, readers

    steps = parity.engine_steps(prompts, theirs, length)
    some = list(zip(prompts, theirs.tokens, steps, strict=True))[:LOOKED_AT]
    texts = [(readers.states(target, [*prompt, *text]), kept) for prompt, text, kept in some]
    found = causes.guesses(readers.of_model(model), texts, length)[:3]
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


def _write(folder: Path, found: Parity) -> None:
    """Beside the weights; that this fails takes nothing of what was printed."""
    from outrider.engines.parity import write_verified

    try:
        place = write_verified(folder, found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        console.note.print(f"          not noted in {folder}: {error}", style="yellow", highlight=False, markup=False)
    else:
        console.out.print(f"          written to {place}", highlight=False, soft_wrap=True, markup=False)


def _print(found: Parity) -> None:
    def say(text: str, style: str | None = None) -> None:
        console.out.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    where = f"{found.engine} {found.version or ''}".rstrip() + (f" on {found.platform}" if found.platform else "")
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
    if found.engine_stage is not None:
        name, away = found.engine_stage
        say(
            f"modules   the engine's own come out otherwise than the folder says from {name} on, by {away:.2g} of its size",
            "red",
        )
    elif found.stages:
        say(f"modules   {found.stages} stages of the engine's own first draft come out as the folder says")
    if found.version is None and not found.causes:
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
