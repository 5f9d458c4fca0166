"""`outrider show`: a run file with everything resolved."""

from __future__ import annotations

import json

from rich.markup import escape
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, Overrides, Recipe, sized, write_json
from outrider.runs.sizes import shown


def show(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None) -> None:
    """Print a run file with everything resolved, where each value came from, and how large its drafter will be."""
    found, notes = shown(recipe, overrides or ())
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("setting", "value", "from"):
            table.add_column(column, overflow="fold")
        for one in found:
            remark = f" ({one.here} here)" if one.here else f" ({sized(one.value)})" if one.is_bytes else ""
            style = "dim" if one.origin == "default" else ""
            table.add_row(one.key, json.dumps(one.value) + remark, one.origin, style=style)
        console.out.print(table)
    for note in notes:
        console.note.print(f"[yellow]{escape(note)}[/]", highlight=False, soft_wrap=True)
    rows = {one.key: {"value": one.value, "from": one.origin} | ({"here": one.here} if one.here else {}) for one in found}
    write_json(json_to, rows)
