"""`outrider tasks`: the prompt sets to measure on, where each comes from, how much of it is used, how it is scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, place_of_json, quiet, write_json
from outrider.measure.tasks import listed

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", help="Folder with gsm8k.jsonl and so on, taken instead of the hub."),
]
SCORED = {"answer": "the answer", "tests": "tests", None: "-"}


def tasks(data: Data = None, json_to: JsonTo = None) -> None:
    """List the prompt sets there are, and with --data what a folder holds of them."""
    quiet()
    place_of_json(json_to)
    found = listed(data)
    if json_to != "-":
        console.out.print(_table(found, data is not None))
        console.out.print(
            "prompts: used by the published evaluation, of all there are.  Also: stdlib, and any FILE.jsonl or FILE.txt",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )
        if data is not None:
            held = sum(entry["found"] is not None for entry in found)
            console.out.print(f"{data} holds {held} of {len(found)}; the others come from where they are published")
    write_json(json_to, found)


def _table(found: list[dict[str, Any]], with_folder: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("prompts", justify="right", no_wrap=True)
    for column in ("source", "scored by", "found" if with_folder else "licence"):
        table.add_column(column, overflow="fold")
    for entry in found:
        last = "" if with_folder else entry["licence"]
        if entry["found"] is not None:
            names = entry["found"].split(", ")
            what = Path(names[0]).name if len(names) == 1 else f"{len(names)} files"
            unscored = ", no references" if entry["score"] and not entry["references"] else ""
            last = f"{entry['found_rows']} in {what}{unscored}"
        pinned = f" at {entry['revision'][:12]}" if entry["revision"] else ""
        count = f"{entry['used']} of {entry['rows']}"
        table.add_row(entry["name"], count, entry["source"] + pinned, SCORED[entry["score"]], last)
    return table
