"""`outrider decode`: one prompt, streamed, with drafted tokens marked."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from outrider import machine
from outrider.cli import console
from outrider.cli.stages import Printer
from outrider.config import override
from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError, DataError
from outrider.fast.packages import background
from outrider.generation import Piece, stream
from outrider.loading import load_drafter
from outrider.runs.baselines import compile_drafter
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target, work_for_first

DRAFTED = "green underline"
"""The style of drafted tokens that were accepted."""


class Pace(NamedTuple):
    """One generation."""

    tokens: int
    steps: int
    tokens_per_s: float | None
    """After its first step, so without reading the prompt; None where there was no other step."""


def decode(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; standard input where it is left out or -.")
    ] = None,
    target: Annotated[str, typer.Option(help="`demo`, `smollm2`, a folder, or a Hugging Face id.")] = "demo",
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
    policy: Annotated[str, typer.Option(help="How much to draft: auto or fixed.")] = "auto",
    verification: Annotated[
        str, typer.Option(help="standard or block, both exact; with --allow-lossy others, see docs/lossy.md.")
    ] = "standard",
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Let a verification change the output.")] = False,
    quantize: Annotated[
        str | None, typer.Option(help="int8: round the target's weights; a drafter's by --set.")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="int8: round what the weights of a GGUF file are multiplied with.")
    ] = None,
    tensor_parallel: console.Parts = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile first, or never; by default once per machine, in the background.",
        ),
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Generate again without the drafter, to compare the speed; on by default in a terminal.",
        ),
    ] = None,
) -> None:
    """Stream a continuation.  Drafted tokens that were accepted are underlined green; the target's own are plain."""
    parts = 1 if tensor_parallel is None else tensor_parallel
    work_for_first(parts)  # the others read and print nothing
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise DataError("the prompt is empty; give it as an argument or on standard input")
    if settings and not drafter:
        raise ConfigError(f"--set {settings[0]} needs a drafter; name one with --drafter")
    if compare and not drafter:
        raise ConfigError("--compare needs a drafter to compare with; name one with --drafter")
    machine.set_up_process()
    loaded = load_target(target, tensor_parallel=parts, quantize=quantize, compile=compile, activations=activations)
    built = load_drafter(drafter, loaded, **override({}, settings or ())) if drafter else None
    if compile and built is not None:
        compile_drafter(built, Printer())
    if compile is None and isinstance(loaded, TransformersTarget):
        background.build([loaded.step, *(built.steps if built else ())], target, drafter, settings or ())
    asked = Sampling(temperature, top_k, top_p, seed)

    def pieces(drafter: Drafter | None) -> Iterator[Piece]:
        return stream(
            loaded, [[{"role": "user", "content": text}]] if chat else text, drafter, max_new_tokens=max_new_tokens,
            # where nothing is asked for, the model's own generation_config is used
            sampling=None if asked == Sampling() else asked, stop=stop or (), policy=policy, verification=verification,
            allow_lossy=allow_lossy,
        )  # fmt: skip

    colour = console.out.is_terminal and not console.out.no_color
    if colour:
        _write(text, "dim")
    drafted = _timed(pieces(built), lambda piece: _show(piece, loaded, colour))
    sys.stdout.write("\n")
    if built is None:
        _remark_pace(drafted)
        return
    if colour:
        console.note.print(Text.assemble(("drafted and accepted", DRAFTED), ", plain: the target's own"))
    if console.out.is_terminal if compare is None else compare:
        console.remark("again without the drafter, to compare ...", "dim")
        with console.stopping("the text above is complete"):
            _remark_pace(drafted, _timed(pieces(None)))
    else:
        _remark_pace(drafted)


def _timed(pieces: Iterator[Piece], show: Callable[[Piece], None] = lambda piece: None) -> Pace:
    """Generate, and show every piece; the time of showing does not count."""
    tokens: list[int] = []
    seconds, began = 0.0, time.perf_counter()
    for piece in pieces:
        seconds += time.perf_counter() - began if tokens else 0.0
        tokens.append(len(piece.tokens))
        show(piece)
        began = time.perf_counter()
    return Pace(sum(tokens), len(tokens), sum(tokens[1:]) / seconds if len(tokens) > 1 else None)


def _show(piece: Piece, target: TransformersTarget, colour: bool) -> None:
    """Print what one step added."""
    if colour:
        drafted = target.decode(piece.tokens[: piece.drafted])
        at = len(drafted) if piece.text.startswith(drafted) else 0
        _write(piece.text[:at], DRAFTED)
        _write(piece.text[at:])
    else:
        sys.stdout.write(console.written(piece.text))
        sys.stdout.flush()


def _remark_pace(found: Pace, alone: Pace | None = None) -> None:
    line = f"{found.tokens} tokens in {found.steps} steps, {found.tokens / max(1, found.steps):.2f} tokens per step"
    if found.tokens_per_s is not None:
        line += f", {found.tokens_per_s:.1f} tokens/s"
        if alone is not None and alone.tokens_per_s is not None:
            ratio = found.tokens_per_s / alone.tokens_per_s
            line += f"; without the drafter {alone.tokens_per_s:.1f} tokens/s: {ratio:.2f} times as fast with it"
    console.remark(line, "dim")


def _write(text: str, style: str | None = None) -> None:
    console.out.print(console.written(text), end="", style=style, markup=False, highlight=False)
