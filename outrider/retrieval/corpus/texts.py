"""The texts of a corpus: documents from files and folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from pathspec import GitIgnoreSpec

from outrider.errors import DataError
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular

PIECE = 1 << 18
"""Characters; longer texts are split at line ends into documents of at most about this length."""


class Document(NamedTuple):
    """One document."""

    file: Path
    text: str


def files_of(paths: Iterable[Path], ignored: Counter[str] | None = None) -> list[Path]:
    """These files, and the files below these folders, sorted.  Below folders, hidden files, `__pycache__` and files in
    a .gitignore are left out.

    ignored: counts files and folders left out, by reason.  Raises DataError for a path that does not exist.
    """
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files.update(dict.fromkeys(_below(path, Counter() if ignored is None else ignored)))
        elif path.is_file():
            files[path] = None
        else:
            raise DataError(f"{path} does not exist, or is not a file; name text files, .jsonl files or folders")
    return list(files)


Ignores = list[tuple[Path, GitIgnoreSpec]]
"""Patterns of the applicable .gitignore files with their folders, the outermost first."""


def _below(top: Path, ignored: Counter[str]) -> Iterator[Path]:
    """Files below a folder that was given."""
    outer = _outer_ignores(top.absolute())
    # a folder that was given explicitly is included even if a .gitignore above it excludes it
    specs: dict[Path, Ignores] = {top: [] if _is_ignored(top.absolute(), outer, is_folder=True) else outer}
    for root, folders, names in os.walk(top):
        folder = Path(root)
        patterns = [*specs.pop(folder), *_ignores_in(folder.absolute())]
        for name in sorted(folders):
            if not _is_left_out(folder / name, patterns, ignored, is_folder=True):
                specs[folder / name] = patterns
        folders[:] = sorted(name for name in folders if folder / name in specs)
        for name in sorted(names):
            if not _is_left_out(folder / name, patterns, ignored) and (folder / name).is_file():
                yield folder / name


def _is_left_out(path: Path, specs: Ignores, ignored: Counter[str], is_folder: bool = False) -> bool:
    """Whether to leave out a file or folder; counts it if so."""
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
    """As in git, the last matching pattern of the innermost .gitignore with a match decides."""
    for folder, spec in reversed(specs):
        decision = spec.check_file(path.relative_to(folder).as_posix() + "/" * is_folder).include
        if decision is not None:
            return decision
    return False


def _outer_ignores(top: Path) -> Ignores:
    """Patterns of the folders above, within the same repository."""
    parents = list(top.parents)
    last = next((i for i, folder in enumerate(parents) if (folder / ".git").exists()), -1)
    if (top / ".git").exists():
        return []
    return [patterns for folder in reversed(parents[: last + 1]) for patterns in _ignores_in(folder)]


def _ignores_in(folder: Path) -> Ignores:
    try:
        lines = (folder / ".gitignore").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [(folder, GitIgnoreSpec.from_lines(lines))]


def readable(files: Iterable[Path], skipped: list[Path] | None = None) -> list[Path]:
    """The files that are UTF-8 text; each is read to its end.

    Raises DataError for one that is not, or adds it to `skipped`.
    """
    readable_files = []
    for file in files:
        try:
            _check(file)
            readable_files.append(file)
        except UnicodeError as error:
            if skipped is None:
                raise DataError(
                    f"{file} is not UTF-8 text ({error}); leave it out, or all such files with --skip-binary"
                ) from None
            skipped.append(file)
        except OSError as error:
            raise DataError(
                f"can't read {file}: {error.strerror or error}; leave it out, or change its permissions"
            ) from None
    return readable_files


def _check(file: Path) -> None:
    """Raises UnicodeError if a file is not text."""
    with regular(file).open(encoding="utf-8", newline="") as content:
        for block in iter(lambda: content.read(1 << 20), ""):
            if "\0" in block:
                raise UnicodeError("it contains zero bytes")


def texts(files: Iterable[Path]) -> Iterator[Document]:
    """Documents of these files, in order: each row of a `.jsonl` file; any other file as a whole.

    Raises DataError for a file that can't be read as text, and for a row without `text`.
    """
    for file in files:
        try:
            with regular(file).open(encoding="utf-8-sig", newline="") as lines:  # newline="" keeps newlines as they are
                rows = _rows(file, lines) if file.suffix == ".jsonl" else iter([lines])
                for row in rows:
                    for piece in _pieces(row):
                        yield Document(file, piece)
        except (OSError, UnicodeError) as error:
            raise DataError(f"can't read {file}: {error}") from None


def _rows(file: Path, lines: TextIO) -> Iterator[list[str]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = parse_json(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise DataError(f'{file}:{number} has no `text`; every line must be like {{"text": "..."}}')
        yield text.splitlines(keepends=True)


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """The text of these lines, split at a line end once it is long enough.  A line that is too long is split."""
    piece, length = list[str](), 0
    for line in lines:
        while length + len(line) > PIECE:
            yield "".join(piece) or line[:PIECE]
            line = line if piece else line[PIECE:]
            piece, length = [], 0
        piece.append(line)
        length += len(line)
    if length:
        yield "".join(piece)
