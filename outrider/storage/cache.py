"""The cache folder, for files that can be recreated.  Imports no torch."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder() -> Path:
    """The cache folder: $OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    root = (
        os.environ.get("OUTRIDER_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    )
    return Path(root).expanduser()


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
