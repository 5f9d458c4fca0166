"""Build a corpus: write its documents, and sort all positions by the tokens before them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from outrider.errors import DataError
from outrider.retrieval.corpus import files as corpus_files
from outrider.retrieval.corpus.files import file_entry, write_header
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.storage.atomic import sync
from outrider.storage.lock import held

FILES = ("tokens.bin", "suffixes.bin")
PIECE = 1 << 22
"""Number of sorted positions processed together."""


def build(
    folder: Path,
    documents: Iterable[Sequence[int]],
    *,
    vocabulary: int,
    tokenizer_hash: str | None = None,
    sources: Iterable[tuple[str, int]] = (),
    on_stage: Callable[[str, int], object] = lambda stage, tokens: None,
) -> Corpus:
    """Build a corpus of `documents` (token ids below `vocabulary`) at `folder`, replacing an existing one.

    sources: names and sizes in bytes of the source files, consumed after the documents.  on_stage is called with
    (`sort`, tokens) and (`write`, tokens).  Needs about 10 bytes of memory per token for vocabularies up to 2**16,
    otherwise 15.  The old corpus stays in place until the new one is complete and on disk.
    Raises DataError if no document has text, for an invalid id, and for a full disk.
    """
    divsufsort = _sorter()
    with _part_folder(folder) as part:
        try:
            token_bytes = 2 if vocabulary < 1 << 16 else 4
            counts = _write_tokens(part / "tokens.bin", documents, vocabulary, token_bytes)
            if not counts["positions"]:
                raise DataError(
                    f"corpus {folder.name!r} would be empty: no document has two or more tokens; name files with text"
                )
            on_stage("sort", counts["tokens"])
            tokens = np.memmap(part / "tokens.bin", dtype=f"<u{token_bytes}", mode="r")
            order = divsufsort(_letters(tokens, vocabulary))
            on_stage("write", counts["tokens"])
            order_bytes = 4 if len(tokens) < 1 << 31 else 8
            with (part / "suffixes.bin").open("wb") as file:
                for piece in _ends(order, tokens, vocabulary):
                    file.write(piece.astype(f"<i{order_bytes}").tobytes())
            header = {
                "format": corpus_files.FORMAT, "name": folder.name,
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "tokenizer_hash": tokenizer_hash, "vocabulary": vocabulary, "separator": vocabulary, **counts,
                "token_bytes": token_bytes, "order_bytes": order_bytes,
                "sources": _write_sources(part / "sources.jsonl", sources),
                "block_bytes": corpus_files.BLOCK, "files": {name: file_entry(part / name) for name in FILES},
            }  # fmt: skip
            for path in part.iterdir():
                sync(path)
            write_header(part, header)
        except OSError as error:
            raise DataError(
                f"can't write corpus {folder.name!r} into {folder.parent}: {error.strerror or error}; nothing was "
                "changed; free some space and add it again"
            ) from error
        _swap(part, folder)
    return Corpus.open(folder)


def _sorter() -> Callable[[np.ndarray], np.ndarray]:
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise DataError(
            "building a corpus needs pydivsufsort (searching one does not): pip install 'outrider[corpus]'"
        ) from None
    return divsufsort


def _write_tokens(path: Path, documents: Iterable[Sequence[int]], vocabulary: int, token_bytes: int) -> dict[str, int]:
    """Write documents between separators; returns the numbers of documents, tokens, and positions followed by a
    token."""
    counts = {"documents": 0, "tokens": 0, "positions": 0}
    separator = np.array([vocabulary], dtype=f"<u{token_bytes}").tobytes()
    with path.open("wb") as file:
        file.write(separator)
        for document in documents:
            if not len(document):
                continue
            ids = np.asarray(document, dtype=np.int64)
            if ids.min() < 0 or ids.max() >= vocabulary:
                wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
                raise DataError(
                    f"token id {wrong} is outside the vocabulary of {vocabulary}; use the target's own tokenizer"
                )
            file.write(ids.astype(f"<u{token_bytes}").tobytes() + separator)
            counts["documents"] += 1
            counts["tokens"] += len(ids)
            counts["positions"] += len(ids) - 1
    return counts


def _letters(tokens: np.ndarray, separator: int) -> np.ndarray:
    """The reversed text as big-endian bytes, so that sorting bytes sorts tokens."""
    # nothing follows the last separator
    letters = tokens[-2::-1].astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - _width(separator) :]
    return np.ascontiguousarray(letters).reshape(-1)


def _ends(order: np.ndarray, tokens: np.ndarray, separator: int) -> Iterator[np.ndarray]:
    """Positions with a token on both sides, in the order of the sorted bytes, in pieces."""
    width = _width(separator)
    for at in range(0, len(order), PIECE):
        starts = order[at : at + PIECE]
        ends = len(tokens) - 1 - starts[starts % width == 0] // width
        yield ends[(tokens[ends] != separator) & (tokens[ends - 1] != separator)]


def _width(separator: int) -> int:
    """Bytes per token in the sort."""
    return max(1, (separator.bit_length() + 7) // 8)


def _write_sources(path: Path, sources: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Write one line per file; returns the number of files, and their bytes."""
    files = list(sources)
    path.write_text("".join(json.dumps({"name": name, "size_bytes": size}) + "\n" for name, size in files))
    return {"files": len(files), "size_bytes": sum(size for _, size in files)}


@contextmanager
def _part_folder(folder: Path) -> Iterator[Path]:
    """A new folder next to `folder`, removed at the end if it still exists.  Leftovers of killed builds are removed.

    A build holds a lock on its folder, which is released when its process ends: a folder that can be locked is a
    leftover.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        with contextlib.suppress(OSError), held(left, BlockingIOError(), 0):
            shutil.rmtree(left, ignore_errors=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    part.mkdir(mode=0o700)
    try:
        with held(part, BlockingIOError(), 0):
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _swap(part: Path, folder: Path) -> None:
    """Exchange the names of `part` and `folder`."""
    sync(part)
    if not folder.exists():
        part.rename(folder)
    elif not _exchanged(part, folder):
        # this file system can't exchange names atomically: for a moment there is no corpus with this name
        old = part.with_name(f"{part.name}.old")
        folder.rename(old)
        try:
            part.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        old.rename(part)
    sync(folder.parent)


def _exchanged(one: Path, other: Path) -> bool:
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return rename(at_cwd, os.fsencode(one.absolute()), at_cwd, os.fsencode(other.absolute()), exchange) == 0
