"""A folder that one process writes into at a time.  The lock ends with its process, even a killed one."""

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
    """Lock `folder` against other processes; raises `refusal` where another holds it for longer than `patience_s`.

    On a file system without locks nothing is locked.
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


def _acquired(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True
