"""Checks before files are opened: that they are regular files, and that nobody else wrote what is executed."""

import os
import stat
from pathlib import Path

MOST_TEXT = 2**27
"""Bytes of a file that is read as a whole; a file may claim any size without taking it up on the disk."""


def regular(path: Path, most_bytes: int | None = None) -> Path:
    """The path itself.  Raises OSError for a pipe or a device, which could be read forever, for a missing file, and for
    one that is larger than `most_bytes`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(f"{path} has {status.st_size:,} bytes, the most are {most_bytes:,}")
    return path


def whole_text(path: Path) -> str:
    """The text of a file in UTF-8.  Raises OSError as `regular` does, and UnicodeDecodeError."""
    return regular(path, MOST_TEXT).read_text(encoding="utf-8")


def private_folder(folder: Path) -> Path:
    """The folder, created if needed and made private to the user.  Raises OSError if another user owns it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OSError(f"{folder} can't be used ({error})") from error
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user; set OUTRIDER_CACHE to a folder of your own")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def executable(path: Path) -> Path:
    """The path itself, of a file that this process will execute.

    Raises OSError if somebody else could have written it: the file or a folder above it belongs to another user, or
    others can write to it.
    """
    resolved = regular(path).resolve()
    for member in (resolved, *resolved.parents):
        status = member.stat()
        if status.st_uid not in (os.getuid(), 0):
            raise OSError(
                f"{member} belongs to another user, so {path} is not run; set OUTRIDER_CACHE to a folder of your own"
            )
        is_shared = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != os.getgid())
        if is_shared and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            raise OSError(f"{member} can be written by others, so {path} is not run; run chmod go-w {member}")
    return path
