"""The cache folder, for files that can be recreated.  Imports no torch."""

import functools
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.storage import trusted

log = logging.getLogger(__name__)


def folder() -> Path:
    """The cache folder: $OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    root = (
        os.environ.get("OUTRIDER_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    )
    return Path(root).expanduser()


def read(path: Path) -> bytes:
    """The content of a file of the cache.

    Raises OSError if it is missing, or if somebody else could have written it, which is logged.
    """
    try:
        return trusted.own_file(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        _warn_once(str(error))
        raise


@functools.lru_cache(64)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


@contextmanager
def keeping(path: Path) -> Iterator[Path]:
    """Yields a file to write to, which then atomically replaces `path` in the cache.

    Its folder is created for the user only.  The file is in a temporary folder, so several processes may do so at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        yield part
        part.replace(path)
