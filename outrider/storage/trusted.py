"""Checks before files are opened: that they are regular files, and that nobody else wrote what is run or believed."""

import os
import stat
from pathlib import Path

MOST_TEXT = 2**27
"""Bytes of a file that is read as a whole; a file may claim any size without taking it up on the disk."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""What a file begins with that git left in place of a large one."""
FETCH = "it is a Git LFS pointer, not the file itself; run `git lfs pull` there, or download it again"


def regular(path: Path, most_bytes: int | None = None) -> Path:
    """The path itself.  Raises OSError for a pipe or a device, which could be read forever, for a missing file, for a
    Git LFS pointer, and for one that is larger than `most_bytes`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a regular file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(f"{path} has {status.st_size:,} bytes, the most are {most_bytes:,}")
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise OSError(FETCH)
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


def own_file(path: Path) -> Path:
    """The path itself, of a file that this process executes or whose content it believes.

    Raises OSError if somebody else could have written it: the file or a folder above it belongs to another user, or
    others can write to it.
    """
    resolved = regular(path).resolve()
    for member in (resolved, *resolved.parents):
        status = member.stat()
        if status.st_uid not in (os.getuid(), 0):
            raise OSError(
                f"{member} belongs to another user, so {path} is not used; set OUTRIDER_CACHE to a folder of your own"
            )
        is_shared = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != os.getgid())
        if is_shared and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            raise OSError(f"{member} can be written by others, so {path} is not used; run chmod go-w {member}")
    return path
