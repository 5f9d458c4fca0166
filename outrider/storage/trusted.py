"""Checks before files are opened: that they are regular files, and that nobody else wrote what is executed."""

import os
import stat
from pathlib import Path


def regular(path: Path) -> Path:
    """The path itself.  Raises OSError for a pipe or a device, which could be read forever, and for a missing file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    return path


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
