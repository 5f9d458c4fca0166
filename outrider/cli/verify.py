"""`outrider verify-export`: compare the acceptance of an exported drafter in an engine and in Outrider."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, quiet, remark, say, table, write_json
from outrider.cli.options import JsonTo
from outrider.engines import card
from outrider.engines.engine import engine_name
from outrider.engines.verify import comparison, parity
from outrider.engines.verify.parity import Parity
from outrider.formats.keys import MANIFEST
from outrider.loading import find_folder


@console.restarted("comparison")
def verify_export(
    draft: Annotated[
        str,
        typer.Argument(help="Folder of `outrider export`, a published folder, or its id.", show_default=False),
    ],
    engine: Annotated[
        str, typer.Option("--engine", help="vllm, llamacpp or transformers; with sglang, the folder is only read.")
    ] = "vllm",
    python: Annotated[str | None, typer.Option("--python", help="Python of vLLM's environment.")] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="BINARY", help="llama-server; default: $LLAMA_SERVER, or from the PATH."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Checkpoint it was exported from; needed to find causes.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Location of the target, if it moved since training.")
    ] = None,
    prompts: Annotated[str, typer.Option("--prompts", help="`stdlib`, a task, or a file of prompts.")] = "stdlib",
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts.")] = 24,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=8)] = 88,
    json_to: JsonTo = None,
) -> None:
    """Run an exported drafter in its engine and in Outrider on the same token ids; compare texts and acceptance.

    Exit code 1 if they differ, with the cause if it is known.
    """
    quiet()
    place_of_json(json_to)
    engine, folder = engine_name(engine), find_folder(draft)
    comparison.check(folder, engine, python, checkpoint, server)
    for name, value, owner in (("python", python, "vllm"), ("server", server, "llamacpp")):
        if engine != owner and value is not None:
            remark(f"          --{name} has no effect: {engine} does not need it")
    loaded, model = comparison.sides(folder, engine, checkpoint, target)
    ids = comparison.prompt_tokens(loaded, prompts, count)
    report = lambda text: remark(text, "dim")
    outcome = comparison.verified(
        folder, engine, python, loaded, model, checkpoint is not None, ids, max_new_tokens, say=report,
        server=server,
    )  # fmt: skip
    _print(outcome)
    write_json(json_to, asdict(outcome) | {"is_equal": outcome.is_equal, "texts_hold": outcome.texts_hold})
    if engine in parity.RUN:
        try:
            written = parity.write_verified(folder, outcome)
            say(f"          written to {written}")
            if written.name == MANIFEST and not card.write(folder):
                remark(f"          {folder / card.NAME} was edited, so it is not changed")
        except (OSError, ValueError, TypeError, AttributeError) as error:  # the result was already printed
            remark(f"          could not record the result in {folder}: {error}", "yellow")
    if outcome.is_equal is False or outcome.causes or outcome.error:
        raise typer.Exit(1)


def _print(parity: Parity) -> None:
    where = f"{parity.engine} {parity.version or ''}".rstrip() + (f" on {parity.platform}" if parity.platform else "")
    say(f"verify    {parity.kind} as {parity.format}, {parity.length} tokens per step, in {where}")
    for warning in parity.warnings:
        say(f"          {warning}", "yellow")
    if parity.error is not None:
        say(f"          not loaded: {parity.error}", "red")
    if parity.depths:
        _print_depths(parity)
    for cause in parity.causes:
        say(f"cause     {cause.name}: {cause.what} ({cause.changed:.1%} of our drafted tokens change)", "red")
    if parity.stage is not None:
        say(f"          the first stage whose output differs: {parity.stage[0]}, by {parity.stage[1]:.2g} of its size")
    if parity.guesses:
        say("cause     not in the folder, which is read correctly; what would explain the engine's steps:", "yellow")
        for name, what, share in parity.guesses:
            say(f"          {share:7.1%}  {name}: {what}")
    if parity.engine_stage is not None:
        name, away = parity.engine_stage
        what = f"unlike the folder from {name} on, by {away:.2g} of its size"
        say(f"modules   the engine's outputs are {what}", "red")
    elif parity.stages:
        say(f"modules   {parity.stages} stages of the engine's own first draft match the folder")
    if parity.version is None and not parity.causes:
        say("          nothing in the folder changes a drafted token; texts and acceptance: not measured")


def _print_depths(parity: Parity) -> None:
    ties = f", {len(parity.parted)} differ" if parity.parted else ""
    where = "; ".join(f"prompt {each.prompt} at token {each.token}, gap {each.gap}" for each in parity.parted[:3])
    say(f"texts     {parity.texts_equal} of {parity.prompts} equal{ties}{': ' + where if where else ''}")
    say(
        f"steps     {parity.steps[0]} here, {parity.steps[1]} in the engine; {parity.steps_equal:.1%} accept the same "
        f"number"
    )
    numbers = ("depth", "accepted here", "in the engine", "difference")
    shown = table(*numbers, "", right=numbers)
    for number, depth in enumerate(parity.depths, 1):
        word = "" if depth.is_equal else "differs"
        shown.add_row(
            str(number), f"{depth.ours:.4f}", f"{depth.engine:.4f}", f"{depth.engine - depth.ours:+.4f}", word
        )
    console.show(shown)
    result = "the engine drafts the same tokens as we do" if parity.is_equal else "the engine drafts other tokens"
    say(f"result    {result}", None if parity.is_equal else "red")
