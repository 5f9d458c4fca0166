"""Native twins of slow functions: one source file beside the Python, compiled on first use for this machine and kept on disk.

Plain C or C++ behind `extern "C"`, called through ctypes: no build step, no torch.  A library's name holds the hash of its
source and of how it was compiled, so another source is never mistaken for it.  Without a compiler, or where
`OUTRIDER_NATIVE=0`, the Python twin goes on alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
from pathlib import Path

from outrider import kernels, machine
from outrider.errors import OutriderError

log = logging.getLogger(__name__)

LANGUAGES = {".c": ("-x", "c", "-std=c11"), ".cpp": ("-x", "c++", "-std=c++17")}
# without contraction a product and a sum round as they do in Python
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=default", "-ffp-contract=off")


class NotNative(OutriderError):
    """There is no native library, and why; the Python twin goes on."""


@functools.cache
def library(name: str, version: int) -> ctypes.CDLL | None:
    """The library of this source file in this folder, compiled if need be; None, and one line in the log, without it.

    version: what its `outrider_<stem>_version()` must return; raise both whenever a function's arguments change.
    """
    try:
        return load(Path(__file__).with_name(name), version)
    except NotNative as error:
        log.info("native %s: %s; its Python twin is used", name, error)
        return None


def load(source: Path, version: int) -> ctypes.CDLL:
    """Compile this file if need be, and load it.  NotNative says why not."""
    if os.environ.get("OUTRIDER_NATIVE") == "0":
        raise NotNative("OUTRIDER_NATIVE=0 asks for none")
    path = _built(source)
    try:
        found = ctypes.CDLL(str(path))
        answer = getattr(found, f"outrider_{source.stem}_version")()
    except (OSError, AttributeError) as error:
        raise NotNative(f"{path} can't be loaded ({error}); delete it and it is compiled again") from error
    if answer != version:
        raise NotNative(f"{path} is of version {answer}, version {version} is wanted; delete it")
    return found


def _built(source: Path) -> Path:
    """The shared library, compiled where that was not done before."""
    command = (*LANGUAGES[source.suffix], *FLAGS)
    said = repr((command, platform.machine(), platform.system())).encode() + source.read_bytes()
    folder = machine.cache_folder() / "native"
    try:
        _make_private(folder)
    except OSError as error:
        raise NotNative(f"{folder} can't be used ({error})") from error
    try:
        path = folder / f"{source.stem}-{hashlib.sha256(said).hexdigest()[:16]}.so"
        return kernels.shared_library(path, [[*command, str(source)]])
    except OSError as error:
        raise NotNative(str(error)) from error


def _make_private(folder: Path) -> None:
    """A folder that nobody else can write to: what lies there is run.  NotNative where it belongs to others."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = folder.stat()
    if about.st_uid != os.getuid():
        raise NotNative(f"{folder} belongs to another user; set OUTRIDER_CACHE to a folder of your own")
    if about.st_mode & 0o077:
        folder.chmod(0o700)
