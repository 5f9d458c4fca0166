"""`outrider init`: the run file that it writes is valid, says what one changes first, and never overwrites."""

import json
from pathlib import Path

import pytest
from verbs import outrider_with

from outrider.drafters import find, kinds, trained
from outrider.runs.file import load


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}]))


def test_a_run_file_of_a_kind_is_valid(folder: Path) -> None:
    """Catches a template that a kind's own settings refuse, a section that does nothing, and edits that are
    overwritten."""
    for kind in sorted({*sorted(kinds())[::4], "dspark", "small_model"}):
        needs = [name for name, field in find(kind).Config.model_fields.items() if field.is_required()]
        words = ("init", f"{kind}.yaml", "--target", str(folder), "--kind", kind, "--data", "chats.json")
        assert outrider_with(*words) == (2 if needs else 0)
        assert Path(f"{kind}.yaml").exists() == (not needs)
        if not needs:
            run, _ = load(f"{kind}.yaml")
            assert (run.target.name, run.drafter["kind"]) == (str(folder), kind)
            assert (run.train is not None) == (trained(kind) is not None)
    before = Path("dspark.yaml").read_text()
    assert outrider_with("init", "dspark.yaml", "--target", str(folder), "--kind", "ngram", "--data", "chats.json") == 2
    assert Path("dspark.yaml").read_text() == before


def test_odd_names_are_quoted_and_comments_name_what_to_change(folder, capsys):
    """Catches a path with a colon or a hash that breaks the file, and a file without a word of help."""
    Path("my: #data.jsonl").write_text('{"prompt": "a"}\n')
    words = ("--model", str(folder), "--kind", "dspark", "--data", "my: #data.jsonl", "--tasks", "gsm8k, chats.json")
    assert outrider_with("init", *words) == 0
    run, _ = load("dspark.yaml")
    assert run.prepare.conversations == "my: #data.jsonl" and run.evaluate.tasks == ("gsm8k", "chats.json")
    text = Path("dspark.yaml").read_text()
    assert text.count("#") > 10 and "count" in text
    assert "outrider run dspark.yaml --dry-run" in capsys.readouterr().out


def test_what_is_wrong_is_said_and_nothing_is_written(folder, capsys):
    """Catches a run file that can't be run."""
    for change, said in (
        ({"--target": "runs/x"}, "--target: no such folder: runs/x"), ({"--kind": "EAGLE3"}, "did you mean 'eagle3'?"),
        ({"--data": "gone.json"}, "no such file: gone.json"), ({"--tasks": "gsm9k"}, "did you mean 'gsm8k'?"),
        ({"--target": None}, "--target is missing"), ({"--data": None}, "--data is missing"),
    ):  # fmt: skip
        flags = {"--target": str(folder), "--kind": "dspark", "--data": "chats.json"} | change
        words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
        assert outrider_with("init", "mine.yaml", *words) != 0
        assert said in " ".join(capsys.readouterr().err.split())
        assert not Path("mine.yaml").exists()


def test_a_budget_of_minutes_is_planned_by_rates_measured_here(folder: Path, capsys, monkeypatch) -> None:
    """Catches a planned file that can't be run, whose minutes the dry run does not have, or that trains too little."""
    monkeypatch.setenv("COLUMNS", "200")  # a long temporary folder would break the table's lines
    rows = "".join(json.dumps({"prompt": f"number {n} of many"}) + "\n" for n in range(60))
    Path("many.jsonl").write_text(rows)
    words = ("--target", str(folder), "--data", "many.jsonl", "--tasks", "chats.json", "--minutes", "4")
    assert outrider_with("init", "planned.yaml", *words) == 0
    run, _ = load("planned.yaml")
    assert run.drafter["kind"] == "dspark" and run.prepare.count == 60
    assert run.train is not None and run.train.steps == 12 * 60 // 8
    assert run.train.save_every <= 100, "a kill would cost minutes"
    assert run.usual_minutes.keys() == {"prepare", "train", "evaluate"} and sum(run.usual_minutes.values()) <= 4
    said = capsys.readouterr().out
    assert "60 answers" in said and "16 minutes would be" in said
    assert outrider_with("run", "planned.yaml", "--dry-run") == 0
    assert "time where the file was tried" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--minutes", "0"), "--minutes is 0"),
        (("--minutes", "nan"), "--minutes is nan"),
        (("--minutes", "0.01"), "more --minutes"),
        (("--minutes", "9", "--kind", "ngram"), "has nothing to train"),
    ],
)
def test_a_budget_that_is_none_is_refused(more: tuple[str, ...], said: str, folder: Path, capsys) -> None:
    Path("one.jsonl").write_text(json.dumps({"prompt": "a number"}))
    words = ("--target", str(folder), "--data", "one.jsonl", "--tasks", "chats.json", *more)
    assert outrider_with("init", "planned.yaml", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("planned.yaml").exists()


def test_a_fine_tuning_measures_on_other_prompts_than_it_trains_on(folder, tmp_path, capsys):
    """Catches requests of one conversation on both sides, and a drafter that is not measured before its training."""
    rows = [{"messages": [{"role": "user", "content": f"question {i % 40}"}]} for i in range(80)]
    Path("log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    manifest = {
        "version": 1,
        "kind": "dspark",
        "config": {"mask_token": 5},
        "target": {"name": str(folder)},
        "taps": [],
    }
    (drafter / "outrider.json").write_text(json.dumps(manifest))
    assert outrider_with("init", "tuned.yaml", "--from", str(drafter), "--data", "log.jsonl", "--kind", "dspark") == 2
    assert outrider_with("init", "tuned.yaml", "--from", str(drafter), "--data", "log.jsonl") == 0
    run, _ = load("tuned.yaml")
    assert run.drafter["from"] == str(drafter) and run.evaluate.baselines == (str(drafter),)
    train, test = (
        {
            json.loads(line)["messages"][0]["content"]
            for line in Path(f"tuned.new.{part}.jsonl").read_text().splitlines()
        }
        for part in ("train", "test")
    )
    assert (len(train), len(test)) == (32, 8) and not train & test
    assert run.evaluate.tasks[0] == "tuned.new.test.jsonl" and run.prepare.sources[0].path == "tuned.new.train.jsonl"
    assert outrider_with("init", "new.yaml", "--target", str(folder), "--kind", "dspark", "--old", "log.jsonl") == 2
