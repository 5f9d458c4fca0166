"""Where files are kept that can be made again.  Knows no torch."""

import os
from pathlib import Path


def folder() -> Path:
    """The folder of files that can be made again: $OUTRIDER_CACHE, or the user's cache folder."""
    root = (
        os.environ.get("OUTRIDER_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    )
    return Path(root).expanduser()
