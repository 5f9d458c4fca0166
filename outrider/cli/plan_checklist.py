"""`outrider plan --checklist`: roll-out status, and the commands for what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from outrider.cli import console
from outrider.cli.console import say, write_json
from outrider.runs.rollout import checklist, files

STYLES = {"done": "green", "failed": "red", "out of date": "yellow"}


def show_checklist(folder: Path, log: Path | None, json_to: str | None) -> None:
    """Print the list and write it as JSON.  Exit code 1 unless everything is done."""
    run = files.read(folder, files.LOG if log is None else str(log))
    items = checklist.items(run)
    done = sum(item.state == "done" for item in items)
    if json_to != "-":
        weights = f"weights {run.weights}" if run.weights else "no weights"
        say(f"checklist {run.folder}: {run.kind} for {run.target}, {weights}; {done} of {len(items)} done")
        for item in items:
            say(f"{item.name:<12}{item.state}: {item.reason}", STYLES.get(item.state))
            for command in item.commands if item.state != "done" else ():
                print(f"            {console.written(command)}", file=console.out.file)  # unwrapped
        if log is None:
            say(f"          replace {files.LOG} by a log of your requests, or name it with --log")
    content: dict[str, Any] = {
        "outrider_checklist": 1, "run": str(run.folder), "kind": run.kind, "target": run.target,
        "draft": run.draft, "weights": run.weights,
        "is_done": done == len(items), "items": [item._asdict() for item in items],
    }  # fmt: skip
    write_json(json_to, content)
    if done < len(items):
        raise typer.Exit(1)
