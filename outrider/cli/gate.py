"""`outrider gate`: decide from two reports whether a drafter may ship; prints a table and sets an exit code for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, write_json
from outrider.cli.options import JsonTo
from outrider.errors import ConfigError, DataError
from outrider.gate.outcome import GateOutcome
from outrider.gate.policy import policy_of
from outrider.gate.statistics.noise import neighbours
from outrider.gate.verdict import gate as judge
from outrider.report.schema import Report, write_whole


def gate(
    candidate: Annotated[Path, typer.Argument(help="report.json of the candidate, or its folder.", show_default=False)],
    baseline: Annotated[
        Path, typer.Option(help="report.json of the current drafter, or its folder.", show_default=False)
    ],
    policy: Annotated[Path | None, typer.Option(help="Tolerances (YAML); the built-in policy unless given.")] = None,
    aa: Annotated[
        list[str] | None,
        typer.Option(metavar="A.json,B.json", help="Reports of the same drafter, to estimate noise; can be repeated."),
    ] = None,
    allow_other_machine: Annotated[
        bool, typer.Option("--allow-other-machine", help="Compare across machines, without times.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML, with a case per rule.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write Markdown for a pull request.")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Decide whether a drafter may ship, by comparing its report with a baseline.

    Exit code 0: yes, 1: no, 2: the reports can't be compared, 3: too few prompts to tell.
    """
    # 1 means that the drafter must not ship, so all other errors exit with 2
    try:
        place_of_json(json_to)
        for place in (junit, markdown):
            if place is not None and not place.absolute().parent.is_dir():
                raise DataError(f"can't write {place}: no such folder; name a file in a folder that exists")
        rules = policy_of(policy)
        refusal = None
        try:
            new, old = Report.load(candidate), Report.load(baseline)
            alike = [pair for group in aa or [] for pair in neighbours(group)]
            console.remark(f"comparing {candidate} with {baseline}")
            outcome = judge(new, old, rules, alike=alike, allow_other_machine=allow_other_machine)
            _say(outcome)
        except DataError as error:
            refusal, outcome = error, GateOutcome.refused(str(error))
        for place, text in ((junit, outcome.junit()), (markdown, outcome.markdown())):
            if place is not None:
                write_whole({place: text})
                console.say(f"written   {place}")
        write_json(json_to, outcome.as_json())
        if refusal is not None:
            raise refusal
    except DataError as error:
        raise ConfigError(str(error)) from None
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _say(outcome: GateOutcome) -> None:
    """Print the table, notes, and the decision last."""
    console.show(outcome.table())
    for note in outcome.notes:
        console.say(note)
    if outcome.sigma is not None and outcome.prompts_needed:
        needed = ", ".join(f"{prompts:,} for {loss:.0%}" for loss, prompts in outcome.prompts_needed)
        console.say(
            f"speed     standard deviation {outcome.sigma:.3f} per prompt; prompts needed to detect a loss in four of "
            f"five runs, among {outcome.tests} tests: {needed}"
        )
    styles = {"pass": "green", "warn": "yellow", "underpowered": "yellow"}
    console.say(outcome.headline, styles.get(outcome.verdict, "bold white on red"))
