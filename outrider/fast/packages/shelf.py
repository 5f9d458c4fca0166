"""Compiled steps on disk: packages, and the results of checking each.

Next to `step-KEY.pt2`, `step-KEY.checked` records that this file was compared with the plain path, and
`step-KEY.refused` says why there is no package.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from outrider.fast.packages.build import NotCompiled
from outrider.storage import cache, lock, trusted

PATIENCE_S = 1800.0
"""How long a process waits while another one compiles."""


class Slower(NotCompiled):
    """There is a compiled step, but the plain path is faster."""


def folder() -> Path:
    """Where packages are stored."""
    return cache.folder() / "compiled"


def was_checked(package: Path) -> bool:
    """Whether this file was already compared with the plain path."""
    try:
        return bool(json.loads(cache.read(package.with_suffix(".checked"))) == _stamp(package))
    except (OSError, ValueError):
        return False


def note_checked(package: Path) -> None:
    """Record that this file was compared with the plain path."""
    with contextlib.suppress(OSError):  # if the folder is not writable, each process compares again
        package.with_suffix(".checked").write_text(json.dumps(_stamp(package)))


def was_refused(package: Path) -> bool:
    """Whether compiling this package failed before."""
    return package.with_suffix(".refused").exists()


@contextlib.contextmanager
def building(package: Path) -> Iterator[None]:
    """Within this context, no other process compiles; a NotCompiled raised in it is stored as the reason why there is
    no package."""
    refused, one_by_one = package.with_suffix(".refused"), folder() / ".building"
    try:
        trusted.private_folder(folder())
        one_by_one.touch()
    except OSError as error:
        raise NotCompiled(f"packages can't be stored: {error}; its steps stay plain") from None
    busy = NotCompiled("another process has been compiling for half an hour; its steps stay plain")
    with lock.held(one_by_one, busy, patience_s=PATIENCE_S):
        refused.unlink(missing_ok=True)
        try:
            yield
        except Slower:  # another measurement may differ
            raise
        except NotCompiled as reason:
            refused.write_text(str(reason))
            raise


def _stamp(path: Path) -> list[int]:
    """Size and modification time, in seconds, which a layer of an image keeps."""
    stat = path.stat()
    return [stat.st_size, int(stat.st_mtime)]
