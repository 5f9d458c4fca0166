"""`outrider drafters`: the drafters there are."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, write_json
from outrider.drafters import summaries


def drafters(json_to: JsonTo = None) -> None:
    """List the drafters there are, own and of other distributions."""
    found = summaries()
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("kind", "trains", "taps", "summary"):
            table.add_column(column)
        for entry in found:
            trains, taps = ("yes" if entry[key] else "no" for key in ("trains", "taps"))
            table.add_row(escape(entry["kind"]), trains, taps, escape(entry["summary"]))
        console.out.print(table)
    write_json(json_to, found)
