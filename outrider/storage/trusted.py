"""Files that are checked before they are opened: that they are files, and that nobody else wrote what is run."""

import os
import stat
from pathlib import Path


def regular(path: Path) -> Path:
    """A file, as it is given.  Raises OSError for a pipe or a device, which could be read for ever, and for none."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    return path


def private_folder(folder: Path) -> Path:
    """A folder that nobody else can write to, made where it is not there.  Raises OSError where another user owns
    it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OSError(f"{folder} can't be used ({error})") from error
    about = folder.stat()
    if about.st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user; set OUTRIDER_CACHE to a folder of your own")
    if about.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def executable(path: Path) -> Path:
    """A file that is run in this process, as it is given.  Raises OSError where somebody else could have written it: it
    or a folder above it is another user's, or can be written by others."""
    place = regular(path).resolve()
    for one in (place, *place.parents):
        about = one.stat()
        if about.st_uid not in (os.getuid(), 0):
            raise OSError(
                f"{one} belongs to another user, so {path} is not run; set OUTRIDER_CACHE to a folder of yours"
            )
        is_shared = about.st_mode & stat.S_IWOTH or (about.st_mode & stat.S_IWGRP and about.st_gid != os.getgid())
        if is_shared and not (stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX):
            raise OSError(f"{one} can be written by others, so {path} is not run; take their right away: chmod go-w")
    return path
