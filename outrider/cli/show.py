"""`outrider show`: a run file with everything resolved."""

import json

from outrider.cli import console
from outrider.cli.console import JsonTo, Overrides, Recipe, sized
from outrider.runs.sizes import shown


def show(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None) -> None:
    """Print a run file with everything resolved, where each value came from, and how large its drafter will be."""
    found, notes = shown(recipe, overrides or ())
    table = console.table("setting", "value", "from", overflow="fold")
    for one in found:
        remark = f" ({one.here} here)" if one.here else f" ({sized(one.value)})" if one.is_bytes else ""
        table.add_row(one.key, json.dumps(one.value) + remark, one.origin, style="dim" if one.origin == "default" else "")
    rows = {one.key: {"value": one.value, "from": one.origin} | ({"here": one.here} if one.here else {}) for one in found}
    console.present(json_to, rows, table)
    for note in notes:
        console.remark(note, "yellow")
