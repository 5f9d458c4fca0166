"""The folder of online learning: settings, versions, the served version, and a log of all events.

    learned/
    ├── settings.json      target, drafter, and settings of the training job
    ├── state.json         the served version, and the newest version that was considered
    ├── log.jsonl          a line per event
    ├── job.log            output of the last training job
    ├── texts/             see `buffer`
    └── versions/3/        checkpoint, metrics.jsonl, the two reports that the gate compared, result.json

Version 0 is the drafter that the server was started with; its checkpoint is not copied.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from outrider import checkpoint
from outrider.config import read_object
from outrider.errors import ConfigError, DataError
from outrider.serve.learning.buffer import Buffer
from outrider.serve.learning.config import Learning
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json

SETTINGS, STATE, LOG, JOB_LOG, RESULT = "settings.json", "state.json", "log.jsonl", "job.log", "result.json"


class State(NamedTuple):
    """The served version."""

    version: int = 0
    newest: int = 0
    """Versions up to this one were served, refused or rolled back, and are not considered again."""


class Folder:
    """The folder of a drafter that learns.  Raises DataError for any other folder."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.settings = read_object(self.path / SETTINGS)
            self.config = Learning(**self.settings["learning"])
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{self.path} is not the folder of a drafter that learns ({error}); use the one in "
                "serve.learning.folder"
            ) from None
        self.buffer = Buffer(self.path / "texts", int(self.config.max_mb * 1e6), self.config.held_out)

    def set(self, **settings: Any) -> None:
        """Change settings; a running job keeps the old ones."""
        self.settings |= settings
        _write(self.path / SETTINGS, self.settings)

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def place(self, version: int) -> Path:
        return self.path / "versions" / str(version)

    def checkpoint(self, version: int) -> Path:
        """The checkpoint of this version.  Raises ConfigError for an unknown version."""
        path = self.place(version) / "checkpoint" if version else Path(self.settings["drafter"])
        if not checkpoint.is_there(path):
            versions = ", ".join(map(str, [0, *self.versions()]))
            raise ConfigError(f"{self.path} has no version {version}; it has {versions}")
        return path

    @property
    def current(self) -> Path:
        """The checkpoint of the served version."""
        return self.checkpoint(self.state().version)

    def versions(self) -> list[int]:
        """The complete versions, the oldest first, without 0."""
        folder = self.path / "versions"
        names = (path.parent.name for path in folder.glob(f"[0-9]*/{RESULT}"))
        return sorted(int(name) for name in names if name.isdigit())  # others are still being written

    def result(self, version: int) -> dict[str, Any]:
        """How a version was trained, and whether it passed."""
        return read_object(self.place(version) / RESULT)

    def next_version(self) -> int:
        """A number that no version has had; deleted versions are in the log."""
        logged = [event["version"] for event in self.events() if isinstance(event.get("version"), int)]
        return 1 + max([0, *self.versions(), *logged])

    def prune(self) -> None:
        """Delete old versions beyond `Learning.versions`."""
        current = self.state().version
        used = {current, self.result(current)["from"] if current in self.versions() else 0}
        for version in [version for version in self.versions() if version not in used][: -self.config.versions]:
            (self.place(version) / RESULT).unlink()  # first, so that an incomplete folder is not a version
            shutil.rmtree(self.place(version), ignore_errors=True)

    # ── the served version ────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> State:
        path = self.path / STATE
        try:
            return State(**read_object(path)) if path.exists() else State()
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} can't be read: {error}; delete it to serve the original drafter") from None

    def use(self, version: int, newest: int) -> None:
        """Have this version served; a running server loads it within seconds."""
        self.checkpoint(version)
        _write(self.path / STATE, State(version, newest)._asdict())

    def undo(self, to: int | None = None) -> tuple[int, int]:
        """Return to a version, by default the previous one; returns the numbers of the old and the new version.

        Newer versions are not served again.  Raises ConfigError if there is no version to return to.
        """
        before = self.state().version
        if to is None:
            if not before:
                raise ConfigError(f"{self.path} serves version 0, the original drafter; there is nothing to undo")
            to = int(self.result(before)["from"])
        self.use(to, max([self.state().newest, *self.versions()]))
        self.log("undone", version=before, to=to)
        return before, to

    # ── the log ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def log(self, event: str, **facts: Any) -> None:
        """Append a line; several processes may do so."""
        row = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **facts}
        with (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """The log, the oldest event first; a line cut off by a crash is skipped."""
        path = self.path / LOG
        return list(_rows(path.read_text(encoding="utf-8"))) if path.exists() else []


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=1))


def _rows(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


# ── opening a folder ──────────────────────────────────────────────────────────────────────────────────────────────────


def opened(config: Learning, drafter: str | Path, target: Mapping[str, Any], threads: int) -> Folder:
    """The folder of this drafter, created if it does not exist.

    drafter: its checkpoint.  target: `name` and the other arguments of `load_target`.  threads: those of the server.
    Raises ConfigError for a drafter that can't learn, and for a folder of another drafter.
    """
    source = Path(drafter).resolve()
    if not checkpoint.is_there(source):
        raise ConfigError(
            f"serve.learning needs a trained drafter, and {str(drafter)!r} is not a checkpoint: train one with "
            "`outrider run`, or convert another project's with `outrider import`; or leave serve.learning out"
        )
    path, weights = Path(config.folder), _hash_of(checkpoint.whole(source) / checkpoint.WEIGHTS)
    if (path / SETTINGS).exists():
        before = read_object(path / SETTINGS)
        if (before.get("weights"), before.get("target", {}).get("name")) != (weights, target["name"]):
            raise ConfigError(
                f"{path} belongs to {before.get('drafter')} for {before.get('target', {}).get('name')}, not to "
                f"{drafter} for {target['name']}; name another folder in serve.learning.folder"
            )
    settings = {
        "target": dict(target), "drafter": str(source), "weights": weights, "threads": threads, "compile": False,
        "learning": config.model_dump(mode="json"),
    }  # fmt: skip
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(path / SETTINGS, settings)
    except OSError as error:
        raise ConfigError(f"can't write to {path}: {error.strerror}; name another serve.learning.folder") from None
    return Folder(path)


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def remove_unfinished(path: Path) -> None:
    """Delete the files of interrupted jobs."""
    for part in path.glob("versions/*.part"):
        shutil.rmtree(part, ignore_errors=True)
