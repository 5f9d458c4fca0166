"""What the shell completes as values of options: kinds of drafters, tasks, engines and formats.  No verb is loaded for
it."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer


def kinds() -> list[str]:
    """Kinds of drafters."""
    from outrider import drafters  # here and below: loaded where they are asked for, not for the help

    return sorted(drafters.kinds())


def engines() -> list[str]:
    """Engines that serve drafters."""
    from outrider.engines.engine import ENGINES

    return list(ENGINES)


def formats() -> list[str]:
    """Formats of exports."""
    from outrider import export

    return export.names()


def engines_and_formats() -> list[str]:
    """What drafters are exported for."""
    return sorted({*engines(), *formats()})


def tasks(incomplete: str) -> list[str]:
    """Tasks to measure on; after a comma the next one."""
    from outrider.measure.tasks.names import BUILT_IN, TASKS

    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in (*BUILT_IN, *TASKS)]


OPTIONS: dict[str, Callable[..., list[str]]] = {
    "--drafter": kinds,
    "--draft": kinds,
    "--kind": kinds,
    "--tasks": tasks,
    "--to": engines_and_formats,
    "--format": formats,
    "--engine": engines,
}


def stand_in(words: Sequence[str]) -> Any:
    """A command that has the option at the end of these words alone, to complete its value; None for other options."""
    complete = OPTIONS.get(words[-1]) if words else None
    if complete is None:
        return None
    alone = typer.Typer(add_completion=False)

    @alone.command()
    def _(value: Annotated[str, typer.Option(words[-1], autocompletion=complete)] = "") -> None: ...

    return typer.main.get_command(alone)
