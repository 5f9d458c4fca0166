"""Prompt sets by name: the nine of the DSpark paper, Spec-Bench's six, three of our own instructions, `stdlib`, and any
FILE.jsonl or FILE.txt.

`TASKS` is the whole list.  A data set comes from a folder of yours where that holds it, else from where it is
published, at one commit.  Where no commit is pinned the newest is looked up, and `load` returns it.  Rows may be in the
data set's own layout or plain: {"turns": [...]}, with `id`, `reference` and `system` where known.  The forms of
prompts, and how many are used, are those of DSpark's published evaluation (arXiv 2607.05147) and Spec-Bench (arXiv
2401.07851).  Does not import torch.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
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
from outrider.measure.tasks.layouts import Prompt, Row, has, word
from outrider.measure.tasks.published import CONTENT, Lazy, Task, content_of, of_paths, published

FILES = (".jsonl", ".json", ".txt")
FOLDER_FILES = (".jsonl", ".json", ".parquet")
LIBRARY, OWN = "the interpreter's standard library", "this package's own instructions"


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a task, and where they are from."""

    prompts: Sequence[Prompt]
    source: str
    """Where the rows are from, in words."""
    revision: str | None
    """The commit that was read, or `sha256:` and 16 digits of a file's content."""
    count: int | None
    """Of the whole set."""

    def some(self, most: int, seed: int) -> Iterator[Prompt]:
        """Up to `most` prompts, the head of a seeded shuffle: a smaller `most` gives the first of the same prompts.

        DSpark's evaluation draws in this way, with seed 980406.
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
    _dspark("gsm8k", "openai/gsm8k", 1319, 500, layouts.gsm8k, "MIT", config="main", score="answer"),
    _dspark("math500", "HuggingFaceH4/MATH-500", 500, 500, layouts.problem, "MIT (MATH)", score="answer"),
    _dspark("aime25", "MathArena/aime_2025", 30, 30, layouts.problem, "CC-BY-NC-SA-4.0", split="train", score="answer"),
    _dspark("humaneval", "openai/openai_humaneval", 164, 164, layouts.humaneval, "MIT", score="tests"),
    _dspark("mbpp", "google-research-datasets/mbpp", 257, 256, layouts.mbpp, "CC-BY-4.0", config="sanitized",
    score="tests"),
    _dspark("livecodebench", "livecodebench/code_generation_lite", 1055, 500, layouts.livecodebench,
    "CC, and the contests'",
            files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))), score="tests", big=True),
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
"""Every named prompt set.  No revision is pinned here: none was read from the hub while this was written."""


INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "instructions:chat": frozenset({"chat", "explanation", "writing"}),
    "instructions:code": frozenset({"code-python", "code-other"}),
    "instructions:maths": frozenset({"maths"}),
}
"""Held-out instructions of this package, by their kinds."""
BUILT_IN = ("stdlib", *INSTRUCTIONS)
"""Prompt sets that need neither a file nor a network."""


def task_name(task: str) -> str:
    return Path(task).stem if task.endswith(FILES) else task


def check(task: str) -> str:
    """The task's name, if it is known.  Raises DataError, which lists the known ones."""
    if task not in BUILT_IN and task not in TASKS and not task.endswith(FILES):
        raise DataError(
            f"unknown task {task!r}{nearest(task, [*BUILT_IN, *TASKS])}; or give a file of prompts, such as mine.jsonl"
        )
    return task


def prompts(
    task: str, most: int, seed: int = 0, data: str | Path | None = None, revision: str | None = None
) -> Iterator[Prompt]:
    """Up to `most` prompts: of built-in and named tasks by seed, of a file in its order.  Raises DataError as `load`
    does."""
    if check(task) == "stdlib":
        _refuse_other(None, LIBRARY, revision)
        for name, text in demo.prompts("held_out", most, seed):
            yield Prompt(name, (text,))
    elif task in INSTRUCTIONS:
        _refuse_other(None, OWN, revision)
        for row in itertools.islice(instructions("held_out", seed, INSTRUCTIONS[task]), most):
            yield Prompt(row["id"], tuple(row["turns"]))
    elif task.endswith(FILES):
        if revision is not None and Path(task).exists():  # the reader reports a missing file
            _refuse_other(content_of([Path(task)]), task, revision)
        yield from _of_file(task, most)
    else:
        yield from load(task, data, revision).some(most, seed)


def load(task: str, data: str | Path | None = None, revision: str | None = None) -> PromptSet:
    """A whole prompt set: from the folder `data` where that holds it, else from where it is published, at one commit.

    `revision` pins that commit, or, written `sha256:...`, the content of files.  Raises DataError for an unknown task,
    for rows in an unknown layout, for rows that are not the pinned ones, and where there is neither a folder nor a
    network.
    """
    if check(task) in BUILT_IN or task.endswith(FILES):
        drawn = tuple(prompts(task, 10**9, revision=revision))
        built_in = LIBRARY if task == "stdlib" else OWN
        source, content = (built_in, None) if task in BUILT_IN else (task, content_of([Path(task)]))
        return PromptSet(drawn, source, content, len(drawn))
    known = TASKS[task]
    paths = found(known, data) if data is not None else ()
    if paths:
        place, content = ", ".join(map(str, paths)), content_of(paths)
        _refuse_other(content, place, revision)
        rows, revision = of_paths(paths), content
    else:
        rows, revision, place = published(known, revision or known.revision)
    made = _prompts_of(known, rows, place)
    if not made:
        raise DataError(f"{place} has no row of {task}; wanted {known.rows}; check the file's `category` keys")
    return PromptSet(made, place, revision, len(made))


def _refuse_other(content: str | None, place: str, revision: str | None) -> None:
    """Raises DataError where another revision is pinned than this content.  None is content that can't be pinned."""
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


def found(task: Task, data: str | Path) -> tuple[Path, ...]:
    """A folder's files that hold a task: NAME.jsonl, .json or .parquet, or all such files of a folder NAME; () for
    none."""
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
    """All tasks: [{name, suite, used, rows, source, revision, score, licence, found, found_rows, references}].

    Does not use the network.  The last three are None where the folder has nothing of a task.  Raises DataError for a
    row that can't be read.
    """
    entries = []
    for task in TASKS.values():
        held = load(task.name, data) if data is not None and found(task, data) else None
        entry = {
            key: getattr(task, key)
            for key in ("name", "suite", "used", "rows", "source", "revision", "score", "licence")
        }
        scored = None if held is None else held.prompts[0].reference is not None
        entry |= {"found": held and held.source, "found_rows": held and held.count, "references": scored}
        entries.append(entry)
    return entries


def _of_file(path: str, most: int) -> Iterator[Prompt]:
    for conversation in read(Source(conversations=path, count=most)):
        by_role = {
            role: [m["content"] for m in conversation.messages if m["role"] == role] for role in ("system", "user")
        }
        system = "\n\n".join(by_role["system"]) or None
        if conversation.tools:
            log.warning("%s offers tools, and prompts of a file are asked without them", conversation.place)
        yield Prompt(conversation.id, tuple(by_role["user"]), system, group=conversation.group)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _prompts_of(task: Task, rows: Sequence[Row], place: str) -> Sequence[Prompt]:
    mine: Sequence[int] = range(len(rows))
    if task.categories:  # a row without a category belongs to this task
        mine = [i for i in mine if rows[i].get("category") in (None, *task.categories)]
    made = Lazy(len(mine), lambda index: _prompt_of(task, rows, mine[index], place))
    return made if task.big else tuple(made)


def _prompt_of(task: Task, rows: Sequence[Row], at: int, place: str) -> Prompt:
    row = rows[at]
    is_plain = "turns" in row
    try:
        prompt = (layouts.plain if is_plain else task.prompt)(row)
        if not any(turn.strip() for turn in prompt.turns):
            raise TypeError("no turn has text")
        if is_plain and task.score == "answer" and has(row, "reference"):
            word(row, "reference")
    except (KeyError, TypeError) as error:
        problem = f"has no {error}" if isinstance(error, KeyError) else f"can't be read: {error}"
        where = rows.place(at) if isinstance(rows, Lazy) else f"{place}, row {at + 1}"
        raise DataError(
            f"{where} {problem}; wanted the layout of {task.hub}, or turns: a list of texts; "
            f"it has {', '.join(map(str, row)) or 'nothing'}"
        ) from None
    if task.big and not is_plain:
        prompt = prompt._replace(reference=functools.partial(rows.__getitem__, at))
    return prompt._replace(id=prompt.id or f"{task.name}/{at}")
