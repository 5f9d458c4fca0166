"""Shell completion of option values: drafter kinds, tasks, engines and formats.  Imports no verb."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer


def kinds() -> list[str]:
    """Drafter kinds."""
    from outrider import drafters  # here and below: imported only for completion

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
    """Values of `--to`."""
    return sorted({*engines(), *formats()})


def tasks(incomplete: str) -> list[str]:
    """Evaluation tasks; completes the next one after a comma."""
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
    """A command with only the last of these options, to complete its value; None for other options."""
    complete = OPTIONS.get(words[-1]) if words else None
    if complete is None:
        return None
    alone = typer.Typer(add_completion=False)

    @alone.command()
    def _(value: Annotated[str, typer.Option(words[-1], autocompletion=complete)] = "") -> None: ...

    return typer.main.get_command(alone)
