"""`outrider export`, `outrider import`, `outrider formats`: drafters in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.checkpoint import whole
from outrider.cli.console import counted, place_of_json, present, quiet, say, sized, table, write_json
from outrider.cli.options import JsonTo
from outrider.engines import card, names
from outrider.engines import export as exporting
from outrider.engines.engine import engine_name
from outrider.errors import ConfigError
from outrider.export import reading
from outrider.export.target import export_target, is_model, pass_on
from outrider.formats.gguf.file import DEFAULT
from outrider.loading import describe, find_folder
from outrider.targets import catalog
from outrider.targets.gguf.files import locate
from outrider.targets.load import load_target
from outrider.targets.sketch import sketch

TargetOption = Annotated[
    str | None, typer.Option("--target", help="Location of the target, if it moved since training.")
]
Folder = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a published draft model: folder, GGUF file or Hugging Face id.", show_default=False
    ),
]


def export(
    checkpoint: Folder,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="ENGINE|FORMAT",
            help="vllm, sglang, … or a format; `outrider formats` lists both.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="New folder to write.", show_default=False)],
    target: TargetOption = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="Number type for GGUF: f32, f16, bf16, q8_0, q4_0 or q4_k."),
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Export a drafter for an engine or in another format, read it back and compare every weight.

    --to gguf also exports a target: `demo`, or the folder or Hugging Face id of a Qwen3 or Llama, in its stored
    precision; a GGUF file is copied unchanged.
    """
    quiet()
    place_of_json(json_to)
    if target is None and is_target(checkpoint):
        _export_target(checkpoint, to, out, precision, json_to)
        return
    source = describe(checkpoint)
    chosen = names.chosen(to, source.kind)
    if chosen.engine is not None:
        say(f"export    {to} reads {source.kind} in the layout of {chosen.format}")
    folder = exporting.export(source, to, out, target, precision)
    rounded = f", rounded to {precision}" if precision else ""
    size = sum(path.stat().st_size for path in folder.iterdir())
    weights = whole(source.folder) / "model.safetensors"
    original = f" (our own weights: {sized(weights.stat().st_size)})" if source.format is None else ""
    say(
        f"export    {source.kind} as {chosen.text}: {sized(size)} in {folder}{original}; every weight reads back "
        f"equal{rounded}"
    )
    say(f"          {folder / card.NAME} is its model card: add the licence before you publish it")
    summary = {
        "kind": source.kind,
        "format": chosen.format,
        "engine": chosen.engine,
        "folder": str(folder),
        "size_bytes": size,
    }
    write_json(json_to, summary)


def is_target(name: str) -> bool:
    """Whether a name is a target: `demo`, or a language model whose config does not name a target to draft for."""
    if name in catalog.NAMES and not Path(name).exists():
        return True
    if (files := locate(name)) is not None:
        return is_model(files)
    source = describe(name)
    return source.kind == "small_model" and source.format == "transformers" and not source.manifest


def _export_target(name: str, to: str, out: Path, precision: str | None, json_to: JsonTo) -> None:
    if engine_name(to) != "llamacpp":
        raise ConfigError(
            f"{name} is a target, which {to} reads unchanged; to draft with it, name its target: --target"
        )
    files = locate(catalog.checkpoint(name))
    if files is not None:
        if precision is not None:
            raise ConfigError(f"{name} is a GGUF file, which is copied unchanged; leave out --precision {precision}")
        folder, how = pass_on(name, files, out), "copied unchanged"
    else:
        # a CPU loads bfloat16 as float32, which would double the file for nothing
        stored = precision or DEFAULT.get(sketch(name).spec.dtype)
        folder = export_target(load_target(name, compile=False), out, stored)
        how = "every weight reads back equal" + (f", rounded to {precision}" if precision else "")
    size = sum(path.stat().st_size for path in folder.iterdir())
    say(f"export    target {name} as gguf: {sized(size)} in {folder}; {how}")
    write_json(json_to, {"kind": "target", "format": "gguf", "engine": "llamacpp", "folder": str(folder),
                         "size_bytes": size})  # fmt: skip


def import_(
    folder: Annotated[
        str, typer.Argument(help="A published draft model: folder or Hugging Face id.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", help="New checkpoint folder.", show_default=False)],
    target: Annotated[
        str, typer.Option("--target", help="The target it drafts for: `demo`, `smollm2`, a folder, or a hub id.")
    ],
    format: Annotated[
        str | None, typer.Option("--format", help="Format; detected from config.json unless given.")
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Drafter kind, if config.json does not name it.")] = None,
) -> None:
    """Convert a published draft model to a checkpoint; none of its code is run."""
    quiet()
    model = reading.import_folder(find_folder(folder), out, load_target(target, compile=False), format, kind)
    size = counted(sum(weight.numel() for weight in model.parameters()))
    say(f"import    {model.config.kind} with {size} parameters, taps {list(model.taps)}; checkpoint in {out}")


def formats(json_to: JsonTo = None) -> None:
    """List the formats for export and import by drafter kind, the engines that read them, and engine names."""
    quiet()
    place_of_json(json_to)
    rows, shown = names.rows(), table("format", "method", "export", "import", "engines", "layer numbers")
    for row in rows:
        ways = ("yes" if row[way] else "–" for way in ("export", "import"))
        numbers = f"ours + {row['shift']}" if row["shift"] else "as ours"
        shown.add_row(row["format"], row["kind"], *ways, ", ".join(row["engines"]) or "–", numbers)
    engines = table("engine", "version", "also called")
    for engine in names.engines():
        engines.add_row(engine["engine"], engine["version"], ", ".join(engine["names"]))
    present(json_to, rows, shown, "", engines)
