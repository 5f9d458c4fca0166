"""`outrider corpus`: texts to draft from."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, bar, counted, place_of_json, quiet, sized, write_json
from outrider.errors import DataError, TargetError

corpus = typer.Typer(help="Texts to draft from: add, list, remove, stats, verify.", no_args_is_help=True, add_completion=False)

CorpusName = Annotated[str, typer.Argument(help="Name of the corpus.", show_default=False)]
CorpusFolder = Annotated[
    Path | None, typer.Option("--folder", help="Where corpora are; $OUTRIDER_CORPORA or ~/.local/share/outrider/corpora.")
]


@corpus.command("add")
def corpus_add(
    name: CorpusName,
    files: Annotated[list[Path], typer.Argument(help="Text, .jsonl with a `text` a row, or folders.", show_default=False)],
    target: Annotated[str, typer.Option(help="Whose tokenizer: `demo`, a folder, or a Hugging Face id.")] = "demo",
    folder: CorpusFolder = None,
    skip_binary: Annotated[bool, typer.Option("--skip-binary", help="Leave files out that are not UTF-8 text.")] = False,
) -> None:
    """Make a corpus of texts, in the place of one of that name."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    quiet()
    from outrider.data.hash_files import Collector
    from outrider.retrieval import corpora, corpus_build, corpus_texts
    from outrider.targets.transformers import hash_tokenizer

    path = corpora.place(name, folder)
    skipped: list[Path] | None = [] if skip_binary else None
    paths = corpus_texts.readable(corpus_texts.files_of(files), skipped)
    characters = sum(file.stat().st_size for file in paths)
    if not characters:
        raise DataError(f"nothing to read in {', '.join(map(str, files))}; name files with text")
    tokenizer = _tokenizer_of(target)
    _foretell(name, path, paths, characters, tokenizer)
    used: dict[str, int] = {}
    hashes = Collector("documents")
    began = time.perf_counter()
    with bar("characters", characters) as update, _untouched(name):

        def documents() -> Iterator[list[int]]:
            done = 0
            for batch in _batches(corpus_texts.texts(paths), 1 << 20):
                used.update((str(text.file.absolute()), text.file.stat().st_size) for text in batch)
                for text in batch:
                    hashes.add("documents", [text.text])
                yield from _encoded(tokenizer, [text.text for text in batch])
                done += sum(len(text.text) for text in batch)
                update(min(done, characters))

        made = corpus_build.build(
            path, documents(), vocabulary=_ids(tokenizer), tokenizer_hash=hash_tokenizer(tokenizer),
            sources=used.items(), on_stage=lambda stage, tokens: update(characters, f"{stage} {counted(tokens)} tokens"),
        )  # fmt: skip
    corpora.keep_grams(path, hashes.save)
    header = made.header
    left_out = f", {len(skipped)} files left out, not UTF-8 text" if skipped else ""
    console.out.print(
        f"          {counted(header['documents'])} documents, {counted(header['tokens'])} tokens in "
        f"{time.perf_counter() - began:.0f} s{left_out}; {sized(corpora.size_of(path))} in {path}",
        highlight=False,
        soft_wrap=True,
    )


@corpus.command("list")
def corpus_list(folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """List the corpora there are."""
    from outrider.retrieval import corpora

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
    from outrider.retrieval import corpora
    from outrider.retrieval.suffix_array import Corpus

    path = corpora.place(name, folder)
    try:
        header = Corpus.open(path).header
    except DataError as error:
        return {"name": name, "error": str(error)}
    facts = {key: header[key] for key in ("documents", "tokens", "vocabulary", "tokenizer_hash", "made")}
    return {"name": name, "error": None, **facts, "size_bytes": corpora.size_of(path), "folder": str(path)}


@corpus.command("stats")
def corpus_stats(name: CorpusName, folder: CorpusFolder = None, json_to: JsonTo = None) -> None:
    """Say what a corpus holds, and which files it was made of."""
    from outrider.retrieval import corpora
    from outrider.retrieval.suffix_array import Corpus

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


@corpus.command("remove")
def corpus_remove(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Delete a corpus."""
    from outrider.retrieval import corpora

    console.out.print(f"removed {name}, {sized(corpora.remove(name, folder))}", highlight=False)


@corpus.command("verify")
def corpus_verify(name: CorpusName, folder: CorpusFolder = None) -> None:
    """Read a whole corpus and compare it with its checksums."""
    from outrider.retrieval import corpora
    from outrider.retrieval.corpus_files import verify

    path = corpora.find(name, folder)
    with bar("bytes", corpora.size_of(path)) as update:
        done = verify(path, update)
    console.out.print(f"{name} is as it was built: {sized(done)} read, every checksum holds", highlight=False)


@contextmanager
def _untouched(name: str) -> Iterator[None]:
    """Ctrl-C says that a build which was stopped leaves nothing."""
    try:
        yield
    except KeyboardInterrupt:
        console.note.print(f"\nstopped; of corpus {name} nothing was changed", highlight=False)
        raise SystemExit(130) from None


def _tokenizer_of(target: str) -> Any:
    """A target's tokenizer, without its weights."""
    from transformers import AutoTokenizer

    from outrider import demo

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(demo.TARGET) if target == "demo" else target)
        # where there are no files, transformers makes up a tokenizer of special tokens alone
        reason = "" if len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens) else "its vocabulary is empty"
    except (OSError, ValueError, KeyError) as error:
        tokenizer, reason = None, str(error).strip().splitlines()[0]
    if reason:
        raise TargetError(
            f"can't load the tokenizer of {target!r}: {reason}; give `demo`, a folder with a tokenizer, or a Hugging Face id "
            "(which needs the network the first time)"
        )
    return tokenizer


def _foretell(name: str, path: Path, files: list[Path], characters: int, tokenizer: Any) -> None:
    """Say how big a corpus becomes and how long it takes, by its first texts; refuse what has no room."""
    from itertools import islice

    from outrider.retrieval import corpus_texts

    _encoded(tokenizer, ["warm"])
    began = time.perf_counter()
    sample = [text.text[: 1 << 16] for text in islice(corpus_texts.texts(files), 16)]
    tokens = sum(map(len, _encoded(tokenizer, sample)))
    rate = (time.perf_counter() - began) / max(1, sum(map(len, sample)))
    tokens = int(characters * tokens / max(1, sum(map(len, sample))))
    token_bytes = 2 if _ids(tokenizer) < 1 << 16 else 4
    needed = tokens * (token_bytes + 4)
    near = next(folder for folder in path.parents if folder.exists())
    free = shutil.disk_usage(near).free
    if needed > free:
        raise DataError(
            f"corpus {name!r} needs about {sized(needed)} for {counted(tokens)} tokens, {near} has {sized(free)} left; "
            "name fewer files, or another --folder"
        )
    replaces = ", in the place of the one there is" if path.exists() else ""
    seconds = characters * rate + tokens * 4e-7  # sorting and writing 10 M tokens takes 3 to 4 s
    console.out.print(
        f"corpus    {name}: {len(files)} files, {sized(characters)}; about {counted(tokens)} tokens, {sized(needed)} on disk, "
        f"{sized(2e8 + tokens * 8 * token_bytes)} of memory, {seconds:.0f} s{replaces}",
        highlight=False,
        soft_wrap=True,
    )


def _batches(texts: Iterator[Any], characters: int) -> Iterator[list[Any]]:
    """Several texts at a time, about so many characters together."""
    held: list[Any] = []
    for text in texts:
        held.append(text)
        if sum(len(one.text) for one in held) >= characters:
            yield held
            held = []
    if held:
        yield held


def _ids(tokenizer: Any) -> int:
    """All ids lie below it; there may be gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def _encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return found
