"""Shows a text while a target and a drafter generate it, with accepted draft tokens marked, and its speed."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from outrider import machine
from outrider.cli import console
from outrider.cli.stages import Printer
from outrider.config import override
from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError
from outrider.fast.packages import background
from outrider.generation import Piece
from outrider.loading import load_drafter
from outrider.runs.baselines import compile_drafter
from outrider.runs.file import TargetConfig
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

DRAFTED = "green underline"
"""Style of accepted draft tokens."""


class Pace(NamedTuple):
    """Length and speed of a generation."""

    tokens: int
    steps: int
    tokens_per_s: float | None
    """Measured after the first step, so it excludes the prefill; None with a single step."""


def load(
    target: TargetConfig, drafter: str | None, settings: Sequence[str] | None
) -> tuple[TransformersTarget, Drafter | None]:
    """The target and the drafter that a verb's options name; missing packages are compiled in the background."""
    if settings and not drafter:
        raise ConfigError(f"--set {settings[0]} needs a drafter; name one with --drafter")
    machine.set_up_process()
    loaded = load_target(target.name, **target.model_dump(exclude={"name"}))
    built = load_drafter(drafter, loaded, **override({}, settings or ())) if drafter else None
    if target.compile and built is not None:
        compile_drafter(built, Printer())
    if target.compile is None and isinstance(loaded, TransformersTarget):
        background.build([loaded.step, *(built.steps if built else ())], target.name, drafter, settings or ())
    return loaded, built


def timed(pieces: Iterable[Piece], show: Callable[[Piece], None] = lambda piece: None) -> Pace:
    """Generate and show every piece; printing time is not counted."""
    tokens: list[int] = []
    seconds, began = 0.0, time.perf_counter()
    for piece in pieces:
        seconds += time.perf_counter() - began if tokens else 0.0
        tokens.append(len(piece.tokens))
        show(piece)
        began = time.perf_counter()
    return Pace(sum(tokens), len(tokens), sum(tokens[1:]) / seconds if len(tokens) > 1 else None)


def is_coloured() -> bool:
    """Whether accepted draft tokens are marked: on a terminal with colours."""
    return console.out.is_terminal and not console.out.no_color


def show(piece: Piece, target: TransformersTarget) -> None:
    """Print the text of one step."""
    if is_coloured():
        drafted = target.decode(piece.tokens[: piece.drafted])
        at = len(drafted) if piece.text.startswith(drafted) else 0
        write(piece.text[:at], DRAFTED)
        write(piece.text[at:])
    else:
        sys.stdout.write(console.written(piece.text))
        sys.stdout.flush()


def write(text: str, style: str | None = None) -> None:
    """Print a part of a line."""
    text = console.written(text)
    console.out.print(text, end="", style=style, markup=False, highlight=False, soft_wrap=True)


def in_words(pace: Pace) -> str:
    line = f"{pace.tokens} tokens in {pace.steps} steps, {pace.tokens / max(1, pace.steps):.2f} tokens per step"
    return line if pace.tokens_per_s is None else f"{line}, {pace.tokens_per_s:.1f} tokens/s"
