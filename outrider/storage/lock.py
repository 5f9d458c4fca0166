"""Locks of folders and files that only one process may write to; they end with the process, even if it is killed.

Not `filelock`, which can't lock a folder: it would leave a lock file in every run folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(folder: Path, refusal: Exception, patience_s: float = 3.0) -> Iterator[None]:
    """Lock a folder or file against other processes; raises `refusal` if another holds it for `patience_s`.

    Has no effect on a file system without locks.
    """
    handle, until = os.open(folder, os.O_RDONLY), time.monotonic() + patience_s
    try:
        while not _acquired(handle):
            if time.monotonic() >= until:
                raise refusal
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _is_current(path: Path, handle: int) -> bool:
    """Whether the path still names the open file, which another process may have removed before it was locked."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _acquired(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


class Claim:
    """A piece of work that one process at a time does; the claim ends with the process, even if it is killed."""

    def __init__(self, path: Path, handle: int):
        """Use `take`."""
        self._path, self._handle = path, handle

    @classmethod
    def take(cls, path: Path) -> Claim | None:
        """Claim the work that the file `path` stands for; None if another process has it."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if _acquired(handle) and _is_current(path, handle):
            return cls(path, handle)
        os.close(handle)
        return None

    def release(self) -> None:
        """Release the claim and remove its file."""
        self._path.unlink(missing_ok=True)
        os.close(self._handle)
