"""`outrider decode`: one prompt, streamed, with what was drafted marked."""

import sys
from typing import Annotated

import typer

from outrider import machine
from outrider.cli import console
from outrider.cli.stages import Printer, tell_compiling
from outrider.config import override
from outrider.errors import ConfigError, DataError
from outrider.generation import stream
from outrider.loading import load_drafter
from outrider.runs.baselines import compile_drafter
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target


def decode(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; standard input where it is left out or -.")
    ] = None,
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
    policy: Annotated[str, typer.Option(help="How much to draft: fixed, by_confidence or adaptive.")] = "adaptive",
    verification: Annotated[
        str, typer.Option(help="standard or block, both exact; typical or relaxed, with --allow-lossy.")
    ] = "standard",
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Let a verification change the output.")] = False,
    quantize: Annotated[
        str | None, typer.Option(help="int8: round the target's weights; a drafter's by --set.")
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Compile the steps, or stay plain; unless said, what is on disk is taken."
        ),
    ] = None,
) -> None:
    """Stream a continuation; tokens that were drafted and kept are underlined green, the target's own are plain."""
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise DataError("the prompt is empty; give it as an argument or on standard input")
    if settings and not drafter:
        raise ConfigError(f"--set {settings[0]} is a setting of no drafter; name one with --drafter")
    machine.set_up_process()
    tell_compiling(compile)
    loaded = load_target(target, quantize=quantize, compile=compile)
    built = load_drafter(drafter, loaded, **override({}, settings or ())) if drafter else None
    if compile and built is not None:
        compile_drafter(built, Printer())
    asked = Sampling(temperature, top_k, top_p, seed)
    pieces = stream(
        loaded, [[{"role": "user", "content": text}]] if chat else text, built, max_new_tokens=max_new_tokens,
        # where nothing is asked for, the model's own generation_config speaks
        sampling=None if asked == Sampling() else asked, stop=stop or (), policy=policy, verification=verification,
        allow_lossy=allow_lossy,
    )  # fmt: skip
    colour = console.out.is_terminal and not console.out.no_color
    if colour:
        _write(text, "dim")
    steps = tokens = 0
    for piece in pieces:
        steps, tokens = steps + 1, tokens + len(piece.tokens)
        if colour:
            drafted = loaded.decode(piece.tokens[: piece.drafted])
            at = len(drafted) if piece.text.startswith(drafted) else 0
            _write(piece.text[:at], "green underline")
            _write(piece.text[at:])
        else:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    console.remark(f"{tokens} tokens in {steps} steps, {tokens / max(1, steps):.2f} tokens per step", "dim")


def _write(text: str, style: str | None = None) -> None:
    console.out.print(text, end="", style=style, markup=False, highlight=False)
