"""`outrider corpus add`: a corpus of texts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import console
from outrider.cli.console import bar, counted, sized
from outrider.cli.corpus import CorpusFolder, CorpusName
from outrider.data import corpus
from outrider.errors import DataError
from outrider.retrieval import corpora


def corpus_add(
    name: CorpusName,
    files: Annotated[list[Path], typer.Argument(help="Text, .jsonl with a `text` a row, or folders.", show_default=False)],
    target: Annotated[str, typer.Option(help="Whose tokenizer: `demo`, a folder, or a Hugging Face id.")] = "demo",
    folder: CorpusFolder = None,
    skip_binary: Annotated[bool, typer.Option("--skip-binary", help="Leave files out that are not UTF-8 text.")] = False,
) -> None:
    """Make a corpus of texts, in the place of one of that name."""
    plan = corpus.planned(name, files, target, folder, skip_binary=skip_binary)
    free = shutil.disk_usage(plan.disk).free
    if plan.size_bytes > free:
        raise DataError(
            f"corpus {name!r} needs about {sized(plan.size_bytes)} for {counted(plan.tokens)} tokens, {plan.disk} has "
            f"{sized(free)} left; name fewer files, or another --folder"
        )
    replaces = ", in the place of the one there is" if plan.replaces else ""
    console.out.print(
        f"corpus    {name}: {len(plan.files)} files, {sized(plan.characters)}; about {counted(plan.tokens)} tokens, "
        f"{sized(plan.size_bytes)} on disk, {sized(plan.memory_bytes)} of memory, {plan.seconds:.0f} s{replaces}",
        highlight=False,
        soft_wrap=True,
    )
    began = time.perf_counter()
    with bar("characters", plan.characters) as update, _untouched(name):
        header = corpus.build(
            plan, update, lambda stage, tokens: update(plan.characters, f"{stage} {counted(tokens)} tokens")
        ).header
    left_out = f", {len(plan.left_out)} files left out, not UTF-8 text" if plan.left_out else ""
    console.out.print(
        f"          {counted(header['documents'])} documents, {counted(header['tokens'])} tokens in "
        f"{time.perf_counter() - began:.0f} s{left_out}; {sized(corpora.size_of(plan.path))} in {plan.path}",
        highlight=False,
        soft_wrap=True,
    )


@contextmanager
def _untouched(name: str) -> Iterator[None]:
    """Ctrl-C says that a build which was stopped leaves nothing."""
    try:
        yield
    except KeyboardInterrupt:
        console.note.print(f"\nstopped; of corpus {name} nothing was changed", highlight=False)
        raise SystemExit(130) from None
