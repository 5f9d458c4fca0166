"""`outrider keys add`, `list` and `revoke`: who may ask a server."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, present, say
from outrider.cli.options import JsonTo
from outrider.serve.http import keys

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of the keys' hashes.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Whose key it is.", show_default=False)]


def keys_add(
    file: KeyFile,
    name: Name,
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Requests that may run at once; what the server allows unless given.")
    ] = None,
) -> None:
    """Make a key and print it, once: the file has a hash of it alone."""
    key = keys.add(file, name, concurrent)
    console.remark(f"key of {name}, which is shown once; {file} has its hash", "dim")
    say(key)


def keys_list(file: KeyFile, json_to: JsonTo = None) -> None:
    """List the names that have a key."""
    place_of_json(json_to)
    key_rows = [key.model_dump(exclude={"salt", "sha256"}) for key in keys.read(file)]
    table = console.table("name", "made", "requests at once", right=("requests at once",))
    for one in key_rows:
        table.add_row(one["name"], one["made"], str(one["concurrent"] or "the server's"))
    present(json_to, key_rows, table if key_rows else f"{file} holds no key")


def keys_revoke(file: KeyFile, name: Name) -> None:
    """Remove a key; a running server refuses it from then on."""
    keys.revoke(file, name)
    say(f"the key of {name} is no longer in {file}")
