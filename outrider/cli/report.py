"""The verb `report`: a page again from its report.json, or several reports against one another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import console
from outrider.cli.console import JsonTo, place_of_json, write_json
from outrider.errors import DataError

if TYPE_CHECKING:
    from outrider.report.schema import Report

Reports = Annotated[
    list[Path],
    typer.Argument(help="A report.json or its folder: one to write its page again, more to compare.", show_default=False),
]
Out = Annotated[Path | None, typer.Option(help="Where the page goes.", show_default="beside the report; comparison.html")]


def report(paths: Reports, out: Out = None, json_to: JsonTo = None) -> None:
    """Write a report's page again, or compare reports with the first of them, prompt by prompt."""
    place_of_json(json_to)
    if out is not None and not out.absolute().parent.is_dir():
        raise DataError(f"can't write {out}: no such folder; name a file in a folder that exists")
    from outrider.report.schema import Report

    found = [(name, Report.load(path)) for name, path in zip(names(paths), paths, strict=True)]
    if len(found) == 1:
        _page(paths[0], found[0][1], out, json_to)
    else:
        _comparison(found, out or Path("comparison.html"), json_to)


def names(paths: list[Path]) -> list[str]:
    """A short name for each path: its folder where the file is report.json, else its stem; longer where two are equal."""
    places = [path.absolute().parent if path.name == "report.json" else path.absolute() for path in paths]
    parts = [(*place.parts[:-1], place.name if place.is_dir() else place.stem) for place in places]
    for length in range(1, max(len(part) for part in parts) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def _page(path: Path, found: Report, out: Path | None, json_to: str | None) -> None:
    from outrider.report.compare import write_page

    beside = path / "report.html" if path.is_dir() else path.with_suffix(".html")
    console.out.print(found.table())
    console.out.print(f"          {found.headline()}", highlight=False, soft_wrap=True)
    write_page(out or beside, found.html())
    console.out.print(f"          {out or beside}", highlight=False)
    write_json(json_to, found.model_dump(mode="json", by_alias=True))


def _comparison(found: list[tuple[str, Report]], out: Path, json_to: str | None) -> None:
    from outrider.report.compare import Comparison

    console.out.print(f"compare   {', '.join(name for name, _ in found[1:])} with {found[0][0]}", highlight=False)
    comparison = Comparison.of(found)
    console.out.print(comparison.table())
    for text in comparison.warnings():
        console.out.print(f"          {text}", highlight=False, markup=False, soft_wrap=True, style="yellow")
    console.out.print(f"          {comparison.headline()}", highlight=False, markup=False, soft_wrap=True)
    comparison.save(out)
    console.out.print(f"          {out}", highlight=False, markup=False)
    write_json(json_to, comparison.values())
