"""The output folder of a replay; neither the log nor, unless `over` is set, existing files are overwritten.  No
torch."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from outrider.errors import ConfigError, DataError

FILES = ("calls.jsonl", "calls.jsonl.part", "replay.json")
"""The files in the folder of a replay."""


def check_paths(
    log: Path, *, save: Path | None = None, out: Path | None = None, result: Path | None = None, over: bool = False
) -> None:
    """Raises ConfigError if an output would overwrite the log, DataError if it would overwrite another file."""
    paths = [] if result is None else [("--json", result)]
    if save is not None:
        paths += [("--save", save), ("--save", save.with_name(save.name + ".part"))]
    if out is not None:
        paths += [("--out", out / name) for name in (*FILES, "replay.json.part")]
    for option, path in paths:
        if path.exists() and log.exists() and path.samefile(log):
            raise ConfigError(f"{option} would overwrite {path}, the log being read; choose another path")
    for kind, target in (("file", save), ("folder", out)):
        if target is not None:
            _check_free(kind, target, over)


def _check_free(kind: str, path: Path, over: bool) -> None:
    if path.exists() and not over:
        raise DataError(f"{path} exists already; name another {kind}, or overwrite it with --over")


def open_output(folder: Path, over: bool) -> IO[str]:
    """The file of calls in a new folder.  Raises DataError if one exists and not `over`."""
    _check_free("folder", folder, over)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        return (folder / "calls.jsonl.part").open("w", encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't write in {folder}: {error.strerror}; name another folder") from None
