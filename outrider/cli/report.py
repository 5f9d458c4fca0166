"""`outrider report`: render a page from report.json, or compare reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, write_json
from outrider.cli.options import JsonTo
from outrider.errors import DataError
from outrider.report import summary, tables
from outrider.report.compare import Comparison, names
from outrider.report.page import render, render_comparison
from outrider.report.schema import Report, write_whole

Reports = Annotated[
    list[Path],
    typer.Argument(help="A report.json or its folder: one to render, several to compare.", show_default=False),
]
Out = Annotated[Path | None, typer.Option(help="Page to write.", show_default="next to the report; comparison.html")]


def report(paths: Reports, out: Out = None, json_to: JsonTo = None) -> None:
    """Render a report, or compare reports with the first one, prompt by prompt."""
    place_of_json(json_to)
    if out is not None and not out.absolute().parent.is_dir():
        raise DataError(f"can't write {out}: no such folder; name a file in a folder that exists")
    reports = [(name, Report.load(path)) for name, path in zip(names(paths), paths, strict=True)]
    if len(reports) == 1:
        _page(
            out or (paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")),
            reports[0][1],
            json_to,
        )
    else:
        _comparison(out or Path("comparison.html"), reports, json_to)


def _page(out: Path, report: Report, json_to: str | None) -> None:
    console.out.print(tables.SummaryTable(report))
    console.say(f"          {summary.headline(report)}")
    write_whole({out: render(report)})
    console.say(f"          {out}")
    write_json(json_to, report.model_dump(mode="json", by_alias=True))


def _comparison(out: Path, reports: list[tuple[str, Report]], json_to: str | None) -> None:
    console.say(f"compare   {', '.join(name for name, _ in reports[1:])} with {reports[0][0]}")
    comparison = Comparison.of(reports)
    console.show(comparison.table())
    for text in comparison.warnings():
        console.say(f"          {text}", "yellow")
    console.say(f"          {comparison.headline()}")
    write_whole({out: render_comparison(comparison)})
    console.say(f"          {out}")
    write_json(json_to, comparison.values())
