"""Where files are kept that can be made again.  Knows no torch."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder() -> Path:
    """The folder of files that can be made again: $OUTRIDER_CACHE, or the user's cache folder."""
    root = (
        os.environ.get("OUTRIDER_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    )
    return Path(root).expanduser()


@contextmanager
def keeping(path: Path) -> Iterator[Path]:
    """A file to write to, which then takes the place of `path` in the cache, whole; its folder is made the user's
    alone.

    In a folder of its own, so that several processes may do so at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        part = Path(place) / path.name
        yield part
        part.replace(path)
