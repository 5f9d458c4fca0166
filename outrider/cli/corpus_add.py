"""`outrider corpus add`: build a corpus of texts."""

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import bar, counted, say, sized, stopping
from outrider.cli.corpus import CorpusFolder, CorpusName
from outrider.data import corpus
from outrider.errors import DataError
from outrider.retrieval.corpus import corpora


def corpus_add(
    name: CorpusName,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Text, .jsonl with a `text` per row, or folders; hidden and gitignored files are skipped.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str, typer.Option(help="Target whose tokenizer is used: `demo`, `smollm2`, a folder, or a Hugging Face id.")
    ] = "demo",
    folder: CorpusFolder = None,
    skip_binary: Annotated[bool, typer.Option("--skip-binary", help="Skip files that are not UTF-8 text.")] = False,
) -> None:
    """Build a corpus from texts; replaces one of the same name."""
    plan = corpus.planned(name, files, target, folder, skip_binary=skip_binary)
    free = shutil.disk_usage(plan.disk).free
    if plan.size_bytes > free:
        needs = f"{sized(plan.size_bytes)} for {counted(plan.tokens)} tokens, {plan.disk} has {sized(free)} left"
        raise DataError(f"corpus {name!r} needs about {needs}; name fewer files, or another --folder")
    replaces = ", replaces the existing one" if plan.path.exists() else ""
    say(
        f"corpus    {name}: {len(plan.files)} files, {sized(plan.characters)}; about {counted(plan.tokens)} tokens, "
        f"{sized(plan.size_bytes)} on disk, {sized(plan.memory_bytes)} of memory, {plan.seconds:.0f} s{replaces}"
    )
    if plan.ignored:
        say(f"          left out: {', '.join(f'{count} {reason}' for reason, count in sorted(plan.ignored.items()))}")
    began = time.perf_counter()
    with bar("characters", plan.characters) as update, stopping(f"corpus {name} is unchanged"):
        on_stage = lambda stage, tokens: update(plan.characters, f"{stage} {counted(tokens)} tokens")
        header = corpus.build(plan, update, on_stage).header
    left_out = f", {len(plan.left_out)} files left out, not UTF-8 text" if plan.left_out else ""
    say(
        f"          {counted(header['documents'])} documents, {counted(header['tokens'])} tokens in "
        f"{time.perf_counter() - began:.0f} s{left_out}; {sized(corpora.size_of(plan.path))} in {plan.path}"
    )
