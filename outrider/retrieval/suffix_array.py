"""A corpus on disk, searched by the longest suffix of a context: a suffix array over reversed prefixes, mapped into memory.

Every place of the text at which something follows is sorted by the tokens before it, read backwards.  One binary search finds
where a context would stand, its neighbours share its longest suffix, and what follows them is the proposal.  REST (He et al.
2311.08252) sorts forwards and searches once for every length; SAM-Decoding (Hu et al. 2411.10666) follows a suffix automaton,
which takes several times the memory and can't be mapped.  Nothing is loaded: processes that map one corpus share its pages.

A corpus is a folder: `tokens.bin` (uint16 or uint32, documents between separators), `suffixes.bin` (int32 or int64, the sorted
ends), `sources.jsonl` (files and sizes) and `corpus.json` (all else, with checksums).  All numbers are little endian.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import heapq
import json
import mmap
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.errors import DataError
from outrider.lock import held
from outrider.retrieval.proposal import Proposal

FORMAT = 1
LONGEST = 64
"""Most tokens of a context that are compared."""
SAMPLE = 32
"""Most places whose continuations are read."""
BLOCK = 1 << 22
"""Bytes under one checksum."""
VERSION = 1
"""Of search.c's functions."""


class Match(NamedTuple):
    """Where the longest suffix of a context stands in a corpus."""

    length: int
    """Tokens that agree; 0 where there is none."""
    places: int
    """How often it stands there with something behind it."""
    ends: tuple[int, ...]
    """What follows begins here in the corpus: at most SAMPLE of the places, evenly spread over what stands before them."""


NOTHING = Match(0, 0, ())


class Corpus:
    """One corpus, open for search.  Holds no context: every search is by itself, from any thread."""

    def __init__(self, folder: Path, header: dict[str, Any]):
        """Use `open`."""
        self.folder, self.header = folder, header
        self.name: str = header["name"]
        self.tokenizer_hash: str | None = header["tokenizer_hash"]
        self.separator: int = header["vocabulary"]
        self.tokens = _mapped(folder / "tokens.bin", header["token_bytes"], "u")
        self.order = _mapped(folder / "suffixes.bin", header["order_bytes"], "i")
        self._view = _View(
            self.tokens.ctypes.data, self.order.ctypes.data, len(self.tokens), len(self.order),
            header["token_bytes"], header["order_bytes"], self.separator,
        )  # fmt: skip

    @classmethod
    def open(cls, folder: str | Path, tokenizer_hash: str | None = None) -> Corpus:
        """Map a corpus; no data is read, only that sizes and times are those of its build.

        Raises DataError where there is none, where it is damaged, or where it was made with another tokenizer than that of
        `tokenizer_hash`.
        """
        folder = Path(folder)
        header = read_header(folder)
        for name, wanted in header["files"].items():
            there = _stat(folder / name)
            if there.st_size != wanted["size_bytes"]:
                raise DataError(
                    f"{folder / name} has {there.st_size} bytes, its build wrote {wanted['size_bytes']}; build the corpus again"
                )
            if there.st_mtime_ns != wanted["mtime_ns"]:
                raise DataError(
                    f"{folder / name} was written to, or copied, after its build; `outrider corpus verify {header['name']}` "
                    "reads all of it, and takes it as it is where the checksums hold"
                )
        if tokenizer_hash is not None and header["tokenizer_hash"] not in (None, tokenizer_hash):
            raise DataError(
                f"corpus {header['name']!r} was made with tokenizer {header['tokenizer_hash']}, the target's is "
                f"{tokenizer_hash}; add it again for this target: outrider corpus add {header['name']} FILES --target TARGET"
            )
        return cls(folder, header)

    def longest(self, context: Sequence[int], least: int = 1) -> Match:
        """The longest suffix of `context` that stands in the corpus with something behind it; NOTHING below `least` tokens.

        A token outside the vocabulary matches nothing: only what follows the last such is looked for.
        """
        window = array("q", context[-LONGEST:])
        if not window:
            return NOTHING
        library = _library()
        if library is None:
            return self._longest_in_python(window, least)
        found = (ctypes.c_int64 * (2 + SAMPLE))()
        address, length = window.buffer_info()
        length = library.outrider_search_longest(self._view, address, length, least, SAMPLE, found)
        if not length:
            return NOTHING
        _, count, *ends = found
        return Match(length, count, tuple(ends[:count]))

    def _longest_in_python(self, window: Sequence[int], least: int) -> Match:
        known = next((n for n, token in enumerate(reversed(window)) if not 0 <= token < self.separator), len(window))
        backwards = list(reversed(window))[:known]
        at = self._first_not(lambda end: self._compare(end, backwards)[1])
        near = [self._compare(self.order[place], backwards)[0] for place in (at - 1, at) if 0 <= place < len(self.order)]
        length = max(near, default=0)
        if length < max(least, 1):
            return NOTHING
        del backwards[length:]
        first = self._first_not(lambda end: self._compare(end, backwards)[1])
        behind = self._first_not(lambda end: self._compare(end, backwards)[1] or self._compare(end, backwards)[0] == length)
        count = behind - first
        taken = min(count, SAMPLE)
        return Match(length, count, tuple(int(self.order[first + i * count // taken]) for i in range(taken)))

    def _first_not(self, is_before: Callable[[Any], bool]) -> int:
        """The first place whose end is not before; all that are stand in front."""
        low, high = 0, len(self.order)
        while low < high:
            middle = (low + high) // 2
            if is_before(self.order[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _compare(self, end: Any, backwards: list[int]) -> tuple[int, bool]:
        """How many tokens before `end` agree with `backwards`, and whether that prefix stands before it."""
        end = int(end)
        if not 0 <= end <= len(self.tokens):
            return 0, False
        for n, wanted in enumerate(backwards):
            if n >= end:
                return n, True
            token = int(self.tokens[end - 1 - n])
            if token != wanted:
                return n, token < wanted
        return len(backwards), False

    def continuations(self, match: Match, nodes: int, depth: int) -> Proposal:
        """What follows a match, at most `nodes` tokens in a tree of at most `depth` levels: those that most places share.

        A share is a count over one more than the places looked at: a single place is sure of what follows, and wrong more often
        than many that agree.  On equal terms the shallower stands first, then the elder parent's child, then the smaller token.
        """
        tree = Proposal([], [], [])
        rows = [self.tokens[end : end + depth].tolist() for end in match.ends if end >= 0]
        offered: list[tuple[int, int, int, int, list[list[int]]]] = []

        def offer(rows: list[list[int]], level: int, parent: int) -> None:
            by_token: dict[int, list[list[int]]] = {}
            for row in rows:
                if level < len(row) and row[level] < self.separator:
                    by_token.setdefault(row[level], []).append(row)
            for token, members in by_token.items():
                heapq.heappush(offered, (-len(members), level, parent, token, members))

        offer(rows, 0, -1)
        while offered and len(tree.tokens) < nodes:
            count, level, parent, token, members = heapq.heappop(offered)
            offer(members, level + 1, len(tree.tokens))
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.shares.append(-count / (len(rows) + 1))
        return tree

    def verify(self) -> int:
        """Read everything and compare it with its checksums; see the function of that name."""
        return verify(self.folder)


class _View(ctypes.Structure):
    """What search.c calls Corpus."""

    _fields_ = [
        ("tokens", ctypes.c_void_p), ("order", ctypes.c_void_p), ("size", ctypes.c_int64), ("places", ctypes.c_int64),
        ("token_bytes", ctypes.c_int64), ("order_bytes", ctypes.c_int64), ("separator", ctypes.c_int64),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL | None:
    """search.c, compiled; None where Python searches."""
    from outrider.retrieval import native  # loads torch, which listing and verifying do without

    library = native.library("search", VERSION)
    if library is None:
        return None
    search = library.outrider_search_longest
    search.restype = ctypes.c_int64
    search.argtypes = [
        ctypes.POINTER(_View), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64),
    ]  # fmt: skip
    return library


def _mapped(path: Path, size_bytes: int, kind: str) -> np.ndarray:
    found = np.memmap(path, dtype=f"<{kind}{size_bytes}", mode="r")
    # a search jumps: what stands beside the page that it wants is not wanted
    found._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return found.view(np.ndarray)


# ── the header ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_header(folder: Path) -> dict[str, Any]:
    """corpus.json, checked against its own seal.  Raises DataError where it is missing, damaged or of another format."""
    path = folder / "corpus.json"
    try:
        header = json.loads(path.read_bytes())
        seal = header.pop("seal")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"there is no corpus in {folder}; `outrider corpus list` names those there are") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged; build the corpus again") from None
    if header.get("format") != FORMAT:
        raise DataError(f"{path} has format {header.get('format')!r}, this Outrider reads {FORMAT}; build the corpus again")
    if seal != _seal(header):
        raise DataError(f"{path} was changed by hand, or is damaged; build the corpus again")
    return header


def _write_header(folder: Path, header: dict[str, Any]) -> None:
    part = folder / ".corpus.json"
    with part.open("w") as file:
        json.dump(header | {"seal": _seal(header)}, file)
        _flush(file)
    part.replace(folder / "corpus.json")


def _seal(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; build the corpus again") from None


def verify(folder: Path, on_bytes: Callable[[int], object] = lambda done: None) -> int:
    """Read a whole corpus and compare it with its checksums; returns the bytes read.

    Files that are as they were built, but were copied or touched, are taken as they are from then on.
    Raises DataError that names the first block that is not.
    """
    header, done, is_touched = read_header(folder), 0, False
    for name, wanted in header["files"].items():
        path = folder / name
        there = _stat(path)
        with path.open("rb") as file:
            for number, right in enumerate([*wanted["blocks"], None]):
                block = file.read(BLOCK)
                if (_checksum(block) if block else None) != right:
                    raise DataError(
                        f"{path} is damaged: bytes {number * BLOCK} to {number * BLOCK + len(block)} are not those of its "
                        "build; build the corpus again"
                    )
                done += len(block)
                on_bytes(done)
        is_touched |= wanted["mtime_ns"] != there.st_mtime_ns
        wanted["mtime_ns"] = there.st_mtime_ns
    if is_touched:
        _write_header(folder, header)
    return done


def _checksum(block: bytes) -> str:
    return hashlib.blake2b(block, digest_size=8).hexdigest()


# ── building ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(
    folder: Path,
    documents: Iterable[Sequence[int]],
    *,
    vocabulary: int,
    tokenizer_hash: str | None = None,
    sources: Iterable[tuple[str, int]] = (),
    on_stage: Callable[[str, int], object] = lambda stage, tokens: None,
) -> Corpus:
    """Make a corpus of `documents` (token ids below `vocabulary`) and put it at `folder`, in the place of one that was there.

    sources: names and sizes in bytes of the files behind them, read when the documents are.  on_stage is told (`sort`, tokens)
    and (`write`, tokens).  Takes about 10 bytes of memory for a token below 2**16, 15 for a larger one.
    The old corpus stays as it was until the new one is whole and on disk.
    Raises DataError where there is nothing to search, where an id is none, or where the disk is full.
    """
    divsufsort = _sorter()
    with _beside(folder) as part:
        try:
            token_bytes = 2 if vocabulary < 1 << 16 else 4
            counts = _write_tokens(part / "tokens.bin", documents, vocabulary, token_bytes)
            if not counts["places"]:
                raise DataError(f"corpus {folder.name!r} would be empty: no document has two tokens; name files with text")
            on_stage("sort", counts["tokens"])
            tokens = np.memmap(part / "tokens.bin", dtype=f"<u{token_bytes}", mode="r")
            order = divsufsort(_letters(tokens, vocabulary))
            on_stage("write", counts["tokens"])
            order_bytes = 4 if len(tokens) < 1 << 31 else 8
            with (part / "suffixes.bin").open("wb") as file:
                for piece in _ends(order, tokens, vocabulary):
                    file.write(piece.astype(f"<i{order_bytes}").tobytes())
                _flush(file)
            files, size_bytes = _write_sources(part / "sources.jsonl", sources)
            header = {
                "format": FORMAT, "name": folder.name, "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "tokenizer_hash": tokenizer_hash, "vocabulary": vocabulary, "separator": vocabulary, **counts,
                "token_bytes": token_bytes, "order_bytes": order_bytes, "sources": {"files": files, "size_bytes": size_bytes},
                "block_bytes": BLOCK, "files": {name: _described(part / name) for name in ("tokens.bin", "suffixes.bin")},
            }  # fmt: skip
            _write_header(part, header)
        except OSError as error:
            raise DataError(
                f"can't write corpus {folder.name!r} into {folder.parent}: {error.strerror or error}; nothing was changed "
                "there; free some space and add it again"
            ) from error
        _swap(part, folder)
    return Corpus.open(folder)


def _sorter() -> Callable[[np.ndarray], np.ndarray]:
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise DataError(
            "building a corpus needs pydivsufsort, which sorts it; pip install 'outrider[corpus]' (searching one does not)"
        ) from None
    return divsufsort


def _write_tokens(path: Path, documents: Iterable[Sequence[int]], vocabulary: int, token_bytes: int) -> dict[str, int]:
    """Documents between separators; returns how many documents, tokens, and places at which a token follows another."""
    found = {"documents": 0, "tokens": 0, "places": 0}
    separator = np.array([vocabulary], dtype=f"<u{token_bytes}").tobytes()
    with path.open("wb") as file:
        file.write(separator)
        for document in documents:
            if not len(document):
                continue
            ids = np.asarray(document, dtype=np.int64)
            if ids.min() < 0 or ids.max() >= vocabulary:
                wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
                raise DataError(f"token id {wrong} lies outside the vocabulary of {vocabulary}; use the target's own tokenizer")
            file.write(ids.astype(f"<u{token_bytes}").tobytes() + separator)
            found["documents"] += 1
            found["tokens"] += len(ids)
            found["places"] += len(ids) - 1
        _flush(file)
    return found


def _letters(tokens: np.ndarray, separator: int) -> np.ndarray:
    """The text backwards, in bytes: suffixes in the order of their bytes are in that of their tokens, the high byte first."""
    # the last separator has nothing behind it
    letters = tokens[-2::-1].astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - _width(separator) :]
    return np.ascontiguousarray(letters).reshape(-1)


def _ends(order: np.ndarray, tokens: np.ndarray, separator: int) -> Iterator[np.ndarray]:
    """Ends of the prefixes that have a token on both sides of their end, from the sorted bytes; in pieces."""
    width = _width(separator)
    for at in range(0, len(order), BLOCK):
        starts = order[at : at + BLOCK]
        ends = len(tokens) - 1 - starts[starts % width == 0] // width
        yield ends[(tokens[ends] != separator) & (tokens[ends - 1] != separator)]


def _width(separator: int) -> int:
    """Bytes of a token when it is sorted."""
    return max(1, (separator.bit_length() + 7) // 8)


def _write_sources(path: Path, sources: Iterable[tuple[str, int]]) -> tuple[int, int]:
    """One line a file; returns how many, and their bytes."""
    files = size_bytes = 0
    with path.open("w") as out:
        for name, size in sources:
            out.write(json.dumps({"name": name, "size_bytes": size}) + "\n")
            files, size_bytes = files + 1, size_bytes + size
        _flush(out)
    return files, size_bytes


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        blocks = [_checksum(block) for block in iter(lambda: file.read(BLOCK), b"")]
    there = path.stat()
    return {"size_bytes": there.st_size, "mtime_ns": there.st_mtime_ns, "blocks": blocks}


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, gone at the end if it is still there.  What killed builds left is cleared away.

    A build holds a lock on its own, which goes with its process: what can be locked is nobody's any more.
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
    """`part` takes the name of `folder`, whose old content takes that of `part`."""
    _sync(part)
    if not folder.exists():
        part.rename(folder)
    elif not _exchanged(part, folder):
        # this file system can't exchange two names at once: for a moment there is no corpus of this name
        old = part.with_name(f"{part.name}.old")
        folder.rename(old)
        try:
            part.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        old.rename(part)
    _sync(folder.parent)


def _exchanged(one: Path, other: Path) -> bool:
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return rename(here, os.fsencode(one.absolute()), here, os.fsencode(other.absolute()), exchange) == 0


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
