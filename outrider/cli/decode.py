"""`outrider decode`: stream the continuation of a prompt, with accepted draft tokens marked."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from outrider.cli import console, streamed
from outrider.cli.options import TARGET_OPTIONS, Chat, DrafterName, DrafterSettings, Fields, with_options
from outrider.cli.streamed import Pace
from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError, DataError
from outrider.generation import Piece, stream
from outrider.runs.file import TargetConfig
from outrider.sampling.settings import Sampling
from outrider.serve.config import Config as ServeConfig
from outrider.targets.load import work_for_first


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
    if compare and not drafter:
        raise ConfigError("--compare needs a drafter to compare with; name one with --drafter")
    loaded, built = streamed.load(target, drafter, settings)
    sampling = Sampling(temperature, top_k, top_p, seed)

    def pieces(drafter: Drafter | None) -> Iterator[Piece]:
        return stream(
            loaded, [[{"role": "user", "content": text}]] if chat else text, drafter, max_new_tokens=max_new_tokens,
            # with no sampling options the model's own generation_config applies
            sampling=None if sampling == Sampling() else sampling, stop=stop or (),
            policy=serving.policy, verification=serving.verification, allow_lossy=serving.allow_lossy,
        )  # fmt: skip

    if streamed.is_coloured():
        streamed.write(text, "dim")
    drafted = streamed.timed(pieces(built), lambda piece: streamed.show(piece, loaded))
    sys.stdout.write("\n")
    if built is None:
        _remark_pace(drafted)
        return
    if streamed.is_coloured():
        console.note.print(Text.assemble(("drafted and accepted", streamed.DRAFTED), ", plain: the target's own"))
    if console.out.is_terminal if compare is None else compare:
        console.remark("again without the drafter, to compare ...", "dim")
        with console.stopping("the text above is complete"):
            _remark_pace(drafted, streamed.timed(pieces(None)))
    else:
        _remark_pace(drafted)


def _remark_pace(drafted: Pace, plain: Pace | None = None) -> None:
    line = streamed.in_words(drafted)
    if drafted.tokens_per_s is not None and plain is not None and plain.tokens_per_s is not None:
        ratio = drafted.tokens_per_s / plain.tokens_per_s
        line += f"; without the drafter {plain.tokens_per_s:.1f} tokens/s: {ratio:.2f} times as fast with it"
    console.remark(line, "dim")
