"""`outrider drafters`: list drafters, or the settings of one."""

from typing import Annotated, Any

import typer

from outrider.cli import complete, console
from outrider.cli.options import JsonTo
from outrider.cli.show import heading, settings_table
from outrider.drafters import find, kinds, trained
from outrider.errors import ConfigError
from outrider.runs import settings

Kind = Annotated[
    str | None,
    typer.Argument(
        metavar="KIND", help="Print the settings of this drafter.", show_default=False, autocompletion=complete.kinds
    ),
]


CORE, LAB = "core", "lab"


def drafters(kind: Kind = None, json_to: JsonTo = None) -> None:
    """List drafters: those in the core, those in the lab, which may change in any version, and those of other
    distributions.  With KIND, list its settings."""
    if kind is not None:
        _print_settings(kind, json_to)
        return
    table = console.table("kind", "of", "trains", "taps", "summary")
    entries = sorted(map(about, kinds()), key=lambda entry: (entry["of"] == LAB, entry["of"] != CORE, entry["kind"]))
    for entry in entries:
        trains, taps = ("yes" if entry[key] else "no" for key in ("trains", "taps"))
        table.add_row(entry["kind"], entry["of"], trains, taps, entry["summary"])
    console.present(json_to, entries, table)


def _print_settings(kind: str, json_to: str | None) -> None:
    if kind in settings.SECTIONS and kind not in kinds():
        raise ConfigError(
            f"{kind!r} is a section, not a drafter; `outrider show --help-settings {kind}` prints its settings"
        )
    section = settings.section(kind)
    console.present(
        json_to, [setting._asdict() for setting in section.settings], heading(section), settings_table(section)
    )


def about(kind: str) -> dict[str, Any]:
    """Summary of a drafter from its docstring, or why it can't be imported."""
    package, *rest = kinds()[kind].split(".")
    of = package if package != "outrider" else LAB if LAB in rest else CORE
    try:
        module = find(kind)
    except ConfigError as error:
        return {"kind": kind, "of": of, "summary": str(error), "trains": False, "taps": False}
    summary = " ".join((module.__doc__ or "").partition("\n\n")[0].split())
    return {
        "kind": kind,
        "of": of,
        "summary": summary,
        "trains": trained(kind) is not None,
        "taps": "taps" in module.Config.model_fields,
    }
