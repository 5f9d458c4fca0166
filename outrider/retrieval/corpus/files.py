"""A corpus on disk: files with checksums, and a header with its own checksum (the seal).

A corpus is a folder: `tokens.bin` (uint16 or uint32, documents between separators), `suffixes.bin` (int32 or int64, the
sorted positions), `sources.jsonl` (files and sizes) and `corpus.json` (everything else, with checksums).  All numbers
are little endian.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular

FORMAT = 1
BLOCK = 1 << 22
"""Bytes under one checksum."""


def read_header(folder: Path) -> dict[str, Any]:
    """corpus.json, checked against its seal.  Raises DataError if it is missing, damaged or in another format."""
    path = folder / "corpus.json"
    try:
        header = parse_json(regular(path).read_bytes())
        seal = header.pop("seal")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"there is no corpus in {folder}; `outrider corpus list` lists the corpora") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged; build the corpus again") from None
    if header.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {header.get('format')!r}, but this Outrider reads {FORMAT}; build the corpus again"
        )
    if seal != _seal(header):
        raise DataError(f"{path} was changed after its build, or is damaged; build the corpus again")
    return header


def checked_header(folder: Path) -> dict[str, Any]:
    """The header of a corpus.  Raises DataError if a file's size or time differs from those recorded by the build."""
    header = read_header(folder)
    for name, expected in header["files"].items():
        stat = _stat(folder / name)
        if stat.st_size != expected["size_bytes"]:
            raise DataError(
                f"{folder / name} must have {expected['size_bytes']} bytes, got {stat.st_size}; build the corpus again"
            )
        if stat.st_mtime_ns != expected["mtime_ns"]:
            raise DataError(
                f"{folder / name} was written or copied after its build; run `outrider corpus verify "
                f"{header['name']}`, which accepts it if the checksums match"
            )
    return header


def write_header(folder: Path, header: dict[str, Any]) -> None:
    """Write corpus.json with its seal, atomically."""
    with replacing(folder / "corpus.json") as part:
        part.write_text(json.dumps(header | {"seal": _seal(header)}))


def _seal(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; build the corpus again") from None


def verify(folder: Path, on_bytes: Callable[[int], object] = lambda done: None) -> int:
    """Read a whole corpus and compare it with its checksums; returns the bytes read.

    Files that were copied or touched but have the right content are accepted from then on.
    Raises DataError naming the first damaged block.
    """
    header, done, is_touched = read_header(folder), 0, False
    for name, expected in header["files"].items():
        path = folder / name
        stat = _stat(path)
        with path.open("rb") as file:
            for number, checksum in enumerate([*expected["blocks"], None]):
                block = file.read(BLOCK)
                if (_checksum(block) if block else None) != checksum:
                    raise DataError(
                        f"{path} is damaged: bytes {number * BLOCK} to {number * BLOCK + len(block)} differ from its "
                        "build; build the corpus again"
                    )
                done += len(block)
                on_bytes(done)
        is_touched |= expected["mtime_ns"] != stat.st_mtime_ns
        expected["mtime_ns"] = stat.st_mtime_ns
    if is_touched:
        write_header(folder, header)
    return done


def _checksum(block: bytes) -> str:
    return hashlib.blake2b(block, digest_size=8).hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    """One file's entry in the header."""
    with path.open("rb") as file:
        blocks = [_checksum(block) for block in iter(lambda: file.read(BLOCK), b"")]
    stat = path.stat()
    return {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "blocks": blocks}
