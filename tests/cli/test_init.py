"""`outrider init`: the run file that it writes is valid, says what one changes first, and never overwrites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from verbs import outrider_with

from outrider.cli import init
from outrider.drafters import find, kinds, trained
from outrider.runs.file import load


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}]))


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_a_run_file_of_every_kind_is_valid(kind: str, folder: Path) -> None:
    """Catches a template that a kind's own settings refuse, and a section that does nothing."""
    needs = [name for name, field in find(kind).Config.model_fields.items() if field.is_required()]
    code = outrider_with("init", "mine.yaml", "--target", str(folder), "--kind", kind, "--data", "chats.json")
    if needs:
        assert code == 2 and not Path("mine.yaml").exists()
        return
    assert code == 0
    run, _ = load("mine.yaml")
    assert (run.target.name, run.drafter["kind"], run.train is not None) == (
        str(folder),
        kind,
        trained(kind) is not None,
    )
    assert outrider_with("show", "mine.yaml") == 0


def test_odd_names_are_quoted_and_comments_name_what_to_change(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a path with a colon or a hash that breaks the file, and a file without a word of help."""
    Path("my: #data.jsonl").write_text('{"prompt": "a"}\n')
    words = ("--model", str(folder), "--kind", "dspark", "--data", "my: #data.jsonl", "--tasks", "gsm8k, chats.json")
    assert outrider_with("init", *words) == 0
    run, _ = load("dspark.yaml")
    assert (run.prepare.conversations, run.evaluate and run.evaluate.tasks) == (
        "my: #data.jsonl",
        ("gsm8k", "chats.json"),
    )
    text = Path("dspark.yaml").read_text()
    assert text.count("#") > 10 and "count" in text
    assert "outrider run dspark.yaml --dry-run" in capsys.readouterr().out


def test_an_existing_file_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an hour of edits that is overwritten."""
    Path("mine.yaml").write_text("mine")
    words = ("init", "mine.yaml", "--target", str(folder), "--kind", "dspark", "--data", "chats.json")
    assert outrider_with(*words) == 2
    assert Path("mine.yaml").read_text() == "mine" and "mine.yaml exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--target": "runs/x"}, "--target: no such folder: runs/x"), ({"--kind": "EAGLE3"}, "did you mean 'eagle3'?"),
        ({"--data": "gone.json"}, "no such file: gone.json"), ({"--tasks": "gsm9k"}, "did you mean 'gsm8k'?"),
        ({"--target": None}, "--target is missing"), ({"--data": None}, "--data is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_written(
    change: dict[str, str | None], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run file that can't be run."""
    flags = {"--target": str(folder), "--kind": "dspark", "--data": "chats.json"} | change
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    assert outrider_with("init", "mine.yaml", *words) != 0
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("mine.yaml").exists()


def test_in_a_terminal_missing_flags_are_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an answer that is not used, and a question whose flag was given."""
    asked = []

    def answer(question: str, default: str) -> str:
        asked.append(question)
        return str(folder) if question.startswith("Target") else default

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(init.typer, "prompt", answer)
    assert outrider_with("init", "asked.yaml", "--kind", "medusa") == 0
    assert [question.split()[0] for question in asked] == ["Target", "Prompts"]
    made = yaml.safe_load(Path("asked.yaml").read_text())
    assert (made["target"], made["prepare"]["conversations"], made["prepare"]["count"]) == (
        str(folder),
        "stdlib:train",
        512,
    )
