"""`outrider compile`: the packages that make steps fast on this machine."""

import os
from typing import Annotated

import typer

from outrider import fast, machine
from outrider.cli import console
from outrider.cli.console import lasting, say
from outrider.config import override
from outrider.decoding.protocols import Drafter
from outrider.fast.runner import build_whole
from outrider.loading import load_drafter
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

LOWEST = 19
"""Of priorities."""


def compile(
    target: Annotated[str, typer.Option(help="`demo`, `smollm2`, a folder, or a Hugging Face id.")] = "demo",
    drafter: Annotated[
        str | None, typer.Option(help="Kind, or checkpoint folder, whose passes are compiled too.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the drafter, key=value; may be given several times.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="As in a run file's target section.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a Hugging Face id.")] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Compile whole steps too, which are one call each: minutes more.")
    ] = False,
    background: Annotated[bool, typer.Option("--background", help="At the lowest priority.")] = False,
) -> None:
    """Compile the steps of a target and a drafter for this machine's CPU; all other verbs use them.

    `evaluate`, `prepare` and `run` do so by themselves first, `decode` and `serve` in the background.
    """
    if background:
        os.nice(LOWEST)
    machine.set_up_process()
    loaded = load_target(target, device="cpu", dtype=dtype, revision=revision)
    seconds = loaded.compile()
    _say("target", target, seconds)
    built = Drafter()
    if drafter is not None:
        built = load_drafter(drafter, loaded, **override({}, settings or ()))
        if built.steps:
            _say("drafter", drafter, fast.compile_passes(built))
        else:
            console.remark(f"{drafter} has no passes to compile", "dim")
    if whole:
        for what, sampling in (("greedy", Sampling()), ("drawn", Sampling(temperature=1.0))):
            _say(what, "whole steps", build_whole(loaded, built, sampling))


def _say(what: str, name: str, seconds: float) -> None:
    took = f"compiled in {lasting(seconds)}" if seconds else "was compiled before"
    say(f"{what:<9} {name}: {took}; {fast.folder()}")
