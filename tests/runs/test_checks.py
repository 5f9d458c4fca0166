"""What is wrong with a run is found before its target loads, and a preview writes nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from tiny import DRAFTER
from verbs import outrider_with

from outrider.data.answers.store import read_answers
from outrider.data.overlap import hash_files
from outrider.errors import OutriderError
from outrider.runs import stages
from outrider.runs.stages import plan, run


def changed(path: Path, **sections: Any) -> Path:
    """The same run file with other values: section__key=value."""
    values = yaml.safe_load(path.read_text())
    for key, value in sections.items():
        section, _, name = key.partition("__")
        values[section] = values[section] | {name: value} if name else value
    path.write_text(yaml.safe_dump(values))
    return path


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"evaluate__tasks": ["held_out.jsonl", "gone.json"]}, "evaluate.tasks: no such file: gone.json"),
    ({"prepare__conversations": "runs/prompts"}, "no such folder: runs/prompts"),
    ({"evaluate__baselines": ["runs/other/checkpoint"]}, "evaluate.baselines: no such folder: runs/other/checkpoint"),
    ({"evaluate__baselines": [{"kind": "suffix", "corpora": ["mine"]}]}, "no corpus 'mine'"),
    ({"drafter": {"kind": "small_model", "model": "./gone"}, "train": None}, "drafter.model: no such folder: ./gone"),
    ({"drafter": DRAFTER | {"taps": [1, 40]}}, "taps"),
    ({"target": "models/tiny"}, "target.name: no such folder: models/tiny"),
    ({"evaluate__max_new_tokens": 5000}, "leaves no room for a prompt"),
    ({"prepare__length": 257}, "prepare.length 257 is more than the context of"),
    ({"target": {"name": "demo", "quantize": "int8"}}, "needs torchao"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=lambda value: "" if isinstance(value, str) else "-".join(value))
def test_what_is_wrong_is_found_before_the_target_loads(change, said, written, tmp_path, monkeypatch):
    """Catches hours of answers or of training before a later stage's input turns out to be missing; in a preview
    too."""
    monkeypatch.setenv("OUTRIDER_CORPORA", str(tmp_path / "corpora"))
    monkeypatch.setattr(stages, "target_of", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setitem(sys.modules, "torchao", None)
    (tmp_path / "models").mkdir()
    file = changed(written(), **change)
    if change.get("train", "") is None:
        file = changed(file, evaluate__baselines=[])
    for act in (run, plan):
        with pytest.raises(OutriderError) as caught:
            act(file)
        assert said in str(caught.value)
    assert not (tmp_path / "runs").exists()


def tree(path: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(one.relative_to(path)): (one.stat().st_mtime_ns, b"" if one.is_dir() else one.read_bytes())
        for one in sorted(path.rglob("*"))
    }


def test_a_preview_says_what_will_be_done_and_writes_nothing(written, tmp_path, capsys):
    """Catches a dry run that makes a folder or a file, or that counts other than the run does; and a training that is
    extended with another schedule without a word."""
    written(usual_minutes={"train": 3})
    before = tree(tmp_path)
    for verb in ("run", "prepare"):
        assert outrider_with(verb, "tiny.yaml", "--dry-run", "prepare.count=4") == 0
    assert tree(tmp_path) == before
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 of 6 prompts" in shown and "4 steps of 2 texts, 2.0 passes over 4 texts" in shown and "3 min" in shown
    assert outrider_with("train", "tiny.yaml", "--dry-run") == 1  # no answers yet
    assert outrider_with("run", "tiny.yaml", "evaluate.prompts=1") == 0
    saved = load_file(tmp_path / "runs/tiny/checkpoint/model.safetensors")
    before = tree(tmp_path)
    for verb in ("run", "train"):
        assert outrider_with(verb, "tiny.yaml", "--dry-run", "evaluate.prompts=2") == 0
    assert tree(tmp_path) == before
    lines = {(line.stage, line.what): line.value for line in plan("tiny.yaml")}
    assert lines["train", "parameters of dspark"] == sum(
        value.numel() for name, value in saved.items() if not name.endswith(("temperatures", "shifts"))
    )
    assert lines["train", "resumes from step"] == 4
    assert (lines["prepare", "already answered"], lines["prepare", "tokens to generate, at most"]) == (6, 0)
    capsys.readouterr()
    assert outrider_with("train", "tiny.yaml", "train.steps=8") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "resuming from step 4 of 8" in shown
    assert "train.steps was 4: from 0 % of its peak the learning rate joins the curve of 8 steps" in shown
    assert json.loads((tmp_path / "runs/tiny/checkpoint/outrider.json").read_text())["training"]["step"] == 8


def test_a_lower_count_trains_on_fewer_answers_and_a_higher_one_on_more(written: Any, tmp_path: Path) -> None:
    """Catches answers of an earlier, larger count that go on being trained on, and answers that are written again."""
    file = written()
    texts = {}
    for name, count in (("a", 4), ("b", 2), ("c", None)):
        given = [f"name={name}", f"prepare.count={json.dumps(count)}", f"prepare.folder={tmp_path}/answers"]
        run(file, [*given, "train.steps=1"], stages=["prepare", "train"])
        texts[name] = json.loads((tmp_path / "runs" / name / "provenance.json").read_text())["texts"]
    assert texts == {"a": 4, "b": 2, "c": 6}
    assert len(read_answers(tmp_path / "answers/answers.jsonl")) == 6
    assert hash_files.named(tmp_path / "answers") is not None


def test_answers_whose_prompts_are_gone_still_train(written, tmp_path, caplog):
    """Catches a run that can't be trained any more because its prompts were moved, and one that does not say so; but a
    missing evaluation file is found before the training, and held-out prompts that are gone stop it, because nobody can
    tell any more which answers they are."""
    file, held_out = written(), tmp_path / "mine.jsonl"
    held_out.write_text('{"prompt": "held"}\n')
    given = [f"prepare.held_out={held_out}"]
    run(file, given, stages=["prepare"])
    for missing in (held_out, tmp_path / "held_out.jsonl"):
        content = missing.read_text()
        missing.unlink()
        with pytest.raises(OutriderError, match=missing.name):
            run(file, given, stages=["train"])
        missing.write_text(content)
    assert not (tmp_path / "runs/tiny/checkpoint").exists()
    run(file, ["name=free"], stages=["prepare"])
    (tmp_path / "prompts.jsonl").unlink()
    run(file, ["name=free", "train.steps=1"], stages=["train"])
    assert "can't be read: training on all 6 answers" in caplog.text
