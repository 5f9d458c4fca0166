"""`outrider learning log` and `undo`: history and rollback of a drafter that learns while it serves."""

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, present, say
from outrider.cli.options import JsonTo
from outrider.serve.learning.folder import Folder

LearnedFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder of serve.learning.folder.", show_default=False)
]


def learning_log(folder: LearnedFolder, json_to: JsonTo = None) -> None:
    """Show training runs, comparisons, updates and rollbacks, oldest first."""
    place_of_json(json_to)
    learned = Folder(folder)
    events, version = learned.events(), learned.state().version
    table = console.table("time", "version", "what", "figures", right=("version",))
    for event in events:
        table.add_row(event["time"], str(event.get("version", "")), event["event"], _figures(event))
    last = f"version {version} is served; the checkpoint is {learned.current}"
    present(json_to, {"version": version, "events": events}, table if events else "nothing was trained yet", last)


def learning_undo(
    folder: LearnedFolder,
    to: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Version to go back to; 0 is the original drafter.  Default: the previous one.",
        ),
    ] = None,
) -> None:
    """Go back to an earlier version of the drafter; a running server loads it within seconds."""
    before, now = Folder(folder).undo(to)
    say(f"version {now} is served instead of {before}; later versions are not used again")


def _figures(event: dict[str, Any]) -> str:
    if event["event"] in ("passed", "refused"):
        return f"{event['reason']}; trained on {event['texts']:,} texts, tried on {event['prompts']} prompts"
    if "tokens_per_draft" in event:
        old, new = (event["tokens_per_draft"][side] for side in ("old", "new"))
        back = f", version {event['to']} is served again" if "to" in event else ""
        return f"tokens per draft {old:.2f} before, {new:.2f} since, over {event['texts']} texts{back}"
    if "to" in event:
        return f"version {event['to']} is served again"
    return str(event.get("reason", ""))
