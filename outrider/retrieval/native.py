"""Native versions of slow functions: one source file next to the Python, compiled on first use and cached on disk.

Plain C or C++ with `extern "C"`, called through ctypes: no build step, no torch.  A library's name contains the hash of
its source and of how it was compiled, so it is never confused with another one.  Without a compiler, or with
`OUTRIDER_NATIVE=0`, the Python version is used.
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
# without contraction a product and a sum round as they do in Python
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=default", "-ffp-contract=off")


class NotNative(OutriderError):
    """There is no native library, and why; the Python version is used."""


@functools.cache
def library(name: str, version: int) -> ctypes.CDLL | None:
    """The library of this source file in this folder, compiled if needed; None, and one line in the log, without it.

    version: what its `outrider_<stem>_version()` must return; raise both whenever a function's arguments change.
    """
    try:
        return load(Path(__file__).with_name(name), version)
    except NotNative as error:
        log.info("native %s: %s; the Python version is used", name, error)
        return None


def load(source: Path, version: int) -> ctypes.CDLL:
    """Compile this file if needed, and load it.  Raises NotNative with the reason where that fails."""
    if os.environ.get("OUTRIDER_NATIVE") == "0":
        raise NotNative("OUTRIDER_NATIVE=0 turns it off")
    path = _built(source)
    try:
        found = ctypes.CDLL(str(path))
        answer = getattr(found, f"outrider_{source.stem}_version")()
    except (OSError, AttributeError) as error:
        raise NotNative(f"{path} can't be loaded ({error}); delete it, so that it is compiled again") from error
    if answer != version:
        raise NotNative(f"{path} must have version {version}, got {answer}; delete it, so that it is compiled again")
    return found


def _built(source: Path) -> Path:
    """The shared library, compiled unless it is cached."""
    command = (*LANGUAGES[source.suffix], *FLAGS)
    key = repr((command, platform.machine(), platform.system())).encode() + source.read_bytes()
    path = cache.folder() / "native" / f"{source.stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    try:
        return kernels.shared_library(path, [[*command, str(source)]])
    except OSError as error:
        raise NotNative(str(error)) from error
