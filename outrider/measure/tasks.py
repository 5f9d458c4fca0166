"""Prompt sets by name: the nine of the DSpark paper, Spec-Bench's six, `stdlib`, and any FILE.jsonl or FILE.txt.

`TASKS` is the whole list.  A data set comes from a folder of yours where that holds it, else from where it is published, at
one commit, which is looked up first where none is pinned and is part of what `load` answers.  Rows may be in the data set's own
layout or plain: {"turns": [...]} with `id`, `reference` and `system` where there are such.  Shapes of prompts, and how many of
them are used: DSpark's published evaluation (arXiv 2607.05147) and Spec-Bench (arXiv 2401.07851).  Knows no torch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, overload

from outrider import demo
from outrider.config import nearest
from outrider.data.config import Config as Source
from outrider.data.conversations import read
from outrider.errors import DataError
from outrider.measure.fields import Row, has, text, texts, word

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FILES = (".jsonl", ".txt")
FOLDER_FILES = (".jsonl", ".json", ".parquet")
GITHUB = "https://raw.githubusercontent.com/{repository}/{revision}/{file}"
GITHUB_NEWEST = "https://api.github.com/repos/{repository}/commits/{revision}"
CONTENT = "sha256:"
"""Begins a revision that is the content of files, not a commit."""
_COMMIT = re.compile("[0-9a-f]{40}")


class Prompt(NamedTuple):
    """One prompt of a task: the user's turns.  The answers between them are the target's own."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    reference: Any = None
    """What the task's scorer compares an answer with; None where the task has no score."""

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The conversation up to the next answer wanted, with the answers given so far."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in itertools.zip_longest(self.turns[: len(answers) + 1], answers):
            said.append({"role": "user", "content": turn})
            if answer is not None:
                said.append({"role": "assistant", "content": answer})
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt set: where it is, what its rows are, what scores an answer."""

    name: str
    suite: Literal["DSpark", "Spec-Bench"]
    hub: str
    """Its name on the Hugging Face hub, or `github.com/` and a repository."""
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()
    """Files of the repository that hold the rows, where it is no data set that loads by its name."""
    revision: str | None = None
    """The commit it is pinned to; None takes the newest and says which that was."""
    rows: int
    used: int
    """Prompts that the published evaluation runs."""
    prompt: Callable[[Row], Prompt]
    score: Literal["answer", "tests"] | None = None
    """What tells a right answer: what stands at its end, or tests of the code in it; None where it takes a judge."""
    licence: str
    """As its page said when this was written; look there before you pass rows on."""
    categories: frozenset[str] = frozenset()
    """Rows of other categories belong to other tasks."""
    shared: str | None = None
    """A name under which a folder may hold the rows of several tasks at once."""
    big: bool = False
    """Rows are read when they are needed: all at once would not fit in the memory of a small machine."""

    @property
    def source(self) -> str:
        return " ".join(filter(None, (self.hub, self.config, "" if self.files else self.split)))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A whole prompt set."""

    prompts: Sequence[Prompt]
    source: str
    """Where the rows came from, in words."""
    revision: str | None
    """The commit that was read, or `sha256:` and 16 digits of a file's content."""
    count: int

    def some(self, most: int, seed: int) -> Iterator[Prompt]:
        """Up to `most`, the head of a seeded shuffle: fewer of one seed are the first of more.

        DSpark's own evaluation draws in this way, with seed 980406.
        """
        order = list(range(self.count))
        random.Random(seed).shuffle(order)
        return (self.prompts[i] for i in order[:most])


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A row that is read again when it is asked for."""

    rows: Sequence[Row]
    index: int

    def __call__(self) -> Row:
        return self.rows[self.index]


# ── rows to prompts ───────────────────────────────────────────────────────────────────────────────────────────────────


def _gsm8k(row: Row) -> Prompt:
    answer = text(row, "answer").rpartition("####")[2].strip()
    return Prompt("", (text(row, "question") + STEP_BY_STEP,), reference=answer)


def _problem(row: Row) -> Prompt:
    return Prompt(_name(row, "unique_id", "problem_idx"), (text(row, "problem") + STEP_BY_STEP,), reference=word(row, "answer"))


def _humaneval(row: Row) -> Prompt:
    stub = text(row, "prompt")
    asked = f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{stub}\n```"
    tests = {"stub": stub, "name": text(row, "entry_point"), "test": text(row, "test")}
    return Prompt(word(row, "task_id"), (asked,), reference=tests)


def _mbpp(row: Row) -> Prompt:
    imports = texts(row, "test_imports") if has(row, "test_imports") else ()
    tests = {"imports": list(imports), "asserts": list(texts(row, "test_list"))}
    return Prompt(f"mbpp/{word(row, 'task_id')}", (text(row, "prompt"),), reference=tests)


def _livecodebench(row: Row) -> Prompt:
    starter = text(row, "starter_code").strip("\n") if has(row, "starter_code") else ""
    if starter:
        form = f"Begin with this code and keep its names:\n```python\n{starter}\n```"
    else:
        form = "Read from standard input, write to standard output:\n```python\n# your program\n```"
    asked = (
        "You are an expert Python programmer. Answer the question below with one complete Python program that does what it "
        f"says and passes all of its tests.\n\n### Question\n{text(row, 'question_content')}\n\n### Format\n{form}\n\n"
        "### Answer\n"
    )
    return Prompt(word(row, "question_id"), (asked,))


def _mt_bench(row: Row) -> Prompt:
    return Prompt(word(row, "prompt_id"), texts(row, "prompt"))


def _alpaca(row: Row) -> Prompt:
    given = text(row, "input") if has(row, "input") else ""
    return Prompt("", (text(row, "instruction") + (f"\n\n### Input:\n{given}" if given else ""),))


def _arena_hard(row: Row) -> Prompt:
    return Prompt(word(row, "uid"), (text(row, "prompt"),))


def _plain(row: Row) -> Prompt:
    """The plain layout, which is Spec-Bench's own too."""
    system = text(row, "system") if has(row, "system") else None
    return Prompt(_name(row, "id", "question_id"), texts(row, "turns"), system, row.get("reference"))


def _name(row: Row, *keys: str) -> str:
    """What a row calls itself under one of these keys; empty where it does not."""
    return word(row, *keys) if any(has(row, key) for key in keys) else ""


# ── the list ──────────────────────────────────────────────────────────────────────────────────────────────────────────

CHAT = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


def _dspark(name: str, hub: str, rows: int, used: int, prompt: Callable[[Row], Prompt], licence: str, **more: Any) -> Task:
    return Task(name=name, suite="DSpark", hub=hub, rows=rows, used=used, prompt=prompt, licence=licence, **more)


def _spec_bench(name: str, categories: frozenset[str]) -> Task:
    return Task(
        name=f"spec-bench-{name}", suite="Spec-Bench", hub="github.com/hemingkx/Spec-Bench", rows=80, used=80, prompt=_plain,
        licence="Apache-2.0, and its sources'", files=("data/spec_bench/question.jsonl",), categories=categories,
        shared="spec-bench",
    )  # fmt: skip


TASKS: Mapping[str, Task] = {task.name: task for task in (
    _dspark("gsm8k", "openai/gsm8k", 1319, 500, _gsm8k, "MIT", config="main", score="answer"),
    _dspark("math500", "HuggingFaceH4/MATH-500", 500, 500, _problem, "MIT (MATH)", score="answer"),
    _dspark("aime25", "MathArena/aime_2025", 30, 30, _problem, "CC-BY-NC-SA-4.0", split="train", score="answer"),
    _dspark("humaneval", "openai/openai_humaneval", 164, 164, _humaneval, "MIT", score="tests"),
    _dspark("mbpp", "google-research-datasets/mbpp", 257, 256, _mbpp, "CC-BY-4.0", config="sanitized", score="tests"),
    _dspark("livecodebench", "livecodebench/code_generation_lite", 1055, 500, _livecodebench, "CC, and the contests'",
            files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))), score="tests", big=True),
    _dspark("mt-bench", "HuggingFaceH4/mt_bench_prompts", 80, 80, _mt_bench, "Apache-2.0", split="train"),
    _dspark("alpaca", "tatsu-lab/alpaca", 52002, 500, _alpaca, "CC-BY-NC-4.0", split="train"),
    _dspark("arena-hard-v2", "lmarena-ai/arena-hard-auto", 750, 500, _arena_hard, "Apache-2.0",
            files=("data/arena-hard-v2.0/question.jsonl",)),
    _spec_bench("mt-bench", CHAT),
    _spec_bench("translation", frozenset({"translation"})),
    _spec_bench("summarization", frozenset({"summarization"})),
    _spec_bench("qa", frozenset({"qa"})),
    _spec_bench("math-reasoning", frozenset({"math_reasoning"})),
    _spec_bench("rag", frozenset({"rag"})),
)}  # fmt: skip
"""Every named prompt set.  No revision is pinned here: none of them was read from the hub while this was written."""


def task_name(task: str) -> str:
    return Path(task).stem if task.endswith(FILES) else task


def check(task: str) -> str:
    """The task's name, known.  Raises DataError naming those there are."""
    if task != "stdlib" and task not in TASKS and not task.endswith(FILES):
        raise DataError(
            f"unknown task {task!r}{nearest(task, ['stdlib', *TASKS])}  A file of prompts, such as mine.jsonl, is a task too."
        )
    return task


def prompts(
    task: str, most: int, seed: int = 0, data: str | Path | None = None, revision: str | None = None
) -> Iterator[Prompt]:
    """Up to `most` prompts: `stdlib` and named tasks drawn by seed, a file's in its order.  Raises DataError as `load` does."""
    if check(task) == "stdlib":
        _refuse_other(None, "the interpreter's standard library", revision)
        for name, said in demo.prompts("held_out", most, seed):
            yield Prompt(name, (said,))
    elif task.endswith(FILES):
        if revision is not None and Path(task).exists():  # where there is none, the reader says so
            _refuse_other(_content([Path(task)]), task, revision)
        yield from _of_file(task, most)
    else:
        yield from load(task, data, revision).some(most, seed)


def load(task: str, data: str | Path | None = None, revision: str | None = None) -> Loaded:
    """A whole prompt set: from the folder `data` where that holds it, else from where it is published, at one commit.

    `revision` pins that commit, or, written `sha256:...`, the content of files.  Raises DataError for an unknown task, for
    rows in no known layout, for what is not the pinned one, and where there is neither a folder nor a network.
    """
    if check(task) == "stdlib":
        drawn = tuple(prompts(task, 10**6, revision=revision))
        return Loaded(drawn, "the interpreter's standard library", None, len(drawn))
    if task.endswith(FILES):
        drawn = tuple(prompts(task, 10**9, revision=revision))
        return Loaded(drawn, task, _content([Path(task)]), len(drawn))
    known = TASKS[task]
    paths = found(known, data) if data is not None else ()
    if paths:
        place, content = ", ".join(map(str, paths)), _content(paths)
        _refuse_other(content, place, revision)
        rows, revision = _of_paths(paths), content
    else:
        rows, revision, place = _published(known, revision or known.revision)
    made = _prompts_of(known, rows, place)
    if not made:
        raise DataError(f"{place} holds no row of {task}; wanted {known.rows}")
    return Loaded(made, place, revision, len(made))


def _refuse_other(content: str | None, place: str, revision: str | None) -> None:
    """Raises DataError where a revision is pinned that is not this content; None is content that can't be pinned."""
    if revision is None or revision == content:
        return
    if content is None:
        raise DataError(f"{place} can't be pinned, and {revision} was; leave its revision out")
    if revision.startswith(CONTENT):
        raise DataError(f"{place} is {content}, not the pinned {revision}; pin the one you mean, or bring the other file")
    raise DataError(
        f"{place} is no commit, and {revision} is pinned; pin its content, {content}, or read the commit, without the folder"
    )


def found(task: Task, data: str | Path) -> tuple[Path, ...]:
    """A folder's files that hold a task: NAME.jsonl, .json or .parquet, or all such files of a folder NAME; () for none."""
    folder = Path(data)
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; name one that holds files such as gsm8k.jsonl")
    for name in filter(None, (task.name, task.shared)):
        for ending in FOLDER_FILES:
            if (folder / f"{name}{ending}").is_file():
                return (folder / f"{name}{ending}",)
            several = tuple(sorted((folder / name).glob(f"*{ending}")))
            if several:
                return several
    return ()


def _of_file(path: str, most: int) -> Iterator[Prompt]:
    for conversation in read(Source(conversations=path, count=most)):
        said = {role: [m["content"] for m in conversation.messages if m["role"] == role] for role in ("system", "user")}
        yield Prompt(conversation.id, tuple(said["user"]), said["system"][0] if said["system"] else None)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _prompts_of(task: Task, rows: Sequence[Row], place: str) -> Sequence[Prompt]:
    mine: Sequence[int] = range(len(rows))
    if task.categories:  # a row that says none is this task's
        mine = [i for i in mine if rows[i].get("category") in (None, *task.categories)]
    made = _Prompts(task, rows, mine, place)
    return made if task.big else tuple(made)


@dataclass(frozen=True, slots=True, eq=False)
class _Prompts(Sequence[Prompt]):
    """Rows as prompts, each made when it is asked for."""

    task: Task
    rows: Sequence[Row]
    mine: Sequence[int]
    place: str

    def __len__(self) -> int:
        return len(self.mine)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = self.mine[index]
        row = self.rows[at]
        plain = "turns" in row
        try:
            prompt = (_plain if plain else self.task.prompt)(row)
            if not any(turn.strip() for turn in prompt.turns):
                raise TypeError("it has no turn with text")
            if plain and self.task.score == "answer" and has(row, "reference"):
                word(row, "reference")
        except (KeyError, TypeError) as error:
            problem = f"has no {error}" if isinstance(error, KeyError) else f"can't be read: {error}"
            where = self.rows.place(at) if isinstance(self.rows, Lines) else f"{self.place}, row {at + 1}"
            raise DataError(
                f"{where} {problem}; wanted the layout of {self.task.hub}, or turns: a list of texts; "
                f"it has {', '.join(map(str, row)) or 'nothing'}"
            ) from None
        if self.task.big and not plain:
            prompt = prompt._replace(reference=Later(self.rows, at))
        return prompt._replace(id=prompt.id or f"{self.task.name}/{at}")


class Lines(Sequence[Row]):
    """Rows of JSONL files, each read when it is asked for.  Raises DataError with file and line."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.starts: list[tuple[Path, int, int]] = []
        for path in paths:
            start = 0
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self.starts.append((path, number, start))
                    start += len(line)

    def __len__(self) -> int:
        return len(self.starts)

    def place(self, index: int) -> str:
        path, number, _ = self.starts[index]
        return f"{path}, line {number}"

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        path, _, start = self.starts[index]
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter of lists in lists in lists
            raise DataError(f"{self.place(index)} is not JSON: {error}; mend the line or take it out") from None
        return _mapping(row, self.place(index))


def _mapping(row: Any, place: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: a row must be a mapping, not {type(row).__name__}")
    return row


def _of_paths(paths: Sequence[Path]) -> Sequence[Row]:
    """Rows of files of one kind."""
    if paths[0].suffix == ".jsonl":
        return Lines(paths)
    if paths[0].suffix == ".json":
        rows = []
        for path in paths:
            try:
                value = json.loads(path.read_bytes())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} is not JSON: {error}; a file of rows, one a line, is named .jsonl") from None
            if not isinstance(value, list):
                raise DataError(f"{path} must hold a list of rows, not {type(value).__name__}")
            rows += [_mapping(row, f"{path}, row {number}") for number, row in enumerate(value, 1)]
        return rows
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in paths]).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{paths[0]} can't be read as Parquet: {error}") from None


def _content(paths: Sequence[Path]) -> str | None:
    """What tells these files from others; None where they are not files."""
    total = hashlib.sha256()
    for path in paths:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return f"{CONTENT}{total.hexdigest()[:16]}"


# ── where sets are published ──────────────────────────────────────────────────────────────────────────────────────────


def _published(task: Task, revision: str | None) -> tuple[Sequence[Row], str, str]:
    """Its rows, the commit that was read, and where that is.  Nothing of the data set's own is executed."""
    if revision is not None and revision.startswith(CONTENT):
        raise DataError(
            f"{task.name} is pinned to {revision}, the content of files, and no folder holds {task.name}; name one, "
            f"evaluate.data=FOLDER, or pin a commit of {task.hub}"
        )
    try:
        commit = revision if revision and _COMMIT.fullmatch(revision) else newest(task, revision)
        return _fetch(task, commit), commit, f"{task.source} at {commit[:12]}"
    # the hub's client raises errors of whichever library it speaks HTTP through, and that changes
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        names = " or ".join(f"{name}.jsonl" for name in (task.name, task.shared) if name)
        raise DataError(
            f"can't load {task.name} from {task.hub}: {first}; where there is no network, put {names} (or .json, .parquet) in "
            f"a folder and name it: evaluate.data=FOLDER, or --data FOLDER"
        ) from error


def newest(task: Task, revision: str | None = None) -> str:
    """The newest commit of where a task is published, or of the branch or tag `revision`.  Needs the network."""
    repository = task.hub.removeprefix("github.com/")
    if repository != task.hub:
        return (
            _read_url(GITHUB_NEWEST.format(repository=repository, revision=revision or "HEAD"), "application/vnd.github.sha")
            .decode()
            .strip()
        )
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(task.hub, revision=revision, timeout=30).sha
    if not commit:
        raise DataError("the hub named no commit")
    return commit


def _fetch(task: Task, commit: str) -> Sequence[Row]:
    repository = task.hub.removeprefix("github.com/")
    if repository != task.hub:
        address = GITHUB.format(repository=repository, revision=commit, file=task.files[0])
        return [_mapping(json.loads(line), address) for line in _read_url(address).splitlines() if line.strip()]
    if task.files:
        from huggingface_hub import hf_hub_download

        return Lines([Path(hf_hub_download(task.hub, file, repo_type="dataset", revision=commit)) for file in task.files])
    import datasets  # a second to import, and only needed here

    if Path(task.hub).exists():  # it would be read instead, whatever the commit
        raise DataError(f"a folder {task.hub} stands here in the way of the data set of that name; start from another folder")
    rows = cast(datasets.Dataset, datasets.load_dataset(task.hub, task.config, split=task.split, revision=commit))
    # where it can't reach a commit, `datasets` falls back on whichever other one its cache holds, with a warning
    if not all(commit in file["filename"] for file in rows.cache_files):
        raise DataError(f"commit {commit} can't be reached; pin one that {task.hub} has")
    return cast(Sequence[Row], rows)


@functools.lru_cache(maxsize=2)
def _read_url(address: str, accept: str = "*/*") -> bytes:
    import httpx

    answer = httpx.get(address, headers={"Accept": accept}, follow_redirects=True, timeout=60)
    answer.raise_for_status()
    return answer.content
