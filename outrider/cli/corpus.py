"""`outrider corpus list`, `stats`, `remove` and `verify`: the texts there are to draft from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, bar, counted, place_of_json, sized, write_json
from outrider.errors import DataError
from outrider.retrieval import corpora
from outrider.retrieval.corpus_files import verify
from outrider.retrieval.suffix_array import Corpus

CorpusName = Annotated[str, typer.Argument(help="Name of the corpus.", show_default=False)]
CorpusFolder = Annotated[
    Path | None, typer.Option("--folder", help="Where corpora are; $OUTRIDER_CORPORA or ~/.local/share/outrider/corpora.")
]


def corpus_list(folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """List the corpora there are."""
    place_of_json(json_to)
    found = [_corpus_row(name, folder) for name in corpora.names(folder)]
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("corpus", "documents", "tokens", "size", "tokenizer", "made", ""):
            table.add_column(column, justify="right" if column in ("documents", "tokens", "size") else "left", overflow="fold")
        for row in found:
            if row["error"] is None:
                sizes = [counted(row["documents"]), counted(row["tokens"]), sized(row["size_bytes"])]
                table.add_row(row["name"], *sizes, row["tokenizer_hash"], row["made"][:10], "")
            else:
                table.add_row(row["name"], "", "", "", "", "", row["error"], style="yellow")
        console.out.print(
            table if found else f"no corpora in {folder or corpora.home()}; make one: outrider corpus add NAME FILES"
        )
    write_json(json_to, found)


def _corpus_row(name: str, folder: Path | None) -> dict[str, Any]:
    """What `corpus list` says of one; `error` where it can't be opened."""
    path = corpora.place(name, folder)
    try:
        header = Corpus.open(path).header
    except DataError as error:
        return {"name": name, "error": str(error)}
    facts = {key: header[key] for key in ("documents", "tokens", "vocabulary", "tokenizer_hash", "made")}
    return {"name": name, "error": None, **facts, "size_bytes": corpora.size_of(path), "folder": str(path)}


def corpus_stats(name: CorpusName, folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """Say what a corpus holds, and which files it was made of."""
    place_of_json(json_to)
    path = corpora.find(name, folder)
    Corpus.open(path)
    row, sources = _corpus_row(name, folder), corpora.sources(path)
    if json_to != "-":
        for key in ("documents", "tokens", "vocabulary", "tokenizer_hash", "made", "folder"):
            console.out.print(f"{key.removesuffix('_hash'):<12}{row[key]}", highlight=False, soft_wrap=True)
        console.out.print(f"{'size':<12}{sized(row['size_bytes'])}", highlight=False)
        console.out.print(
            f"{'files':<12}{len(sources)}, {sized(sum(size for _, size in sources))}; the largest:", highlight=False
        )
        for source, size in sorted(sources, key=lambda source: -source[1])[:10]:
            console.out.print(f"{'':<12}{sized(size):>9}  {source}", highlight=False, markup=False, soft_wrap=True)
    write_json(json_to, row | {"sources": [{"name": source, "size_bytes": size} for source, size in sources]})


def corpus_remove(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Delete a corpus."""
    console.out.print(f"removed {name}, {sized(corpora.remove(name, folder))}", highlight=False)


def corpus_verify(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Read a whole corpus and compare it with its checksums."""
    path = corpora.find(name, folder)
    with bar("bytes", corpora.size_of(path)) as update:
        done = verify(path, update)
    console.out.print(f"{name} is as it was built: {sized(done)} read, every checksum holds", highlight=False)
