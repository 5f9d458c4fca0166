"""A corpus on disk: a header with its own checksum (the seal), and files with checksums.

A corpus is a folder: `tokens.bin` (uint16 or uint32, documents between separators), `suffixes.bin` (int32 or int64, the
sorted ends), `sources.jsonl` (files and sizes) and `corpus.json` (all else, with checksums).  All numbers are little
endian.
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

FORMAT = 1
BLOCK = 1 << 22
"""Bytes under one checksum."""


def read_header(folder: Path) -> dict[str, Any]:
    """corpus.json, checked against its seal.  Raises DataError where it is missing, damaged or of another format."""
    path = folder / "corpus.json"
    try:
        header = json.loads(path.read_bytes())
        seal = header.pop("seal")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"there is no corpus in {folder}; `outrider corpus list` names the corpora") from None
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
    """The header of a corpus.  Raises DataError where a file's size or time differs from that of the build."""
    header = read_header(folder)
    for name, wanted in header["files"].items():
        there = _stat(folder / name)
        if there.st_size != wanted["size_bytes"]:
            raise DataError(
                f"{folder / name} must have {wanted['size_bytes']} bytes, got {there.st_size}; build the corpus again"
            )
        if there.st_mtime_ns != wanted["mtime_ns"]:
            raise DataError(
                f"{folder / name} was written or copied after its build; run `outrider corpus verify "
                f"{header['name']}`, "
                "which accepts it where the checksums match"
            )
    return header


def write_header(folder: Path, header: dict[str, Any]) -> None:
    """Write corpus.json with its seal, whole or not at all."""
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
                        f"{path} is damaged: bytes {number * BLOCK} to {number * BLOCK + len(block)} differ from its "
                        f"build; "
                        "build the corpus again"
                    )
                done += len(block)
                on_bytes(done)
        is_touched |= wanted["mtime_ns"] != there.st_mtime_ns
        wanted["mtime_ns"] = there.st_mtime_ns
    if is_touched:
        write_header(folder, header)
    return done


def _checksum(block: bytes) -> str:
    return hashlib.blake2b(block, digest_size=8).hexdigest()


def described(path: Path) -> dict[str, Any]:
    """One file's entry in the header."""
    with path.open("rb") as file:
        blocks = [_checksum(block) for block in iter(lambda: file.read(BLOCK), b"")]
    there = path.stat()
    return {"size_bytes": there.st_size, "mtime_ns": there.st_mtime_ns, "blocks": blocks}
