"""`outrider drafters`: the drafters there are."""

from typing import Any

from rich.markup import escape

from outrider.cli import console
from outrider.cli.console import JsonTo
from outrider.drafters import find, kinds
from outrider.errors import ConfigError


def drafters(json_to: JsonTo = None) -> None:
    """List the drafters there are, own and of other distributions."""
    found, table = [about(kind) for kind in sorted(kinds())], console.table("kind", "trains", "taps", "summary")
    for entry in found:
        trains, taps = ("yes" if entry[key] else "no" for key in ("trains", "taps"))
        table.add_row(escape(entry["kind"]), trains, taps, escape(entry["summary"]))
    console.present(json_to, found, table)


def about(kind: str) -> dict[str, Any]:
    """What its file says of itself; of a drafter that can't be used, why."""
    try:
        module = find(kind)
    except ConfigError as error:
        return {"kind": kind, "summary": str(error), "trains": False, "taps": False}
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    return {"kind": kind, "summary": summary, "trains": hasattr(module, "Model"), "taps": "taps" in module.Config.model_fields}
