"""The rows of a prompt set: from files of a folder, or from where it is published, at one commit.

Code that comes with a data set is never executed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

from outrider.errors import DataError
from outrider.measure.tasks.layouts import Prompt, Row
from outrider.storage.json_text import numbered_lines, parse_json
from outrider.storage.trusted import regular

GITHUB = "https://raw.githubusercontent.com/{repository}/{revision}/{file}"
GITHUB_NEWEST = "https://api.github.com/repos/{repository}/commits/{revision}"
CONTENT = "sha256:"
"""Prefix of a revision that is the content of files, not a commit."""
T = TypeVar("T")
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt set: where it is published and how its rows become prompts."""

    name: str
    suite: Literal["DSpark", "Spec-Bench"]
    hub: str
    """Name on the Hugging Face hub, or `github.com/` and a repository."""
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()
    """Files of the repository that contain the rows, if the data set can't be loaded by name."""
    revision: str | None = None
    """The pinned commit; None takes the newest, which is reported."""
    rows: int
    used: int
    """Number of prompts that the published evaluation runs."""
    prompt: Callable[[Row], Prompt]
    licence: str
    """As stated on its page when this was written; check the page before you share rows."""
    categories: frozenset[str] = frozenset()
    """Rows of other categories belong to other tasks."""
    shared: str | None = None
    """File name under which a folder may hold the rows of several tasks."""
    big: bool = False
    """Rows are read on demand: all of them would not fit into the memory of a small machine."""

    @property
    def source(self) -> str:
        return " ".join(filter(None, (self.hub, self.config, "" if self.files else self.split)))


class Lazy(Sequence[T]):
    """Items that are made on each access.  place: the location of an item, in words."""

    def __init__(self, count: int, make: Callable[[int], T], place: Callable[[int], str] = str) -> None:
        self.numbers, self.make, self.place = range(count), make, place

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        selected = self.numbers[index]
        return self.make(selected) if isinstance(selected, int) else [self.make(number) for number in selected]


def lines(paths: Sequence[Path]) -> Lazy[Row]:
    """Rows of JSONL files, each read on access.  Raises DataError with file and line."""
    starts: list[tuple[Path, int, int]] = []
    for path in paths:
        start = 0
        with regular(path).open("rb") as file:
            for number, line in numbered_lines(file):
                if line.strip():
                    starts.append((path, number, start))
                start += len(line)

    def place(index: int) -> str:
        path, number, _ = starts[index]
        return f"{path}, line {number}"

    def read(index: int) -> Row:
        path, _, start = starts[index]
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        return mapping(_json(line, place(index), "correct the line, or delete it"), place(index))

    return Lazy(len(starts), read, place)


def _json(text: bytes, place: str, remedy: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:  # the latter for lists nested too deeply
        raise DataError(f"{place} is not JSON: {error}; {remedy}") from None


def mapping(row: Any, place: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: a row must be a mapping, got {type(row).__name__}; correct the row, or delete it")
    return row


def of_paths(paths: Sequence[Path]) -> Sequence[Row]:
    """Rows of files of one kind."""
    if paths[0].suffix == ".jsonl":
        return lines(paths)
    if paths[0].suffix == ".json":
        rows = []
        for path in paths:
            value = _json(regular(path).read_bytes(), str(path), "name a file with one row per line .jsonl")
            if not isinstance(value, list):
                raise DataError(f"{path} must contain a list of rows, got {type(value).__name__}; download it again")
            rows += [mapping(row, f"{path}, row {number}") for number, row in enumerate(value, 1)]
        return rows
    import pyarrow.parquet  # slow to import, and only needed here

    try:
        table = pyarrow.concat_tables([pyarrow.parquet.read_table(regular(path)) for path in paths])
        table.validate(full=True)  # an invalid offset would end the process
        return table.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{paths[0]} can't be read as Parquet: {error}; download it again") from None


def content_of(paths: Sequence[Path]) -> str | None:
    """A hash of the content of these files; None if one is not a file."""
    total = hashlib.sha256()
    for path in paths:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return f"{CONTENT}{total.hexdigest()[:16]}"


# ── published sets ──


def published(task: Task, revision: str | None) -> tuple[Sequence[Row], str, str]:
    """The rows of a task, the commit that was read, and the source in words.  No code of the data set is executed."""
    if revision is not None and revision.startswith(CONTENT):
        raise DataError(
            f"{task.name} is pinned to {revision}, the content of files, but no folder contains {task.name}; name one "
            f"with evaluate.data=FOLDER, or pin a commit of {task.hub}"
        )
    try:
        commit = revision if revision and _COMMIT.fullmatch(revision) else newest(task, revision)
        return _fetch(task, commit), commit, f"{task.source} at {commit[:12]}"
    # the hub's client raises errors of its HTTP library, which differs between versions
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        names = " or ".join(f"{name}.jsonl" for name in (task.name, task.shared) if name)
        raise DataError(
            f"can't load {task.name} from {task.hub}: {first}; without a network, put {names} (or .json, .parquet) in "
            "a folder and name it: evaluate.data=FOLDER, or --data FOLDER"
        ) from error


def newest(task: Task, revision: str | None = None) -> str:
    """The newest commit of a task's repository, or of the branch or tag `revision`.  Needs the network."""
    repository = task.hub.removeprefix("github.com/")
    if repository != task.hub:
        address = GITHUB_NEWEST.format(repository=repository, revision=revision or "HEAD")
        return _read_url(address, "application/vnd.github.sha").decode().strip()
    from huggingface_hub import HfApi  # takes a second to import, and only needed here

    commit = HfApi().dataset_info(task.hub, revision=revision, timeout=30).sha
    if not commit:
        raise DataError("the hub gave no commit for this data set; pin one in evaluate.revisions")
    return commit


def _fetch(task: Task, commit: str) -> Sequence[Row]:
    repository = task.hub.removeprefix("github.com/")
    if repository != task.hub:
        address = GITHUB.format(repository=repository, revision=commit, file=task.files[0])
        return [mapping(parse_json(line), address) for line in _read_url(address).splitlines() if line.strip()]
    # seconds to import, and only needed here
    import datasets
    from huggingface_hub import hf_hub_download

    if task.files:
        return lines(
            [Path(hf_hub_download(task.hub, file, repo_type="dataset", revision=commit)) for file in task.files]
        )
    if Path(task.hub).exists():  # `datasets` would prefer the folder, whatever the commit
        raise DataError(
            f"the folder {task.hub} would be read instead of the data set of that name; run from another folder"
        )
    rows = cast(datasets.Dataset, datasets.load_dataset(task.hub, task.config, split=task.split, revision=commit))
    # if a commit can't be reached, `datasets` uses another one from its cache, with a warning
    if not all(commit in file["filename"] for file in rows.cache_files):
        raise DataError(f"{task.hub} has no commit {commit}; pin another one in evaluate.revisions")
    return cast(Sequence[Row], rows)


@functools.lru_cache(maxsize=2)
def _read_url(address: str, accept: str = "*/*") -> bytes:
    import httpx  # slow to import, and only needed here

    response = httpx.get(address, headers={"Accept": accept}, follow_redirects=True, timeout=60)
    response.raise_for_status()
    return response.content
