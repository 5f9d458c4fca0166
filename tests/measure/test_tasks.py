"""Every prompt set loads from where it is published and from a folder, in the shape that results are compared in.

The hub is a server of ours that speaks its routes and serves rows that we made up in each data set's own layout; the
client that asks it is the real one.
"""

import hashlib
import http.server
import json
import os
import random
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import typer
from typer.testing import CliRunner

from outrider.cli import tasks as verb
from outrider.data.sources.readers import instructions
from outrider.errors import DataError
from outrider.measure.tasks import published
from outrider.measure.tasks.names import INSTRUCTIONS, TASKS, Prompt, load, prompts

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
NINE = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca", "arena-hard-v2"]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
STUB = 'from typing import List\n\n\ndef least(numbers: List[int]) -> int:\n    """The least of them."""\n'
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "Ann has 2 hens. Eggs?", "answer": "2 * 3 = <<2*3=6>>6\n#### 1,006"}],
    "math500": [{"problem": "Half of $x$?", "solution": "So \\boxed{\\frac{x}{2}}.", "answer": "\\frac{x}{2}",
                 "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"}],
    "aime25": [{"problem_idx": 1, "problem": "Find it.", "answer": 70, "problem_type": ["Geometry"]}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": STUB, "canonical_solution": "    return min(numbers)\n",
                   "test": "def check(candidate):\n    assert candidate([2, 1]) == 1\n", "entry_point": "least"}],
    "mbpp": [{"source_file": "x", "task_id": 2, "prompt": "Write a function to add.", "code": "def add(a, b): return a "
    "+ b",
              "test_imports": ["import math"], "test_list": ["assert add(1, 2) == 3"]}],
    "livecodebench": [
        {"question_title": "t", "question_content": "Sum two.", "platform": "atcoder", "question_id": "abc1",
        "contest_id": "c",
         "contest_date": "2024-01-01", "starter_code": "", "difficulty": "easy", "metadata": "{}",
         "public_test_cases": '[{"input": "1 2", "output": "3", "testtype": "stdin"}]', "private_test_cases": "[]"},
        {"question_title": "t", "question_content": "Sum a list.", "platform": "leetcode", "question_id": "1",
         "contest_id": "c",
         "contest_date": "2024-01-01",
         "starter_code": "class Solution:\n    def total(self, n):\n        \n", "difficulty": "easy",
         "metadata": '{"func_name": "total"}', "public_test_cases": "[]", "private_test_cases": "[]"},
    ],
    "mt-bench": [{"category": "writing", "prompt": ["Write.", "Write again."], "reference": [], "prompt_id": 81}],
    "alpaca": [{"instruction": "Name one.", "input": "", "output": "o", "text": "t"},
               {"instruction": "Add up.", "input": "1, 2", "output": "3", "text": "t"}],
    "arena-hard-v2": [{"uid": "u1", "category": "hard_prompt", "subcategory": "coding", "prompt": "Do it."}],
}  # fmt: skip
SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 161, "category": "translation", "turns": ["Translate."], "reference": ["r"]},
    {"question_id": 241, "category": "summarization", "turns": ["Shorten."]},
    {"question_id": 321, "category": "qa", "turns": ["Who?"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["How many?"]},
    {"question_id": 481, "category": "rag", "turns": ["From this text?"]},
]
SHAPES: dict[str, list[tuple[str, ...]]] = {
    "gsm8k": [("Ann has 2 hens. Eggs?" + BOXED,)],
    "math500": [("Half of $x$?" + BOXED,)],
    "aime25": [("Find it." + BOXED,)],
    "humaneval": [(SOLVE + STUB + "\n```",)],
    "mbpp": [("Write a function to add.",)],
    "mt-bench": [("Write.", "Write again.")],
    "alpaca": [("Name one.",), ("Add up.\n\n### Input:\n1, 2",)],
    "arena-hard-v2": [("Do it.",)],
}
NAMES = {"gsm8k": "gsm8k/0", "math500": "test/algebra/1.json", "aime25": "1", "humaneval": "HumanEval/0",
"mbpp": "mbpp/2",
         "livecodebench": "abc1", "mt-bench": "81", "alpaca": "alpaca/0", "arena-hard-v2": "u1"}  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


class Hub(http.server.BaseHTTPRequestHandler):
    """The routes that the hub's client asks, over FOLDER/owner/name/COMMIT/files; and those of GitHub's that we ask."""

    folder: Path

    def do_GET(self) -> None:
        words = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
        if words[0] == "github":
            return (
                self.say(NEW.encode()) if words[-1] == "HEAD" else self.file("/".join(words[1:3]), words[3], words[4:])
            )
        if words[:2] == ["api", "datasets"] and (self.folder / "/".join(words[2:4])).is_dir():
            repository = "/".join(words[2:4])
            what, commit, *below = [*words[4:], NEW, NEW][:2] + words[6:]
            entries = self.entries(repository, NEW if len(words) == 4 else commit)
            if what == "tree":
                within = "".join(f"{word}/" for word in below)
                return self.say(json.dumps([entry for entry in entries if entry["path"].startswith(within)]).encode())
            facts = {"private": False, "gated": False, "disabled": False, "tags": [], "id": repository}
            facts |= {"sha": NEW if len(words) == 4 else commit}
            return self.say(
                json.dumps(facts | {"siblings": [{"rfilename": entry["path"]} for entry in entries]}).encode()
            )
        if words[0] == "datasets" and words[3] == "resolve":
            return self.file("/".join(words[1:3]), words[4], words[5:])
        return self.say(b"", 404)

    do_HEAD = do_POST = do_GET

    def file(self, repository: str, commit: str, names: list[str]) -> None:
        path = self.folder / repository / commit / "/".join(names)
        if not path.is_file():
            return self.say(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = path.read_bytes()
        return self.say(content, 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit})

    def entries(self, repository: str, commit: str) -> list[dict[str, Any]]:
        root = self.folder / repository / commit
        return [
            {"path": path.relative_to(root).as_posix(), "oid": "0" * 40}
            | ({"type": "directory"} if path.is_dir() else {"type": "file", "size": path.stat().st_size})
            for path in sorted(root.rglob("*"))
        ]

    def say(self, content: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


def publish(folder: Path, commit: str, mark: str = "") -> None:
    """Every data set as its hub repository would be; `mark` goes into a row of gsm8k, to tell commits apart."""
    for name, rows in ROWS.items():
        task = TASKS[name]
        place = folder / task.hub / commit
        place.mkdir(parents=True, exist_ok=True)
        if name == "gsm8k":
            rows = [row | {"question": mark + row["question"]} for row in rows]
        if task.files:
            for number, file in enumerate(task.files):
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                (place / file).write_text(lines(rows if number == 0 else []))
            (place / f"{Path(task.hub).name}.py").write_text("raise SystemExit('a loader of the data set was run')")
            continue
        folder_of = task.config or "data"
        (place / folder_of).mkdir(exist_ok=True)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), place / folder_of / f"{task.split}-00000-of-00001.parquet"
        )
        (place / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {task.config or 'default'}\n  data_files:\n  - split: {task.split}\n"
            f"    path: {folder_of}/{task.split}-*\n---\n"
        )
    bench = folder / "hemingkx/Spec-Bench" / commit / "data/spec_bench"
    bench.mkdir(parents=True, exist_ok=True)
    (bench / "question.jsonl").write_text(lines(SPEC_BENCH))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    Hub.folder = tmp_path_factory.mktemp("hub")
    publish(Hub.folder, OLD, "old: ")
    publish(Hub.folder, NEW)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ASK = """
import json, sys
from outrider.errors import DataError
from outrider.measure.tasks.names import load
for name, revision in json.loads(sys.argv[1]):
    try:
        found = load(name, revision=revision)
    except DataError as error:
        print(json.dumps(str(error)))
    else:
        said = [[p.id, p.turns] for p in found.prompts]
        print(json.dumps([found.source, found.revision, found.count, said]))
assert "torch" not in sys.modules
"""


def ask(endpoint: str, home: Path, *wanted: tuple[str, str | None]) -> list[Any]:
    """What `load` answers in a process whose hub is at `endpoint`: the client reads that when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    # on a busy machine the client would take its cache for the answer
    environment |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(wanted)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_nine_load_from_the_hub_at_a_named_commit(hub: str, tmp_path: Path) -> None:
    """Catches a wrong name, configuration, split or file, a loader script being run, a report that can't name its data,
    and a pin that only ends up in the report: the newest has other text, and a cache offers it for a lost commit."""
    pinned = [("gsm8k", OLD), ("gsm8k", "3" * 40)]
    *newest, old, missing = ask(hub, tmp_path, *((name, None) for name in NINE), *pinned)
    for name, (source, revision, count, said) in zip(NINE, newest, strict=True):
        assert (revision, count) == (NEW, len(ROWS[name])), name
        assert source.startswith(TASKS[name].hub) and source.endswith(NEW[:12])
        assert said[0][0] == NAMES[name]
        if name in SHAPES:
            assert [tuple(turns) for _, turns in said] == SHAPES[name]
    assert old[1] == OLD and old[3][0][1][0].startswith("old: Ann")
    assert re.search(r"can't load gsm8k from openai/gsm8k.*put gsm8k.jsonl.*evaluate.data=FOLDER", missing)
    assert "3" * 40 in missing


def test_spec_bench_is_read_where_it_is_published(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a category that goes to another of its six tasks, to two of them or to none."""
    monkeypatch.setattr(published, "GITHUB", hub + "/github/{repository}/{revision}/{file}")
    monkeypatch.setattr(published, "GITHUB_NEWEST", hub + "/github/{repository}/commits/{revision}")
    mine = [name for name, task in TASKS.items() if task.suite == "Spec-Bench"]
    found = {name: load(name) for name in mine}
    assert len(mine) == 6 and all(loaded.revision == NEW for loaded in found.values())
    said = sorted(prompt.turns for loaded in found.values() for prompt in loaded.prompts)
    assert said == sorted(tuple(row["turns"]) for row in SPEC_BENCH)
    assert [prompt.id for prompt in found["spec-bench-qa"].prompts] == ["321"]
    assert found["spec-bench-mt-bench"].prompts[0].turns == ("Write.", "Again.")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(lines(rows) if path.suffix == ".jsonl" else json.dumps(rows))


@pytest.mark.parametrize(
    ("name", "ending"),
    [*((name, ".jsonl") for name in NINE), ("gsm8k", ".json"), ("mbpp", ".parquet"), ("mt-bench", ".parquet")],
)
def test_a_folder_is_taken_instead_of_the_hub(name: str, ending: str, tmp_path: Path) -> None:
    """Catches a layout that is read in one kind of file and not in another."""
    write(tmp_path / f"{name}{ending}", ROWS[name])
    found = load(name, tmp_path)
    assert found.source == str(tmp_path / f"{name}{ending}") and str(found.revision).startswith("sha256:")
    assert found.count == len(found.prompts) == len(ROWS[name])
    assert found.prompts[0].id == NAMES[name]
    assert [prompt.turns for prompt in found.prompts] == SHAPES.get(name, [prompt.turns for prompt in found.prompts])


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mt-bench", "spec-bench-rag"])
def test_plain_rows_are_prompts_as_they_are(name: str, tmp_path: Path) -> None:
    """Catches a suffix or a fence put around prompts that have theirs."""
    rows = [{"turns": ["a" + BOXED, "b"]}, {"turns": ["c"], "id": 7, "system": "s"}]
    write(tmp_path / f"{name}.jsonl", rows)
    found = list(load(name, tmp_path).prompts)
    assert found == [Prompt(f"{name}/0", ("a" + BOXED, "b")), Prompt("7", ("c",), "s")]


def test_one_file_serves_all_of_spec_bench(tmp_path: Path) -> None:
    """Catches six copies of a file being asked for, and rows of one task in another."""
    write(tmp_path / "spec-bench.jsonl", SPEC_BENCH)
    assert [load(name, tmp_path).count for name, task in TASKS.items() if task.shared] == [1] * 6


def test_a_task_of_programs_says_how_they_are_given_and_asked() -> None:
    """Catches starter code that is lost, and a program that does not know it reads standard input."""
    plain, starting = (TASKS["livecodebench"].prompt(row).turns[0] for row in ROWS["livecodebench"])
    assert "### Question\nSum two.\n" in plain and "standard input" in plain and plain.endswith("### Answer\n")
    assert "```python\nclass Solution:\n    def total(self, n):" in starting and "standard input" not in starting


def test_a_pin_that_can_not_hold_is_refused(tmp_path: Path) -> None:
    """Catches a pin that is taken and dropped: of a file of one's own, of a commit beside a folder, of the library."""
    path = tmp_path / "mine.jsonl"
    write(path, [{"turns": ["a"]}])
    pinned = load(str(path)).revision
    assert load(str(path), None, pinned).revision == pinned
    for other in ("sha256:0000000000000000", OLD):
        with pytest.raises(DataError, match=f"{other}.*pin"):
            load(str(path), None, other)
        with pytest.raises(DataError, match=f"{other}.*pin"):
            list(prompts(str(path), 1, revision=other))
        with pytest.raises(DataError, match=f"can't be pinned, but evaluate.revisions pins it to {other}"):
            load("stdlib", None, other)
    write(tmp_path / "gsm8k.jsonl", ROWS["gsm8k"])
    with pytest.raises(DataError, match=f"gsm8k.jsonl is not a commit, but {OLD} is pinned; pin its content, sha256:"):
        load("gsm8k", tmp_path, OLD)
    with pytest.raises(DataError, match="alpaca is pinned to sha256:0123, .* no folder contains alpaca"):
        load("alpaca", tmp_path, "sha256:0123")
    with pytest.raises(DataError, match="no such file: .*none.jsonl"):
        load(str(tmp_path / "none.jsonl"), None, "sha256:0123")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"question": "q", "answer": "#### 1"}\n{"question"\n', "gsm8k.jsonl, line 2 is not JSON"),
        ('\n[1]\n', "gsm8k.jsonl, line 2: a row must be a mapping"),
        ('{"answer": "q"}\n',
        "gsm8k.jsonl, line 1 has no 'question'; expected the layout of openai/gsm8k.*it has answer"),
        ('{"question": 5, "answer": "#### 1"}\n', "line 1 can't be read"),
        ('{"turns": [1]}\n', "line 1 can't be read: turns must be a list of texts"),
        ('{"turns": []}\n', "line 1 can't be read"),
        ('{"turns": [" "]}\n', "line 1 can't be read: no turn has text"),
        ("[" * 100_000 + "\n", "line 1 is not JSON"),
        ("", "has no row of gsm8k, expected 1319"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_before_anything_is_measured(content: str, problem: str, tmp_path: Path) -> None:
    """Catches a row that is found out in the middle of a run, and an error that does not say where it stands."""
    (tmp_path / "gsm8k.jsonl").write_text(content)
    with pytest.raises(DataError, match=problem):
        load("gsm8k", tmp_path)


WRONG: list[tuple[str, str, Any]] = [
    ("gsm8k", "turns", "What is 2+2?"), ("spec-bench-qa", "turns", "What is 2+2?"),
    ("math500", "problem", ["x"]), ("math500", "unique_id", True),
    ("humaneval", "prompt", None), ("mbpp", "prompt", None),
    ("livecodebench", "question_content", None), ("livecodebench", "starter_code", 5),
    ("mt-bench", "prompt", "Hello there"), ("mt-bench", "prompt_id", None), ("alpaca", "instruction", None),
    ("alpaca", "input", ["x"]), ("arena-hard-v2", "uid", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_a_value_of_another_type_is_refused_by_every_reader(name: str, key: str, value: Any, tmp_path: Path) -> None:
    """Catches a text read letter by letter, a null read as the word None, and both measured without a word."""
    good = ROWS.get(name, SPEC_BENCH[3:])[0]  # the row of spec-bench-qa
    write(tmp_path / f"{name}.jsonl", [good, good | {key: value}])
    with pytest.raises(DataError, match=rf"{name}\.jsonl, line 2 (has no '{key}'|can't be read: {key} must be a )"):
        list(load(name, tmp_path).prompts)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_null_is_a_key_that_is_missing(ending: str, tmp_path: Path) -> None:
    """Catches an id of `None`, which several rows would share; Parquet has no other way to leave a key out."""
    rows = [
        {"turns": ["a"], "id": None, "system": None},
        {"turns": ["b"], "id": "own", "system": "s"},
    ]
    write(tmp_path / f"gsm8k{ending}", rows)
    assert list(load("gsm8k", tmp_path).prompts) == [Prompt("gsm8k/0", ("a",)), Prompt("own", ("b",), "s")]


def test_bad_places_are_refused(tmp_path: Path) -> None:
    """Catches a mistyped folder that silently means the hub, and files of other kinds named as ours."""
    with pytest.raises(DataError, match="is not a folder"):
        load("gsm8k", tmp_path / "none")
    (tmp_path / "gsm8k.json").write_text('{"turns": ["a"]}')
    with pytest.raises(DataError, match="must contain a list of rows"):
        load("gsm8k", tmp_path)
    (tmp_path / "gsm8k.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="gsm8k.json is not JSON"):
        load("gsm8k", tmp_path)
    (tmp_path / "alpaca.parquet").write_text("no")
    with pytest.raises(DataError, match="can't be read as Parquet"):
        load("alpaca", tmp_path)


def test_the_list_is_the_published_one() -> None:
    """Catches a task that is lost, and a count other than the one that published numbers are over."""
    assert [name for name, task in TASKS.items() if task.suite == "DSpark"] == NINE
    assert [TASKS[name].used for name in NINE] == [500, 500, 30, 164, 256, 500, 80, 500, 500]
    assert all(task.used <= task.rows and task.licence for task in TASKS.values())
    assert all(re.fullmatch("[0-9a-f]{40}", task.revision) for task in TASKS.values() if task.revision is not None)


def test_a_draw_is_the_head_of_a_seeded_shuffle(tmp_path: Path) -> None:
    """Catches draws that no seed repeats, that repeat a prompt, or in which more prompts are not the same ones and
    others."""
    write(tmp_path / "alpaca.jsonl", [{"turns": [str(i)]} for i in range(40)])
    drawn = [[prompt.turns[0] for prompt in prompts("alpaca", most, 980406, tmp_path)] for most in (5, 39, 40, 100)]
    order = [str(i) for i in range(40)]
    random.Random(980406).shuffle(order)
    assert drawn == [order[:5], order[:39], order, order]
    assert [prompt.turns[0] for prompt in prompts("alpaca", 40, 1, tmp_path)] != order


def test_prompts_carry_the_language_or_category_of_their_rows(tmp_path: Path) -> None:
    """Catches a tag that one reader drops, or a category that hides a language."""
    rows = [{"turns": ["a"], "language": "ru", "category": "qa"}, {"turns": ["b"], "category": "qa"}, {"turns": ["c"]}]
    write(tmp_path / "gsm8k.jsonl", rows)
    for found in (load("gsm8k", tmp_path), load(str(tmp_path / "gsm8k.jsonl"))):
        assert [prompt.group for prompt in found.prompts] == ["ru", "qa", ""]
    write(tmp_path / "mt-bench.jsonl", [{"prompt_id": 1, "category": "stem", "prompt": ["a", "b"]}])
    assert [prompt.group for prompt in load("mt-bench", tmp_path).prompts] == ["stem"]


def test_a_file_is_a_task_too(tmp_path: Path) -> None:
    """Catches a file whose name is a task's being taken for that task."""
    path = tmp_path / "gsm8k.jsonl"
    write(path, [{"turns": ["a", "b"]}, {"prompt": "c"}])
    for found in (prompts(str(path), 5), load(str(path)).prompts):
        assert [prompt.turns for prompt in found] == [("a", "b"), ("c",)]
    assert load(str(path)).count == 2


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(verb.tasks)
    return made


def test_the_verb_lists_all_and_counts_what_a_folder_holds(app: typer.Typer, tmp_path: Path) -> None:
    """Catches a folder that is not looked into and a count of another set."""
    write(tmp_path / "alpaca.jsonl", ROWS["alpaca"])
    write(tmp_path / "gsm8k.jsonl", [{"turns": ["a"]}])
    said = CliRunner().invoke(app, ["--data", str(tmp_path), "--json", str(tmp_path / "list.json")])
    assert said.exit_code == 0, said.output
    listed = {entry["name"]: entry for entry in json.loads((tmp_path / "list.json").read_text())}
    assert list(listed) == list(TASKS)
    assert (listed["alpaca"]["found_rows"], listed["gsm8k"]["found_rows"], listed["mbpp"]["found"]) == (2, 1, None)


def test_a_folder_of_files_is_one_task(tmp_path: Path) -> None:
    """Catches livecodebench's six files being read as the first one."""
    (tmp_path / "livecodebench").mkdir()
    for number, row in enumerate(ROWS["livecodebench"]):
        write(tmp_path / "livecodebench" / f"test{number}.jsonl", [row])
    assert load("livecodebench", tmp_path).count == 2


def test_held_out_instructions_are_tasks_by_kind() -> None:
    """Catches a task of other kinds, of instructions that train, or whose order hangs on how many are asked for."""
    train = {row["turns"][0] for row in instructions("train", 0)}
    kinds = {row["turns"][0]: row["kind"] for row in instructions("held_out", 0)}
    for task, wanted in INSTRUCTIONS.items():
        every = load(task).prompts
        assert {kinds[prompt.turns[0]] for prompt in every} == wanted
        assert not train & {prompt.turns[0] for prompt in every}
        assert list(prompts(task, 3)) == list(every[:3])
        with pytest.raises(DataError, match="can't be pinned"):
            load(task, revision="0" * 40)
