"""`outrider corpus list`, `stats`, `remove` and `verify`: text corpora to draft from."""

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import bar, counted, place_of_json, present, say, sized
from outrider.cli.options import JsonTo
from outrider.errors import DataError
from outrider.retrieval.corpus import corpora
from outrider.retrieval.corpus.files import verify
from outrider.retrieval.corpus.suffix_array import Corpus

NUMBERS = ("documents", "tokens", "size")
CorpusName = Annotated[str, typer.Argument(help="Name of the corpus.", show_default=False)]
CorpusFolder = Annotated[
    Path | None,
    typer.Option("--folder", help="Folder of corpora; $OUTRIDER_CORPORA or ~/.local/share/outrider/corpora."),
]


def corpus_list(folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """List corpora."""
    place_of_json(json_to)
    rows = [_corpus_row(name, folder) for name in corpora.names(folder)]
    columns = ("corpus", *NUMBERS, "tokenizer", "made", "")
    table = console.table(*columns, right=NUMBERS)
    for row in rows:
        if row["error"] is None:
            sizes = [counted(row["documents"]), counted(row["tokens"]), sized(row["size_bytes"])]
            table.add_row(row["name"], *sizes, row["tokenizer_hash"], row["made"][:10], "")
        else:
            table.add_row(row["name"], *[""] * 5, row["error"], style="yellow")
    nothing = f"no corpora in {folder or corpora.home()}; make one: outrider corpus add NAME FILES"
    present(json_to, rows, table if rows else nothing)


def _corpus_row(name: str, folder: Path | None) -> dict[str, Any]:
    """A row of `corpus list`; with `error` if the corpus can't be opened."""
    path = corpora.folder_of(name, folder)
    try:
        header = Corpus.open(path).header
    except DataError as error:
        return {"name": name, "error": str(error)}
    facts = {key: header[key] for key in ("documents", "tokens", "vocabulary", "tokenizer_hash", "made")}
    return {"name": name, "error": None, **facts, "size_bytes": corpora.size_of(path), "folder": str(path)}


def corpus_stats(name: CorpusName, folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """Show the contents of a corpus and its source files."""
    place_of_json(json_to)
    path = corpora.find(name, folder)
    Corpus.open(path)
    row, sources = _corpus_row(name, folder), corpora.sources(path)
    keys = ("documents", "tokens", "vocabulary", "tokenizer_hash", "made", "folder")
    lines = [f"{key.removesuffix('_hash'):<12}{row[key]}" for key in keys]
    lines.append(f"{'size':<12}{sized(row['size_bytes'])}")
    lines.append(f"{'files':<12}{len(sources)}, {sized(sum(size for _, size in sources))}; the largest:")
    largest = sorted(sources, key=lambda source: -source[1])[:10]
    lines += [f"{'':<12}{sized(size):>9}  {source}" for source, size in largest]
    facts = row | {"sources": [{"name": source, "size_bytes": size} for source, size in sources]}
    present(json_to, facts, "\n".join(lines))


def corpus_remove(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Delete a corpus."""
    say(f"removed {name}, {sized(corpora.remove(name, folder))}")


def corpus_verify(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Check a corpus against its checksums."""
    path = corpora.find(name, folder)
    with bar("bytes", corpora.size_of(path)) as update:
        done = verify(path, update)
    say(f"{name} is intact: {sized(done)} read, all checksums match")
