"""`outrider gate`: may this draft ship?  Compares two reports; gives a table, an exit code, and files for a CI
server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import JsonTo, place_of_json, write_json
from outrider.errors import ConfigError, DataError
from outrider.gate.noise import neighbours
from outrider.gate.outcome import Outcome
from outrider.gate.policy import policy_of
from outrider.gate.verdict import gate as judge
from outrider.report.schema import Report, write_whole


def gate(
    candidate: Annotated[Path, typer.Argument(help="report.json of what may ship, or its folder.", show_default=False)],
    baseline: Annotated[Path, typer.Option(help="report.json of what ships now, or its folder.", show_default=False)],
    policy: Annotated[Path | None, typer.Option(help="What is tolerated (YAML); without, the built-in policy.")] = None,
    aa: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A.json,B.json", help="Reports of the same draft, to learn noise from; may be given again."
        ),
    ] = None,
    allow_other_machine: Annotated[
        bool, typer.Option("--allow-other-machine", help="Compare across machines; times are left out.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML, a case for every rule.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write Markdown for a pull request.")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """May this draft ship?  Compare its report with a baseline's.  Exit code 0: yes, 1: no, 2: they can't be
    compared."""
    try:
        place_of_json(json_to)
        for place in (junit, markdown):
            if place is not None and not place.absolute().parent.is_dir():
                raise DataError(f"can't write {place}: no such folder; name a file in a folder that exists")
        rules = policy_of(policy)
        new, old = Report.load(candidate), Report.load(baseline)
        alike = [pair for group in aa or [] for pair in neighbours(group)]
        console.note.print(f"comparing {candidate} with {baseline}", markup=False, highlight=False)
        outcome = judge(new, old, rules, alike=alike, allow_other_machine=allow_other_machine)
        _say(outcome)
        for place, text in ((junit, outcome.junit()), (markdown, outcome.markdown())):
            if place is not None:
                write_whole({place: text})
                console.out.print(f"written   {place}", markup=False, highlight=False)
        write_json(json_to, outcome.as_json())
        # 1 is for a draft that must not ship; what was never judged, or not written, is wrong use
    except DataError as error:
        raise ConfigError(str(error)) from None
    if outcome.stops:
        raise typer.Exit(1)


def _say(outcome: Outcome) -> None:
    """Table, notes, and the verdict last, where a reader looks."""
    console.out.print(outcome.table())
    for note in outcome.notes:
        console.out.print(note, markup=False, highlight=False)
    if outcome.sigma is not None and outcome.prompts_needed:
        needed = ", ".join(f"{prompts:,} for {loss:.0%}" for loss, prompts in outcome.prompts_needed)
        console.out.print(
            f"speed     standard deviation {outcome.sigma:.3f} per prompt; prompts that show a loss four times in five, "
            f"among {outcome.tests} tests: {needed}",
            markup=False, highlight=False,
        )  # fmt: skip
    style = "bold white on red" if outcome.stops else "yellow" if outcome.verdict == "warn" else "green"
    console.out.print(outcome.headline, style=style, markup=False, highlight=False, soft_wrap=True)
