"""Corpora by name in one folder: which there are, and the texts they are made of."""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from outrider.errors import ConfigError, DataError
from outrider.retrieval.proposal import Found, Proposal, merged
from outrider.retrieval.suffix_array import Corpus, _write_header, read_header

GRAMS = "texts.grams"
PIECE = 1 << 18
"""Characters: longer texts are cut behind a line into documents of at most about so many."""


def home() -> Path:
    """Where corpora are kept: $OUTRIDER_CORPORA, or the user's data folder."""
    given = os.environ.get("OUTRIDER_CORPORA")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(given).expanduser() if given else Path(data) / "outrider" / "corpora"


def place(name: str, folder: Path | None = None) -> Path:
    """The folder of one corpus.  Raises ConfigError for a name that is none."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"{name!r} can't be the name of a corpus; use up to 64 letters, digits, dots, dashes and underscores")
    return (folder or home()) / name


def names(folder: Path | None = None) -> list[str]:
    """Of the corpora there are, sorted, damaged ones too."""
    folder = folder or home()
    return sorted(path.parent.name for path in folder.glob("[!.]*/corpus.json")) if folder.is_dir() else []


def find(name: str, folder: Path | None = None) -> Path:
    """The folder of a corpus that is there.  Raises DataError where it is not."""
    path = place(name, folder)
    if not (path / "corpus.json").exists():
        there = ", ".join(names(folder)) or "none yet; make one with `outrider corpus add NAME FILES`"
        raise DataError(f"there is no corpus {name!r} in {folder or home()}; there are: {there}")
    return path


def load(chosen: Sequence[str], tokenizer_hash: str | None = None, folder: Path | None = None) -> list[Corpus]:
    """Open corpora by name for a target with this tokenizer."""
    return [Corpus.open(find(name, folder), tokenizer_hash) for name in chosen]


def remove(name: str, folder: Path | None = None) -> int:
    """Delete a corpus; returns its bytes.  Processes that have it open keep it until they close it."""
    path = find(name, folder)
    size_bytes = size_of(path)
    gone = path.with_name(f".{name}.{os.getpid()}.part")
    path.rename(gone)
    shutil.rmtree(gone)
    return size_bytes


def size_of(path: Path) -> int:
    """Bytes of all its files."""
    return sum(file.stat().st_size for file in path.iterdir())


def sources(path: Path) -> list[tuple[str, int]]:
    """Names and bytes of the files that a corpus was made of."""
    read_header(path)
    rows = [json.loads(line) for line in (path / "sources.jsonl").read_text().splitlines()]
    return [(row["name"], row["size_bytes"]) for row in rows]


def keep_grams(path: Path, save: Callable[[Path], Mapping[str, Any]]) -> None:
    """Put hashes of a corpus's texts beside it and name them in its header, so that it can be asked what it holds.

    save: writes the file and returns what a manifest must say of it; `prepare.grams.Collector.save` is such.
    """
    header = read_header(path)
    _write_header(path, header | {"grams": dict(save(path / GRAMS))})


# ── texts ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Text(NamedTuple):
    """One document."""

    file: Path
    text: str


def files_of(given: Iterable[Path]) -> list[Path]:
    """All files given, and those below the folders given, sorted; hidden ones there are left out.

    Raises DataError for one that does not exist.
    """
    found: dict[Path, None] = {}
    for path in given:
        if path.is_dir():
            for root, folders, inside in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                paths = (Path(root) / name for name in sorted(inside) if not name.startswith("."))
                found.update(dict.fromkeys(file for file in paths if file.is_file()))
        elif path.is_file():
            found[path] = None
        else:
            raise DataError(f"{path} does not exist, or is no file; name text files, .jsonl files or folders")
    return list(found)


def readable(files: Iterable[Path], skipped: list[Path] | None = None) -> list[Path]:
    """Those of the files that are UTF-8 text; all are read to their end.

    Raises DataError for one that is not, or adds it to `skipped`.
    """
    found = []
    for file in files:
        try:
            _check(file)
            found.append(file)
        except UnicodeError as error:
            if skipped is None:
                raise DataError(
                    f"{file} is not UTF-8 text ({error}); leave it out, or leave all such files out with --skip-binary"
                ) from None
            skipped.append(file)
        except OSError as error:
            raise DataError(f"can't read {file}: {error.strerror}") from None
    return found


def _check(file: Path) -> None:
    """UnicodeError where a file is not text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open("rb") as content:
        for block in iter(lambda: content.read(1 << 20), b""):
            if b"\0" in block:
                raise UnicodeError("it holds zero bytes")
            decoder.decode(block)
    decoder.decode(b"", final=True)


def texts(files: Iterable[Path]) -> Iterator[Text]:
    """Documents of these files, in order: a row of `.jsonl` is one, else a file is.

    Raises DataError for a file that can't be read as text, and for a row without `text`.
    """
    for file in files:
        try:
            with file.open(encoding="utf-8-sig", newline="") as lines:  # ends of lines stay what they are
                rows = _rows(file, lines) if file.suffix == ".jsonl" else iter([lines])
                for row in rows:
                    for piece in _pieces(row):
                        yield Text(file, piece)
        except (OSError, UnicodeError) as error:
            raise DataError(f"can't read {file}: {error}") from None


def _rows(file: Path, lines: TextIO) -> Iterator[list[str]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise DataError(f'{file}:{number} is no row with a `text`; every line must be like {{"text": "..."}}')
        yield text.splitlines(keepends=True)


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """The text of these lines, cut where it has become long enough.  A line that is too long by itself is cut within."""
    held: list[str] = []
    length = 0
    for line in lines:
        while length + len(line) > PIECE:
            if not held:
                yield line[:PIECE]
                line = line[PIECE:]
                continue
            yield "".join(held)
            held, length = [], 0
        held.append(line)
        length += len(line)
    if length:
        yield "".join(held)


# ── one proposal ───────────────────────────────────────────────────────────────────────────────────────────────────────


def proposed(corpora: Sequence[Corpus], context: Sequence[int], nodes: int, depth: int, least: int = 1) -> Proposal:
    """What follows a context in any of some corpora, at most `nodes` tokens; empty where less than `least` tokens match."""
    return merged([looked_up(corpus, context, nodes, depth, least) for corpus in corpora], nodes)


def looked_up(corpus: Corpus, context: Sequence[int], nodes: int, depth: int, least: int = 1) -> Found:
    """What follows a context in one corpus."""
    match = corpus.longest(context, least)
    return Found(corpus.name, match.length, corpus.continuations(match, nodes, depth))
