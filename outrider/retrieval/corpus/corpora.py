"""Corpora by name in one folder: listing, opening, removing and searching them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DataError
from outrider.retrieval.corpus.files import read_header, write_header
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.retrieval.proposal import SourceProposal
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import whole_text

HASHES = "texts.grams"


def home() -> Path:
    """The folder of all corpora: $OUTRIDER_CORPORA, otherwise one in the user's data folder."""
    folder = os.environ.get("OUTRIDER_CORPORA")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(folder).expanduser() if folder else Path(data) / "outrider" / "corpora"


def folder_of(name: str, folder: Path | None = None) -> Path:
    """The folder of one corpus.  Raises ConfigError for an invalid name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"{name!r} is not a valid corpus name; use up to 64 letters, digits, dots, dashes and underscores"
        )
    return (folder or home()) / name


def names(folder: Path | None = None) -> list[str]:
    """Names of all corpora, including damaged ones, sorted."""
    folder = folder or home()
    return sorted(path.parent.name for path in folder.glob("[!.]*/corpus.json")) if folder.is_dir() else []


def find(name: str, folder: Path | None = None) -> Path:
    """The folder of an existing corpus.  Raises DataError if there is none with this name."""
    path = folder_of(name, folder)
    if not (path / "corpus.json").exists():
        existing = ", ".join(names(folder)) or "none yet; create one with `outrider corpus add NAME FILES`"
        raise DataError(f"no corpus {name!r} in {folder or home()}; existing corpora: {existing}")
    return path


def load(chosen: Sequence[str], tokenizer_hash: str | None = None, folder: Path | None = None) -> list[Corpus]:
    """Open corpora by name for a target with this tokenizer."""
    return [Corpus.open(find(name, folder), tokenizer_hash) for name in chosen]


def remove(name: str, folder: Path | None = None) -> int:
    """Delete a corpus; returns its size in bytes.  Processes that have it open can still use it."""
    path = find(name, folder)
    size_bytes = size_of(path)
    discarded = path.with_name(f".{name}.{os.getpid()}.part")
    path.rename(discarded)
    shutil.rmtree(discarded)
    return size_bytes


def size_of(path: Path) -> int:
    """Total bytes of the files in a folder."""
    return sum(file.stat().st_size for file in path.iterdir())


def sources(path: Path) -> list[tuple[str, int]]:
    """Names and sizes of the files that a corpus was built from."""
    read_header(path)
    try:
        lines = whole_text(path / "sources.jsonl").splitlines()
        return [(str(row["name"]), int(row["size_bytes"])) for row in map(parse_json, lines)]
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path / 'sources.jsonl'} can't be read: {error}; build the corpus again") from None


def keep_hashes(path: Path, save: Callable[[Path], Mapping[str, Any]]) -> None:
    """Store hashes of a corpus's texts in its folder and name them in its header, to check for contamination.

    save: writes the file and returns its entry in a manifest, as `data.overlap.hash_files.Collector.save` does.
    """
    header = read_header(path)
    write_header(path, header | {"ngram_hashes": dict(save(path / HASHES))})


def look_up(corpus: Corpus, context: Sequence[int], nodes: int, depth: int, min_match: int = 1) -> SourceProposal:
    """The continuations of a context in one corpus."""
    match = corpus.longest(context, min_match)
    return SourceProposal(corpus.name, match.length, corpus.continuations(match, nodes, depth))
