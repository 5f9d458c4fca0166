"""Atomic writes of files and folders, by a temporary name that is then renamed; and complete lines of a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields NAME.part to write to, which then replaces `path`; after an error the old file is kept."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a file that a run was appending to; empty if it does not exist.

    An incomplete last line is removed from the file.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(end)
                return
            end += len(line)
            yield number, line


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(
    folder: Path, error: type[Exception], caught: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[Path]:
    """Yields NAME.part to write into, which then becomes `folder`; after an error nothing is left.

    Raises `error` if the folder exists, and in place of the exceptions in `caught`.
    """
    if folder.exists():
        raise error(f"{folder} exists already; name a new folder, or delete it first")
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        part.rename(folder)
    except caught as problem:
        raise error(f"can't write {folder}: {problem}; name a folder that can be written") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
