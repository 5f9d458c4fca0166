"""`outrider show`: a run file with all defaults resolved, and the settings of run files."""

import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import sized
from outrider.cli.options import JsonTo, Overrides
from outrider.errors import ConfigError
from outrider.runs import settings
from outrider.runs.settings import Section, Setting

RunFile = Annotated[Path | None, typer.Argument(metavar="FILE", help="Run file (YAML).", show_default=False)]
HelpSettings = Annotated[
    bool, typer.Option("--help-settings",
    help="List settings instead: all, or those of run, target, prepare, train, "
                                               "evaluate, or `drafter KIND`, in place of FILE.")
]  # fmt: skip
Markdown = Annotated[bool, typer.Option("--markdown", help="Print these settings as Markdown, as in docs/settings.md.")]
JsonSchema = Annotated[bool, typer.Option("--json-schema", help="Print the JSON schema of run files, for editors.")]


def show(
    file: RunFile = None, overrides: Overrides = None, help_settings: HelpSettings = False, markdown: Markdown = False,
    json_schema: JsonSchema = False, json_to: JsonTo = None,
) -> None:  # fmt: skip
    """Show a run file with all defaults resolved, the origin of each value, and the size of its drafter."""
    if json_schema:
        print(json.dumps(settings.schema(), indent=1))
    elif help_settings:
        _print_settings([str(file), *(overrides or ())] if file else [], markdown, json_to)
    elif file is None:
        raise ConfigError("show needs a run file; `outrider show --help-settings` lists its settings")
    else:
        _print_run(file, overrides or [], json_to)


def _print_run(file: Path, overrides: list[str], json_to: str | None) -> None:
    from outrider.runs.forecast.sizes import shown  # loads torch, which the settings do not need

    resolved, notes = shown(file, overrides)
    table = console.table("setting", "value", "from")
    for one in resolved:
        remark = f" ({one.here} here)" if one.here else f" ({sized(one.value)})" if one.is_bytes else ""
        style = "dim" if one.origin == "default" else ""
        table.add_row(one.key, json.dumps(one.value) + remark, one.origin, style=style)
    rows = {
        one.key: {"value": one.value, "from": one.origin} | ({"here": one.here} if one.here else {}) for one in resolved
    }
    console.present(json_to, rows, table)
    for note in notes:
        console.remark(note, "yellow")


def _print_settings(words: list[str], markdown: bool, json_to: str | None) -> None:
    """words: nothing or `all`, a section, a kind, or `drafter` and a kind."""
    names = [word for word in words if word not in ("all", "drafter")]
    sections = [settings.section(name) for name in names] or settings.sections()
    if markdown:
        print(page(sections), end="")
        return
    tables = [shown for one in sections for shown in (heading(one), settings_table(one))]
    console.present(json_to, {one.name: [setting._asdict() for setting in one.settings] for one in sections}, *tables)


def title(section: Section) -> str:
    if section.name == "run":
        return "run file"
    return section.name if section.name in settings.SECTIONS else f"drafter {section.name}"


def heading(section: Section) -> str:
    return "\n" + textwrap.fill(f"{title(section)}: {section.summary}", console.out.width, break_long_words=False)


def settings_table(section: Section) -> console.PlainTable:
    """The settings of a section as a table."""
    table = console.table("setting", "type", "default", "meaning")
    for setting in section.settings:
        table.add_row(*setting)
    return table


PAGE = """# Settings

Every setting of a run file: its type, its default, and its meaning. [run.md](run.md) explains run files. A drafter's
setting whose default is *from the target* is read from the target's config.

`outrider show --help-settings train` and `outrider drafters dspark` print the same in the terminal. This page is the
output of `outrider show --help-settings all --markdown`; it comes from the docstrings under the fields of each
`Config`.
"""
TABLE = "| setting | type | default | meaning |\n|---|---|---|---|"


def _default(setting: Setting) -> str:
    return setting.default if setting.default in settings.IN_WORDS else f"`{setting.default}`"


def page(sections: list[Section]) -> str:
    """The settings of these sections as a Markdown page."""
    parts = [PAGE]
    for one in sections:
        cells = [[f"`{setting.name}`", setting.type, _default(setting), setting.meaning] for setting in one.settings]
        rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
        parts.append("\n".join([f"## {title(one)}\n", one.summary, "", TABLE, *rows]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
