"""Prompt sets by name: the nine of the DSpark paper, Spec-Bench's six, three sets of built-in instructions, `stdlib`,
and any FILE.jsonl or FILE.txt.

`TASKS` lists the published ones.  A data set is read from a local folder if that contains it, otherwise from where it
is published, at one commit: the pinned one, or the newest, which `load` returns.  Rows are in the data set's own layout
or plain: {"turns": [...]}, optionally with `id` and `system`.  The wording and number of prompts follow DSpark's
published evaluation (arXiv 2607.05147) and Spec-Bench (arXiv 2401.07851).  Does not import torch.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import demo
from outrider.config import nearest
from outrider.data.config import Config as Source
from outrider.data.sources.conversations import read
from outrider.data.sources.readers import instructions
from outrider.errors import DataError
from outrider.measure.tasks import layouts
from outrider.measure.tasks.layouts import Prompt, Row
from outrider.measure.tasks.published import CONTENT, Lazy, Task, content_of, of_paths, published

FILES = (".jsonl", ".json", ".txt")
FOLDER_FILES = (".jsonl", ".json", ".parquet")
LIBRARY = "the interpreter's standard library"
BUILT_IN_INSTRUCTIONS = "this package's own instructions"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a task and their source."""

    prompts: Sequence[Prompt]
    source: str
    """Where the rows come from, in words."""
    revision: str | None
    """The commit that was read, or `sha256:` and 16 digits of a file's hash."""
    count: int | None
    """Prompts in the whole set."""

    def some(self, most: int, seed: int) -> Iterator[Prompt]:
        """Up to `most` prompts: the head of a seeded shuffle, so a smaller `most` gives the first of the same prompts.

        DSpark's evaluation draws the same way, with seed 980406.
        """
        order = list(range(len(self.prompts)))
        random.Random(seed).shuffle(order)
        return (self.prompts[i] for i in order[:most])


# ── the list ──────────────────────────────────────────────────────────────────────────────────────────────────────────

CHAT = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


def _dspark(
    name: str, hub: str, rows: int, used: int, prompt: Callable[[Row], Prompt], licence: str, **more: Any
) -> Task:
    return Task(name=name, suite="DSpark", hub=hub, rows=rows, used=used, prompt=prompt, licence=licence, **more)


def _spec_bench(name: str, categories: frozenset[str]) -> Task:
    return Task(
        name=f"spec-bench-{name}", suite="Spec-Bench", hub="github.com/hemingkx/Spec-Bench", rows=80, used=80,
        prompt=layouts.plain, licence="Apache-2.0, and its sources'", files=("data/spec_bench/question.jsonl",),
        categories=categories, shared="spec-bench",
    )  # fmt: skip


TASKS: Mapping[str, Task] = {task.name: task for task in (
    _dspark("gsm8k", "openai/gsm8k", 1319, 500, layouts.gsm8k, "MIT", config="main"),
    _dspark("math500", "HuggingFaceH4/MATH-500", 500, 500, layouts.problem, "MIT (MATH)"),
    _dspark("aime25", "MathArena/aime_2025", 30, 30, layouts.problem, "CC-BY-NC-SA-4.0", split="train"),
    _dspark("humaneval", "openai/openai_humaneval", 164, 164, layouts.humaneval, "MIT"),
    _dspark("mbpp", "google-research-datasets/mbpp", 257, 256, layouts.mbpp, "CC-BY-4.0", config="sanitized"),
    _dspark("livecodebench", "livecodebench/code_generation_lite", 1055, 500, layouts.livecodebench,
            "CC, and the contests'", files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))), big=True),
    _dspark("mt-bench", "HuggingFaceH4/mt_bench_prompts", 80, 80, layouts.mt_bench, "Apache-2.0", split="train"),
    _dspark("alpaca", "tatsu-lab/alpaca", 52002, 500, layouts.alpaca, "CC-BY-NC-4.0", split="train"),
    _dspark("arena-hard-v2", "lmarena-ai/arena-hard-auto", 750, 500, layouts.arena_hard, "Apache-2.0",
            files=("data/arena-hard-v2.0/question.jsonl",)),
    _spec_bench("mt-bench", CHAT),
    _spec_bench("translation", frozenset({"translation"})),
    _spec_bench("summarization", frozenset({"summarization"})),
    _spec_bench("qa", frozenset({"qa"})),
    _spec_bench("math-reasoning", frozenset({"math_reasoning"})),
    _spec_bench("rag", frozenset({"rag"})),
)}  # fmt: skip
"""Every named prompt set.  No revision is pinned: none had been read from the hub when this was written."""

INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "instructions:chat": frozenset({"chat", "explanation", "writing"}),
    "instructions:code": frozenset({"code-python", "code-other"}),
    "instructions:maths": frozenset({"maths"}),
}
"""The package's held-out instructions, by kind."""
BUILT_IN = ("stdlib", *INSTRUCTIONS)
"""Prompt sets that need neither files nor a network."""


def task_name(task: str) -> str:
    return Path(task).stem if task.endswith(FILES) else task


def check(task: str) -> str:
    """Returns the task if it exists; otherwise raises a DataError that lists the known ones."""
    if task not in BUILT_IN and task not in TASKS and not task.endswith(FILES):
        raise DataError(
            f"unknown task {task!r}{nearest(task, [*BUILT_IN, *TASKS])}; or give a file of prompts, such as mine.jsonl"
        )
    return task


def prompts(
    task: str, most: int, seed: int = 0, data: str | Path | None = None, revision: str | None = None
) -> Iterator[Prompt]:
    """Up to `most` prompts: drawn by seed from built-in and named tasks, in file order from files.  Raises DataError
    like `load`."""
    if check(task) == "stdlib":
        _refuse_other(None, LIBRARY, revision)
        for name, text in demo.prompts("held_out", most, seed):
            yield Prompt(name, (text,))
    elif task in INSTRUCTIONS:
        _refuse_other(None, BUILT_IN_INSTRUCTIONS, revision)
        for row in itertools.islice(instructions("held_out", seed, INSTRUCTIONS[task]), most):
            yield Prompt(row["id"], tuple(row["turns"]))
    elif task.endswith(FILES):
        if revision is not None and Path(task).exists():  # the reader reports a missing file
            _refuse_other(content_of([Path(task)]), task, revision)
        yield from _of_file(task, most)
    else:
        yield from load(task, data, revision).some(most, seed)


def load(task: str, data: str | Path | None = None, revision: str | None = None) -> PromptSet:
    """A whole prompt set: from the folder `data` if that contains it, otherwise from where it is published, at one
    commit.

    revision: pins that commit, or as `sha256:...` the content of files.  Raises DataError for an unknown task, rows in
    an unknown layout, rows other than the pinned ones, and if neither a folder nor a network is available.
    """
    if check(task) in BUILT_IN or task.endswith(FILES):
        drawn = tuple(prompts(task, 10**9, revision=revision))
        built_in = LIBRARY if task == "stdlib" else BUILT_IN_INSTRUCTIONS
        source, content = (built_in, None) if task in BUILT_IN else (task, content_of([Path(task)]))
        return PromptSet(drawn, source, content, len(drawn))
    data_set = TASKS[task]
    paths = files_of(data_set, data) if data is not None else ()
    if paths:
        place = ", ".join(map(str, paths))
        content = content_of(paths)
        _refuse_other(content, place, revision)
        rows, revision = of_paths(paths), content
    else:
        rows, revision, place = published(data_set, revision or data_set.revision)
    every = _prompts_of(data_set, rows, place)
    if not every:
        raise DataError(f"{place} has no row of {task}, expected {data_set.rows}; check the file's `category` keys")
    return PromptSet(every, place, revision, len(every))


def _refuse_other(content: str | None, place: str, revision: str | None) -> None:
    """Raises DataError if a revision other than this content is pinned.  None: content that can't be pinned."""
    if revision is None or revision == content:
        return
    if content is None:
        raise DataError(f"{place} can't be pinned, but evaluate.revisions pins it to {revision}; leave that out")
    if revision.startswith(CONTENT):
        raise DataError(f"{place} has content {content}, but {revision} is pinned; pin this one, or use the other file")
    raise DataError(
        f"{place} is not a commit, but {revision} is pinned; pin its content, {content}, or leave the folder out to "
        "read the commit"
    )


def files_of(task: Task, data: str | Path) -> tuple[Path, ...]:
    """The files of a folder that contain a task: NAME.jsonl, .json or .parquet, or all such files in a folder NAME."""
    folder = Path(data)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name one with files such as gsm8k.jsonl")
    for name in filter(None, (task.name, task.shared)):
        for ending in FOLDER_FILES:
            if (folder / f"{name}{ending}").is_file():
                return (folder / f"{name}{ending}",)
            several = tuple(sorted((folder / name).glob(f"*{ending}")))
            if several:
                return several
    return ()


def listed(data: str | Path | None = None) -> list[dict[str, Any]]:
    """All tasks: [{name, suite, used, rows, source, revision, licence, found, found_rows}].

    Does not use the network.  The last two are None if the folder does not contain the task.  Raises DataError for a
    row that can't be read.
    """
    entries = []
    for task in TASKS.values():
        local = load(task.name, data) if data is not None and files_of(task, data) else None
        entry = {key: getattr(task, key) for key in ("name", "suite", "used", "rows", "source", "revision", "licence")}
        entries.append(entry | {"found": local and local.source, "found_rows": local and local.count})
    return entries


def _of_file(path: str, most: int) -> Iterator[Prompt]:
    without = Counter[str]()
    for conversation in read(Source(conversations=path, count=most)):
        texts: dict[str, list[str]] = defaultdict(list)
        for message in conversation.messages:
            texts[message["role"]].append(message["content"])
        without.update(
            name for name, lost in (("tools", conversation.tools), ("answers of tools", texts["tool"])) if lost
        )
        system = "\n\n".join(texts["system"]) or None
        yield Prompt(conversation.id, tuple(texts["user"]), system, group=conversation.group)
    for name, count in without.items():
        log.warning("%d prompts of %s have %s, which are left out: only texts are measured", count, path, name)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _prompts_of(task: Task, rows: Sequence[Row], place: str) -> Sequence[Prompt]:
    indices: Sequence[int] = range(len(rows))
    if task.categories:  # a row without a category belongs to this task
        indices = [i for i in indices if rows[i].get("category") in (None, *task.categories)]
    every = Lazy(len(indices), lambda index: _prompt_of(task, rows, indices[index], place))
    return every if task.big else tuple(every)


def _prompt_of(task: Task, rows: Sequence[Row], at: int, place: str) -> Prompt:
    row = rows[at]
    try:
        prompt = (layouts.plain if "turns" in row else task.prompt)(row)
        if not any(turn.strip() for turn in prompt.turns):
            raise TypeError("no turn has text")
    except (KeyError, TypeError) as error:
        problem = f"has no {error}" if isinstance(error, KeyError) else f"can't be read: {error}"
        where = rows.place(at) if isinstance(rows, Lazy) else f"{place}, row {at + 1}"
        raise DataError(
            f"{where} {problem}; expected the layout of {task.hub}, or turns: a list of texts; "
            f"it has {', '.join(map(str, row)) or 'nothing'}"
        ) from None
    return prompt._replace(id=prompt.id or f"{task.name}/{at}")
