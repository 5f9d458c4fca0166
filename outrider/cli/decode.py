"""`outrider decode`: stream the continuation of a prompt, with accepted draft tokens marked."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from outrider import machine
from outrider.cli import console
from outrider.cli.options import TARGET_OPTIONS, Chat, DrafterName, DrafterSettings, Fields, with_options
from outrider.cli.stages import Printer
from outrider.config import override
from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError, DataError
from outrider.fast.packages import background
from outrider.generation import Piece, stream
from outrider.loading import load_drafter
from outrider.runs.baselines import compile_drafter
from outrider.runs.file import TargetConfig
from outrider.sampling.settings import Sampling
from outrider.serve.config import Config as ServeConfig
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target, work_for_first

DRAFTED = "green underline"
"""Style of accepted draft tokens."""


class Pace(NamedTuple):
    """Length and speed of a generation."""

    tokens: int
    steps: int
    tokens_per_s: float | None
    """After the first step, so the prefill does not count; None with a single step."""


@with_options
def decode(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; standard input if omitted or -.")] = None,
    *,
    target: Annotated[TargetConfig, Fields(TargetConfig, TARGET_OPTIONS, defaults={"name": "demo"})],
    drafter: DrafterName = None,
    settings: DrafterSettings = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; can be repeated.")] = None,
    chat: Chat = False,
    serving: Annotated[ServeConfig, Fields(ServeConfig, "policy verification allow_lossy")],
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Generate again without the drafter, to compare the speed; on by default in a terminal.",
        ),
    ] = None,
) -> None:
    """Stream a continuation.  Accepted draft tokens are underlined in green; the target's own tokens are plain."""
    work_for_first(target.tensor_parallel)  # the others read and print nothing
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise DataError("the prompt is empty; give it as an argument or on standard input")
    if settings and not drafter:
        raise ConfigError(f"--set {settings[0]} needs a drafter; name one with --drafter")
    if compare and not drafter:
        raise ConfigError("--compare needs a drafter to compare with; name one with --drafter")
    machine.set_up_process()
    loaded = load_target(target.name, **target.model_dump(exclude={"name"}))
    built = load_drafter(drafter, loaded, **override({}, settings or ())) if drafter else None
    if target.compile and built is not None:
        compile_drafter(built, Printer())
    if target.compile is None and isinstance(loaded, TransformersTarget):
        background.build([loaded.step, *(built.steps if built else ())], target.name, drafter, settings or ())
    sampling = Sampling(temperature, top_k, top_p, seed)

    def pieces(drafter: Drafter | None) -> Iterator[Piece]:
        return stream(
            loaded, [[{"role": "user", "content": text}]] if chat else text, drafter, max_new_tokens=max_new_tokens,
            # with no sampling options the model's own generation_config applies
            sampling=None if sampling == Sampling() else sampling, stop=stop or (),
            policy=serving.policy, verification=serving.verification, allow_lossy=serving.allow_lossy,
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
    """Generate, and show every piece; printing time does not count."""
    tokens: list[int] = []
    seconds, began = 0.0, time.perf_counter()
    for piece in pieces:
        seconds += time.perf_counter() - began if tokens else 0.0
        tokens.append(len(piece.tokens))
        show(piece)
        began = time.perf_counter()
    return Pace(sum(tokens), len(tokens), sum(tokens[1:]) / seconds if len(tokens) > 1 else None)


def _show(piece: Piece, target: TransformersTarget, colour: bool) -> None:
    """Print the text of one step."""
    if colour:
        drafted = target.decode(piece.tokens[: piece.drafted])
        at = len(drafted) if piece.text.startswith(drafted) else 0
        _write(piece.text[:at], DRAFTED)
        _write(piece.text[at:])
    else:
        sys.stdout.write(console.written(piece.text))
        sys.stdout.flush()


def _remark_pace(drafted: Pace, plain: Pace | None = None) -> None:
    line = f"{drafted.tokens} tokens in {drafted.steps} steps, "
    line += f"{drafted.tokens / max(1, drafted.steps):.2f} tokens per step"
    if drafted.tokens_per_s is not None:
        line += f", {drafted.tokens_per_s:.1f} tokens/s"
        if plain is not None and plain.tokens_per_s is not None:
            ratio = drafted.tokens_per_s / plain.tokens_per_s
            line += f"; without the drafter {plain.tokens_per_s:.1f} tokens/s: {ratio:.2f} times as fast with it"
    console.remark(line, "dim")


def _write(text: str, style: str | None = None) -> None:
    console.out.print(console.written(text), end="", style=style, markup=False, highlight=False)
