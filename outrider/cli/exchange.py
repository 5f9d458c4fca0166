"""`outrider export`, `outrider import`, `outrider formats`: drafters in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.checkpoint import manifest_of, whole
from outrider.cli.console import JsonTo, counted, place_of_json, present, quiet, say, sized, table, write_json
from outrider.export import formats as known
from outrider.targets.load import load_target

TargetOption = Annotated[str | None, typer.Option("--target", help="Where the target is, if not where it was in training.")]


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a trained drafter.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="Format; `outrider formats` lists them.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="New folder to write.", show_default=False)],
    target: TargetOption = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Type of number, where the format has a choice (gguf: f32, f16, bf16).")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Write a drafter in another's format, read it back and compare every weight."""
    quiet()
    place_of_json(json_to)
    manifest = manifest_of(checkpoint)
    loaded = load_target(target or manifest["target"]["name"], compile=False)
    folder = known.export(checkpoint, to, out, loaded, precision)
    rounded = f", rounded to {precision}" if precision else ""
    size = sum(path.stat().st_size for path in folder.iterdir())
    mine = (whole(checkpoint) / "model.safetensors").stat().st_size
    weights = f"{sized(size)} in {folder} (our own weights: {sized(mine)}); every weight reads back equal{rounded}"
    say(f"export    {manifest['kind']} as {to}: {weights}")
    write_json(json_to, {"kind": manifest["kind"], "format": to, "folder": str(folder), "size_bytes": size})


def import_(
    folder: Annotated[Path, typer.Argument(help="Folder of a draft model in another's format.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="New checkpoint folder.", show_default=False)],
    target: Annotated[str, typer.Option("--target", help="The target it drafts for: `demo`, a folder, or a hub id.")],
    format: Annotated[str | None, typer.Option("--format", help="Unless given, found by its config.json.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Kind of drafter, where config.json does not name it.")] = None,
) -> None:
    """Make a checkpoint of a draft model in another's format; nothing in it is executed."""
    quiet()
    model = known.import_folder(folder, out, load_target(target, compile=False), format, kind)
    size = counted(sum(weight.numel() for weight in model.parameters()))
    say(f"import    {model.config.kind} with {size} parameters, taps {list(model.taps)}; checkpoint in {out}")


def formats(json_to: JsonTo = None) -> None:
    """List which methods can be written and read in which format."""
    quiet()
    place_of_json(json_to)
    rows, shown = known.matrix(), table("format", "method", "export", "import", "layer numbers")
    for row in rows:
        ways = ("yes" if row[way] else "–" for way in ("export", "import"))
        shown.add_row(row["format"], row["kind"], *ways, f"ours + {row['shift']}" if row["shift"] else "as ours")
    present(json_to, rows, shown)
