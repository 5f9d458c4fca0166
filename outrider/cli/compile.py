"""`outrider compile`: compiled steps for this machine."""

import os
from pathlib import Path
from typing import Annotated

import typer

from outrider import fast, machine
from outrider.cli import console
from outrider.cli.console import lasting, say
from outrider.cli.options import DrafterSettings, TargetName
from outrider.config import override
from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError
from outrider.fast.runner import build_whole
from outrider.loading import load_drafter
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

LOWEST_PRIORITY = 19
MARK = ".outrider-packages"
"""Marks a folder made by `--out`: the permissions of everything in such a folder are changed."""


def compile(
    target: TargetName = "demo",
    drafter: Annotated[str | None, typer.Option(help="Drafter kind or checkpoint folder to compile too.")] = None,
    settings: DrafterSettings = None,
    dtype: Annotated[str | None, typer.Option(help="Number type, as in a run file's target section.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a Hugging Face id.")] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Also compile whole steps into single calls; takes minutes more.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Build all that serving needs into a folder, for an image that only reads it."
        ),
    ] = None,
    background: Annotated[bool, typer.Option("--background", help="Run at the lowest priority.")] = False,
) -> None:
    """Compile the steps of a target and a drafter for this machine's CPU, for use by all other verbs.

    `evaluate`, `prepare` and `run` do this automatically first, `decode` and `serve` in the background.
    """
    if background:
        os.nice(LOWEST_PRIORITY)
    if out is not None:
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).exists())):
            raise ConfigError(f"--out {out} exists and was not made by this command; name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()
        os.environ["OUTRIDER_CACHE"] = str(out.resolve())
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
        for what, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1.0))):
            _say(what, "whole steps", build_whole(loaded, built, sampling))
    if out is not None:
        for path in (out, *out.rglob("*")):  # readable by other users, but not writable
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
        say(f"folder    {out}: start servers with OUTRIDER_CACHE={out.resolve()}, on this kind of processor")


def _say(what: str, name: str, seconds: float) -> None:
    took = f"compiled in {lasting(seconds)}" if seconds else "already compiled"
    say(f"{what:<9} {name}: {took}; {fast.folder()}")
