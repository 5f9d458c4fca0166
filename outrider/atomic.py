"""A file or a folder takes its place whole or not at all: written beside it, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """NAME.part to write to, which then takes the place of `path`; after an error what was there stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return once the disk holds this file, or this folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(folder: Path, error: type[Exception], caught: tuple[type[Exception], ...] = (OSError,)) -> Iterator[Path]:
    """NAME.part to write into, which then becomes `folder`; after an error nothing is left.

    Raises `error` where the folder is there already, and instead of what is caught.
    """
    if folder.exists():
        raise error(f"{folder} is there already; name a new folder, or delete it first")
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
