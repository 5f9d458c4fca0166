"""The texts of a corpus: documents from files and folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from outrider.errors import DataError

PIECE = 1 << 18
"""Characters: longer texts are cut after a line into documents of at most about this length."""


class Text(NamedTuple):
    """One document."""

    file: Path
    text: str


def files_of(given: Iterable[Path]) -> list[Path]:
    """All given files, and those below given folders, sorted; hidden ones there are left out.

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
            raise DataError(f"{path} does not exist, or is not a file; name text files, .jsonl files or folders")
    return list(found)


def readable(files: Iterable[Path], skipped: list[Path] | None = None) -> list[Path]:
    """The files that are UTF-8 text; all are read to their end.

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
                    f"{file} is not UTF-8 text ({error}); leave it out, or all such files with --skip-binary"
                ) from None
            skipped.append(file)
        except OSError as error:
            raise DataError(f"can't read {file}: {error.strerror}; leave it out, or change its permissions") from None
    return found


def _check(file: Path) -> None:
    """Raises UnicodeError where a file is not text."""
    with file.open(encoding="utf-8", newline="") as content:
        for block in iter(lambda: content.read(1 << 20), ""):
            if "\0" in block:
                raise UnicodeError("it holds zero bytes")


def texts(files: Iterable[Path]) -> Iterator[Text]:
    """Documents of these files, in order: each row of a `.jsonl` file, or a whole other file.

    Raises DataError for a file that can't be read as text, and for a row without `text`.
    """
    for file in files:
        try:
            with file.open(encoding="utf-8-sig", newline="") as lines:  # newlines are not changed
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
            raise DataError(f'{file}:{number} has no `text`; every line must be like {{"text": "..."}}')
        yield text.splitlines(keepends=True)


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """The text of these lines, cut after a line where it is long enough.  A line that is too long by itself is cut
    inside."""
    held, length = list[str](), 0
    for line in lines:
        while length + len(line) > PIECE:
            yield "".join(held) or line[:PIECE]
            line = line if held else line[PIECE:]
            held, length = [], 0
        held.append(line)
        length += len(line)
    if length:
        yield "".join(held)
