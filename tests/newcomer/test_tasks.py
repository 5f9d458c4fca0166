"""What a newcomer tries, as it would be typed, and what must appear: the list is `tasks.yaml`.

A task's `shell` lines run one after another until one fails: `outrider` in this process, others in a shell.  `python`
is run as a script.
Both stand in a folder of their own with a small target, its prompts and a trained drafter.  `shows` must all appear, in
whatever width; `hides` must not; `code` is the exit code, 0 unless given;
what other tests do too is `slow`.
"""

import re
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import DRAFTER, write_run_file
from verbs import outrider_with

TASKS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "tasks.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def desk(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is after a first run: target/, run.yaml, prompts.jsonl, held_out.jsonl, runs/first/checkpoint."""
    place = tmp_path_factory.mktemp("desk")
    shutil.copytree(folder, place / "target")
    write_run_file(place / "run.yaml", "target", name="first", drafter=HEAD, prepare=PREPARE, evaluate=EVALUATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert outrider_with("run", "run.yaml") == 0
    return place


HEAD = DRAFTER | {"mask_token": 255}  # for engines that want a token
PREPARE = {"conversations": "prompts.jsonl", "count": 6, "length": 48, "max_new_tokens": 16, "slots": 3}
EVALUATE = {
    "tasks": ["held_out.jsonl"], "prompts": 2, "max_new_tokens": 12, "baselines": ["ngram"], "min_first_ngrams": 0.0,
}  # fmt: skip


def in_shell(lines: str) -> int:
    """Run lines until one fails; its exit code."""
    for line in filter(None, map(str.strip, lines.replace("\\\n", " ").splitlines())):
        words = shlex.split(line, comments=True)
        if words[:1] == ["outrider"]:
            code = outrider_with(*words[1:])
        else:
            line = line.replace("python ", f"{sys.executable} ", 1) if words[:1] == ["python"] else line
            done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
            print(done.stdout, done.stderr)
            code = done.returncode
        if code:
            return code
    return 0


def in_python(script: str) -> int:
    try:
        exec(compile(script, "a newcomer's script", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def flat(text: str) -> str:
    """Text without line breaks, frames and colours: a sentence is found however it was wrapped."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, id=re.sub(r"\W+", "-", task["task"]), marks=[pytest.mark.slow] * task.get("slow", False))
        for task in TASKS
    ],
)
def test_a_newcomer_gets_what_was_asked_for(task, desk, tmp_path, monkeypatch, capfd):
    """Catches a message that no longer says what to do, and a command of yesterday that fails today."""
    place = tmp_path / "desk"
    shutil.copytree(desk, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = in_shell(task["shell"]) if "shell" in task else in_python(task["python"])
    out = flat("".join(capfd.readouterr()))
    assert code == task.get("code", 0), out
    for text in task.get("shows", []):
        assert flat(text) in out, f"{text!r} is not in: {out}"
    for text in task.get("hides", []):
        assert flat(text) not in out, f"{text!r} is in: {out}"
