"""State of a roll-out in a run's folder: the current checkpoint, and files written by commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from outrider import checkpoint
from outrider import config as configs
from outrider.drafters import trained
from outrider.engines import names
from outrider.engines.engine import ENGINES
from outrider.errors import ConfigError, DataError
from outrider.report.schema import Report
from outrider.storage.json_text import parse_json
from outrider.training.progress.checkpoints import chosen

State = Literal["done", "to do", "out of date", "failed"]
LOG = "traffic.jsonl"
"""Default name of the recorded requests."""


class Unfinished(Exception):
    """An item is not done: its state and the reason."""

    def __init__(self, state: State, reason: str):
        super().__init__(reason)
        self.state, self.reason = state, reason


@dataclass(frozen=True)
class Run:
    """A run and its drafter."""

    folder: Path
    kind: str
    draft: str
    """The checkpoint's folder; the kind if nothing is trained."""
    target: str
    tasks: tuple[str, ...]
    trains: bool
    weights: str | None
    """Checksum of the drafter's weights; None if unknown or not trained yet."""
    saved_s: float
    """Time of the weights; 0 if the run does not train or has no checkpoint yet."""
    engine: str | None
    """The first engine that runs this kind; None if only Outrider's server does."""
    log: str

    @property
    def is_trained(self) -> bool:
        """Whether training is complete or not needed."""
        return not self.trains or self.saved_s > 0

    def command(self, *words: str | Path) -> str:
        """An outrider command for the shell."""
        return shlex.join(["outrider", *map(str, words)])


def read(folder: Path, log: str = LOG) -> Run:
    """Read a run's folder.  Raises ConfigError if it is not one, or not at runs/NAME of the current folder."""
    place = folder / "config.yaml"
    if not place.is_file():
        raise ConfigError(f"{folder} has no config.yaml, so it is not a run's folder; give runs/NAME of `outrider run`")
    values = configs.read(place)
    try:
        drafter, target, name = values["drafter"], str(values["target"]["name"]), str(values["name"])
        kind, tasks = str(drafter["kind"]), tuple((values.get("evaluate") or {}).get("tasks") or ())
    except (KeyError, TypeError):
        raise ConfigError(f"{place} lacks name, target.name or drafter.kind; run the run file again") from None
    if folder.resolve() != (Path("runs") / name).resolve():
        up = folder.resolve().parent.parent
        raise ConfigError(f"{folder} is not runs/{name} from here, where commands look for it; go to {up} first")
    folder, trains = Path("runs") / name, trained(kind) is not None and bool(values.get("train"))
    draft, saved_s = chosen(folder) if trains else Path(drafter.get("from", kind)), 0.0
    if trains and checkpoint.is_there(draft):
        saved_s = (checkpoint.whole(draft) / checkpoint.WEIGHTS).stat().st_mtime
    weights, engine = checkpoint.checksum(draft), _engine(kind, str(draft) != kind)
    return Run(folder, kind, str(draft), target, tasks, trains, weights, saved_s, engine, log)


def _engine(kind: str, is_folder: bool) -> str | None:
    """The first engine that runs this kind, from a folder or by name."""
    for engine, entry in ENGINES.items():
        if kind not in entry.methods:
            continue
        try:
            return engine if not is_folder else names.chosen(engine, kind).engine
        except ConfigError:  # it has no export of this kind
            continue
    return None


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(path: Path) -> dict[str, Any]:
    """The content of a command's output file."""
    if not path.exists():
        raise Unfinished("to do", f"there is no {path}")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        assert isinstance(content, dict)
    except (OSError, ValueError, AssertionError):
        raise Unfinished("out of date", f"{path} can't be read") from None
    return content


def report_of(folder: Path) -> Report:
    """The report in a folder."""
    if not (folder / "report.json").exists():
        raise Unfinished("to do", f"there is no {folder / 'report.json'}")
    try:
        return Report.load(folder)
    except DataError as error:
        raise Unfinished("out of date", str(error)) from None


def check_trained(run: Run) -> None:
    """Refuse a run whose drafter is not trained yet."""
    if not run.is_trained:
        raise Unfinished("to do", f"there is no checkpoint in {run.draft}")


def check_weights(run: Run, checksum: Any, path: Path) -> None:
    """Refuse a file for other weights."""
    if checksum != run.weights:
        which = "names no weights" if checksum is None else f"is of weights {checksum}"
        raise Unfinished("out of date", f"{path} {which}, the checkpoint has {run.weights}")


def check_time(run: Run, at_s: float, path: Path) -> None:
    """Refuse a file that is older than the weights."""
    if at_s < run.saved_s:
        when = (datetime.fromtimestamp(each).isoformat(" ", "minutes") for each in (at_s, run.saved_s))
        raise Unfinished("out of date", f"{path} is of {next(when)}, the checkpoint of {next(when)}")
