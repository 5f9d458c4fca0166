"""Where a replay writes: never onto the log that it reads, and onto what is there only when told so.  No torch."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from outrider.errors import ConfigError, DataError

FILES = ("calls.jsonl", "calls.jsonl.part", "replay.json")
"""In the folder of a replay."""


def check_places(
    log: Path, *, save: Path | None = None, out: Path | None = None, result: Path | None = None, over: bool = False
) -> None:
    """ConfigError where a copy, a folder or a result would be written onto the log, DataError where onto what is there."""
    places = [] if result is None else [("--json", result)]
    if save is not None:
        places += [("--save", save), ("--save", save.with_name(save.name + ".part"))]
    if out is not None:
        places += [("--out", out / name) for name in (*FILES, "replay.json.part")]
    for option, place in places:
        if place.exists() and log.exists() and place.samefile(log):
            raise ConfigError(f"{option} would write {place}, which is the log that is read; name another place")
    for kind, wanted in (("file", save), ("folder", out)):
        if wanted is not None:
            _check_free(kind, wanted, over)


def _check_free(kind: str, wanted: Path, over: bool) -> None:
    if wanted.exists() and not over:
        raise DataError(f"{wanted} is there already; name another {kind}, or write over it with --over")


def opened(folder: Path, over: bool) -> IO[str]:
    """The file of calls in a new folder.  DataError where one is there and `over` is not given."""
    _check_free("folder", folder, over)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        return (folder / "calls.jsonl.part").open("w", encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't write in {folder}: {error.strerror}; name another folder") from None
