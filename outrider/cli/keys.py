"""`outrider keys add`, `list` and `revoke`: API keys of a server."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, present, say
from outrider.cli.options import JsonTo
from outrider.serve.http import keys

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="File with the hashes of the keys.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Owner of the key.", show_default=False)]


def keys_add(
    file: KeyFile,
    name: Name,
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests; the server's limit unless given.")
    ] = None,
) -> None:
    """Create a key and print it once; the file stores only its hash."""
    key = keys.add(file, name, concurrent)
    console.remark(f"key of {name}, which is shown only once; {file} stores its hash", "dim")
    print(key, file=console.out.file)  # `say` would mask it


def keys_list(file: KeyFile, json_to: JsonTo = None) -> None:
    """List the owners of keys."""
    place_of_json(json_to)
    key_rows = [key.model_dump(exclude={"salt", "sha256"}) for key in keys.read(file)]
    table = console.table("name", "made", "requests at once", right=("requests at once",))
    for one in key_rows:
        table.add_row(one["name"], one["made"], str(one["concurrent"] or "the server's"))
    present(json_to, key_rows, table if key_rows else f"{file} holds no key")


def keys_revoke(file: KeyFile, name: Name) -> None:
    """Revoke a key; a running server refuses it immediately."""
    keys.revoke(file, name)
    say(f"the key of {name} is no longer in {file}")
