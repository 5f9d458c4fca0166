"""`outrider deploy`: the command that serves a draft in an engine, and deployment files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import place_of_json, quiet, remark, say, write_json
from outrider.cli.options import JsonTo
from outrider.engines import commands, manifests
from outrider.engines.commands import Command
from outrider.engines.engine import Draft, Wish, engine_name, engine_of

TargetOption = Annotated[
    str | None, typer.Option("--target", help="Target (hub id, folder or GGUF file), if it differs from training.")
]
KindOption = Annotated[str | None, typer.Option("--kind", help="Drafter kind, if the folder does not name it.")]
FormatOption = Annotated[str | None, typer.Option("--format", help="Format, if the folder does not name it.")]
PythonOption = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="Python of the engine's environment, to look up its version."),
]
VersionOption = Annotated[
    str | None, typer.Option("--engine-version", help="Version of the engine, instead of looking it up.")
]
ParallelOption = Annotated[int, typer.Option("--tensor-parallel", help="Number of GPUs that share the target.")]


def deploy(
    draft: Annotated[
        str, typer.Argument(help="Exported or published folder, or its id; ngram, suffix, mtp.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="ENGINE", help="vllm, sglang, trtllm, llama.cpp, transformers or triton."),
    ],
    target: TargetOption = None,
    tokens: Annotated[
        int | None, typer.Option(help="Draft tokens per step; 0 disables drafting.  Default: the draft's own.")
    ] = None,
    width: Annotated[int, typer.Option(help="Children per tree node; 1 is a chain.")] = 1,
    cutoff: Annotated[
        float | None, typer.Option(help="Stop the draft before a token with a lower probability.")
    ] = None,
    schedule: Annotated[Path | None, typer.Option(metavar="FILE", help="Draft length by load: tune.json.")] = None,
    tensor_parallel: ParallelOption = 1,
    port: Annotated[int | None, typer.Option(help="Port; the engine's default unless given.")] = None,
    kind: KindOption = None,
    format: FormatOption = None,
    python: PythonOption = None,
    engine_version: VersionOption = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print only the command.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the command, Kubernetes and compose files, and a dashboard here."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the deployment, for --out.")] = "outrider",
    image: Annotated[str | None, typer.Option(help="Container image, for --out.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs per container, for --out; defaults to --tensor-parallel.  0: CPU only."),
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Print the command that serves a draft in an engine, and write deployment files."""
    quiet()
    place_of_json(json_to)
    to, deployed = engine_name(to), commands.draft_of(draft, target, kind, format)
    version = engine_version or (None if python is None else commands.installed(to, python))
    wish = Wish(tokens, width, cutoff, port=port, tensor_parallel=tensor_parallel)
    if schedule is not None:
        wish = commands.scheduled(to, wish, schedule)
    if out is not None:
        wish = replace(wish, files=f"{out}/settings")
    command = commands.command(to, deployed, wish, version)
    if command.files and out is None and to != "transformers":
        remark(f"          it reads {', '.join(command.files)}, which --out FOLDER writes")
    _say(deployed, command, only_print)
    if out is not None:
        place = manifests.Place(name, image, gpus=wish.tensor_parallel if gpus is None else gpus)
        remark(f"          written to {out}: {', '.join(manifests.write(out, to, deployed, wish, place, version))}")
    write_json(json_to, command.plain(deployed))


def _say(draft: Draft, command: Command, only_print: bool) -> None:
    if not only_print:
        what = draft.kind if draft.folder is None else f"{draft.kind} in {draft.place} ({draft.format})"
        assumed = " (assumed version)" if command.is_assumed else ""
        title = f"{engine_of(command.engine).title} {command.version.removeprefix('vLLM ')}{assumed}"
        say(f"deploy    {what} for {draft.target}, with {title}")
        for note in command.notes:
            say(f"          {note}")
        if command.before is not None:
            say("          first:")
            print(console.written(command.before), file=console.out.file)
    # unwrapped, so that it can be pasted
    print(console.written(command.shell), file=console.out.file)
    if command.engine == "transformers" and not only_print:
        print("\n".join(f"# {name}\n{text}" for name, text in command.files.items()), file=console.out.file)
