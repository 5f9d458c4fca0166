"""The texts of a corpus: documents from files and folders."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from pathspec import GitIgnoreSpec

from outrider.errors import DataError

PIECE = 1 << 18
"""Characters: longer texts are cut after a line into documents of at most about this length."""


class Text(NamedTuple):
    """One document."""

    file: Path
    text: str


def files_of(given: Iterable[Path], ignored: Counter[str] | None = None) -> list[Path]:
    """All given files, and those below given folders, sorted; of these no hidden ones, no `__pycache__`, and none that
    a .gitignore names.

    ignored: counts files and folders that were left out, by reason.  Raises DataError for a path that does not exist.
    """
    found: dict[Path, None] = {}
    for path in given:
        if path.is_dir():
            found.update(dict.fromkeys(_below(path, Counter() if ignored is None else ignored)))
        elif path.is_file():
            found[path] = None
        else:
            raise DataError(f"{path} does not exist, or is not a file; name text files, .jsonl files or folders")
    return list(found)


Ignores = list[tuple[Path, GitIgnoreSpec]]
"""Patterns of every .gitignore that counts, with its folder, the outermost first."""


def _below(top: Path, ignored: Counter[str]) -> Iterator[Path]:
    """Files below a folder that was named."""
    outer = _outer_ignores(top.absolute())
    # a folder that was named is taken, whatever the .gitignore above it says
    specs: dict[Path, Ignores] = {top: [] if _is_ignored(top.absolute(), outer, is_folder=True) else outer}
    for root, folders, inside in os.walk(top):
        here = Path(root)
        own = [*specs.pop(here), *_ignores_in(here.absolute())]
        for name in sorted(folders):
            if not _is_left_out(here / name, own, ignored, is_folder=True):
                specs[here / name] = own
        folders[:] = sorted(name for name in folders if here / name in specs)
        for name in sorted(inside):
            if not _is_left_out(here / name, own, ignored) and (here / name).is_file():
                yield here / name


def _is_left_out(path: Path, specs: Ignores, ignored: Counter[str], is_folder: bool = False) -> bool:
    """Whether a file or folder is not taken; counts it where it is not."""
    if path.name.startswith("."):
        ignored["hidden"] += 1
    elif path.name == "__pycache__":
        ignored["__pycache__"] += 1
    elif _is_ignored(path.absolute(), specs, is_folder):
        ignored["in .gitignore"] += 1
    else:
        return False
    return True


def _is_ignored(path: Path, specs: Ignores, is_folder: bool = False) -> bool:
    """As git decides: the last pattern that matches counts, of the innermost .gitignore that has one."""
    for folder, spec in reversed(specs):
        found = spec.check_file(path.relative_to(folder).as_posix() + "/" * is_folder).include
        if found is not None:
            return found
    return False


def _outer_ignores(top: Path) -> Ignores:
    """Of the folders above, as far as they belong to the same repository."""
    above = list(top.parents)
    last = next((i for i, folder in enumerate(above) if (folder / ".git").exists()), -1)
    if (top / ".git").exists():
        return []
    return [found for folder in reversed(above[: last + 1]) for found in _ignores_in(folder)]


def _ignores_in(folder: Path) -> Ignores:
    try:
        lines = (folder / ".gitignore").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [(folder, GitIgnoreSpec.from_lines(lines))]


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
