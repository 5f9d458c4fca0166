"""`outrider tasks`: prompt sets for evaluation, with their sources and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, quiet, write_json
from outrider.cli.options import JsonTo
from outrider.measure.tasks.names import BUILT_IN, listed

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", help="Folder with gsm8k.jsonl and so on, used instead of the hub."),
]


def tasks(data: Data = None, json_to: JsonTo = None) -> None:
    """List prompt sets, and with --data the ones in a folder."""
    quiet()
    place_of_json(json_to)
    entries = listed(data)
    if json_to != "-":
        console.show(_table(entries, data is not None))
        sets = f"Also: {', '.join(BUILT_IN)}, and any FILE.jsonl or FILE.txt"
        console.say(f"prompts: the number used by the published evaluation, of the total.  {sets}", "dim")
        if data is not None:
            held = sum(entry["found"] is not None for entry in entries)
            console.say(f"{data} has {held} of {len(entries)}; the others are downloaded from their publishers")
    write_json(json_to, entries)


def _table(entries: list[dict[str, Any]], with_folder: bool) -> console.PlainTable:
    last_column = "found" if with_folder else "licence"
    table = console.table("task", "prompts", "source", last_column, right=["prompts"])
    for entry in entries:
        last = "" if with_folder else entry["licence"]
        if entry["found"] is not None:
            names = entry["found"].split(", ")
            what = Path(names[0]).name if len(names) == 1 else f"{len(names)} files"
            last = f"{entry['found_rows']} in {what}"
        pinned = f" at {entry['revision'][:12]}" if entry["revision"] else ""
        count = f"{entry['used']} of {entry['rows']}"
        table.add_row(entry["name"], count, entry["source"] + pinned, last)
    return table
