"""What is on disk of compiled steps: packages, and what is known of each.

Beside `step-KEY.pt2` lie `step-KEY.checked`, which says that this very file was compared with the plain path, and
`step-KEY.refused`, which says why there is no package.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from outrider.fast.packages.build import NotCompiled
from outrider.storage import cache, lock

PATIENCE_S = 1800.0
"""For which a process waits while another one compiles."""


class Slower(NotCompiled):
    """There is a compiled step, and the plain path is faster."""


def folder() -> Path:
    """Where packages are stored."""
    return cache.folder() / "compiled"


def was_checked(package: Path) -> bool:
    """Whether this very file was compared with the plain path before."""
    try:
        return bool(json.loads(package.with_suffix(".checked").read_text()) == _stamp(package))
    except (OSError, ValueError):
        return False


def note_checked(package: Path) -> None:
    """It was compared with the plain path."""
    with contextlib.suppress(OSError):  # a folder that can't be written costs a comparison a process
        package.with_suffix(".checked").write_text(json.dumps(_stamp(package)))


def was_refused(package: Path) -> bool:
    """Whether compiling this package failed before."""
    return package.with_suffix(".refused").exists()


@contextlib.contextmanager
def building(package: Path) -> Iterator[None]:
    """While this is open, no other process compiles; NotCompiled that ends it is noted as the reason why there is no
    package."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    refused, one_by_one = package.with_suffix(".refused"), folder() / ".building"
    one_by_one.touch()
    busy = NotCompiled("another process has been compiling for half an hour; its steps stay plain")
    with lock.held(one_by_one, busy, patience_s=PATIENCE_S):
        refused.unlink(missing_ok=True)
        try:
            yield
        except Slower:  # which another measurement may correct
            raise
        except NotCompiled as reason:
            refused.write_text(str(reason))
            raise


def _stamp(path: Path) -> list[int]:
    """Size and time of last change."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
