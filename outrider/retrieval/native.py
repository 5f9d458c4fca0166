"""Native versions of slow functions: C or C++ files next to the Python ones, compiled on first use and cached on disk.

Called through ctypes (`extern "C"`): no build step, no torch.  A library's file name contains a hash of its source and
compiler flags.  Without a compiler, or with `OUTRIDER_NATIVE=0`, the Python version is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
from pathlib import Path

from outrider import kernels
from outrider.errors import OutriderError
from outrider.storage import cache

log = logging.getLogger(__name__)

LANGUAGES = {".c": ("-x", "c", "-std=c11"), ".cpp": ("-x", "c++", "-std=c++17")}
# -ffp-contract=off: products and sums are rounded as in Python
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=default", "-ffp-contract=off")


class NotNative(OutriderError):
    """No native library is available, for this reason; the Python version is used."""


@functools.cache
def library(name: str, version: int) -> ctypes.CDLL | None:
    """The library of a source file in this folder, compiled if needed; None, with a log line, if unavailable.

    version: what its `outrider_<stem>_version()` must return; increase both whenever a function's arguments change.
    """
    try:
        return load(Path(__file__).with_name(name), version)
    except NotNative as error:
        log.info("native %s: %s; the Python version is used", name, error)
        return None


def load(source: Path, version: int) -> ctypes.CDLL:
    """Load the library of this file, compiled if needed.  Raises NotNative with the reason if that fails."""
    if os.environ.get("OUTRIDER_NATIVE") == "0":
        raise NotNative("OUTRIDER_NATIVE=0 turns it off")
    path = _built(source)
    try:
        library = ctypes.CDLL(str(path))
        found_version = getattr(library, f"outrider_{source.stem}_version")()
    except (OSError, AttributeError) as error:
        raise NotNative(f"{path} can't be loaded ({error}); delete it to recompile it") from error
    if found_version != version:
        raise NotNative(f"{path} must have version {version}, got {found_version}; delete it to recompile it")
    return library


def _built(source: Path) -> Path:
    """The shared library, compiled unless it is cached."""
    command = (*LANGUAGES[source.suffix], *FLAGS)
    key = repr((command, platform.machine(), platform.system())).encode() + source.read_bytes()
    path = cache.folder() / "native" / f"{source.stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    try:
        return kernels.shared_library(path, [[*command, str(source)]])
    except OSError as error:
        raise NotNative(str(error)) from error
