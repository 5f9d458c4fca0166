"""The checklist of a run: an item is done by a file about the checkpoint that is there now, and by no other."""

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from verbs import outrider_with

from outrider import cli
from outrider.errors import ConfigError
from outrider.report.schema import Report
from outrider.runs.rollout import checklist, files
from outrider.runs.rollout.checklist import Item
from outrider.traffic.release import release_of

WEIGHTS, OTHERS, MADE = "11111111", "22222222", "2026-01-02T03:04:05+00:00"
RUN = Path("runs/mine")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained run, as its stages leave it, in runs/mine."""
    monkeypatch.chdir(tmp_path)
    drafter, config = {"kind": "eagle3"}, {"name": "mine", "target": {"name": "demo"}, "train": {"steps": 4}}
    text(RUN / "config.yaml", yaml.safe_dump(config | {"drafter": drafter, "evaluate": {"tasks": ["stdlib"]}}))
    train(WEIGHTS, MADE)
    report(RUN, "eagle3", 1.5, "ngram", 1.2)
    return RUN


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def train(weights: str, evaluated: str | None) -> None:
    """A checkpoint of these weights, and when it was evaluated."""
    manifest = {"version": 1, "kind": "eagle3", "config": {}, "target": {}, "taps": [], "checksums": {
        "model.safetensors": weights}}  # fmt: skip
    measured = {} if evaluated is None else {"report": {"made": evaluated}}
    text(RUN / "checkpoint" / "outrider.json", json.dumps(manifest | measured))
    text(RUN / "checkpoint" / "model.safetensors", weights)


def report(folder: Path, *rows: Any, made: str = MADE, target: str = "demo", exact: bool = True) -> None:
    """A report of these drafters and their speed-ups."""
    prompts = [{"id": f"{i}", "tokens": 90 + i, "steps": 40, "speedup": 1.5, "exact": exact} for i in range(9)]
    made_rows = [
        {"drafter": drafter, "task": "stdlib", "prompts": 9, "temperature": 0, "tokens_per_step": 2.3,
         "accepted_by_depth": [0.6], "tokens_per_s": 90, "plain_tokens_per_s": 60, "speedup": speedup, "exact": exact,
         "compared_tokens": 800, "share": {}, "ttft_ms": {}, "itl_ms": {}, "lossless": True, "per_prompt": prompts}
        for drafter, speedup in zip(rows[::2], rows[1::2], strict=True)
    ]  # fmt: skip
    text(folder / "report.json", json.dumps({"schema": 1, "target": target, "made": made, "rows": made_rows}))


def export(weights: str, **verified: Any) -> None:
    manifest = {"version": 1, "kind": "eagle3", "format": "speculators", "config": {}, "target": {}, "taps": [],
                "checksums": {"model.safetensors": weights}}  # fmt: skip
    text(RUN / "export" / "outrider.json", json.dumps(manifest | ({"verified": verified} if verified else {})))


def whole() -> None:
    """Everything that the commands write."""
    report(RUN / "baseline", "ngram", 1.3)
    export(WEIGHTS, **{"vllm 0.32": {"is_equal": True}})
    text(RUN / "tuned" / "tune.json", json.dumps({"outrider_tune": 1, "weights": WEIGHTS, "pays_to": 32}))
    greedy = {"verdict": "equal", "equal": 8, "prompts": 8}
    text(RUN / "parity.json", json.dumps({"weights": WEIGHTS, "greedy": greedy, "sampled": None}))
    server = lambda port: {"url": f"http://127.0.0.1:{port}", "sent": 9, "answered": 9}
    text(RUN / "canary" / "replay.json", json.dumps({
        "outrider_replay": 1, "measured": "2999-01-01T00:00:00+00:00", "is_whole": True, "not_sent": 0,
        "endpoints": [server(8000), server(8001)],
        "comparisons": [{"ratios": {"e2e_s": {"center": 0.7, "low": 0.6, "high": 0.8}}}],
    }))  # fmt: skip
    release = release_of(Report.load(RUN)).json()
    text(RUN / "watch.json", json.dumps({"release": release, "alarmed": False, "side": "inside", "away": None}))


def items() -> dict[str, Item]:
    return {item.name: item for item in checklist.items(files.read(RUN))}


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_list_is_the_roll_out_in_its_order(run: Path, tmp_path: Path) -> None:
    """Catches an item that is lost, one that is done before its file is there, and a roll-out that a script takes for
    done."""
    found = items()
    assert list(found) == ["baseline", "candidates", "tune", "parity", "canary", "watch"]
    assert [item.state for item in found.values()] == ["to do", "done", "to do", "to do", "to do", "to do"]
    assert all(str(RUN) in item.reason for item in found.values() if item.state == "to do")
    words = ("plan", "--checklist", str(RUN), "--json", str(tmp_path / "list.json"))
    assert outrider_with(*words) == 1
    assert json.loads((tmp_path / "list.json").read_text())["is_done"] is False
    whole()
    assert outrider_with(*words) == 0
    said = json.loads((tmp_path / "list.json").read_text())
    assert said["is_done"] and said["weights"] == WEIGHTS and {item["state"] for item in said["items"]} == {"done"}


def test_another_checkpoint_makes_everything_about_the_old_one_out_of_date(run: Path) -> None:
    """Catches an item that stays done when the drafter is trained anew: of six only the baseline knows no drafter."""
    whole()
    train(OTHERS, None)
    later = time.time() + 100
    os.utime(RUN / "checkpoint" / "model.safetensors", (later, later))
    change(RUN / "canary" / "replay.json", measured=MADE)
    report(RUN, "eagle3", 1.6, made="2026-02-02T00:00:00+00:00")
    other = json.loads((RUN / "report.json").read_text())
    other["rows"][0]["per_prompt"][0]["tokens"] = 300
    (RUN / "report.json").write_text(json.dumps(other))
    found = items()
    assert found.pop("baseline").state == "done"
    assert {item.state for item in found.values()} == {"out of date"}
    assert "was not evaluated since its training" in found["candidates"].reason
    assert f"is of weights {WEIGHTS}, the checkpoint has {OTHERS}" in found["tune"].reason
    assert f"is of weights {WEIGHTS}, the checkpoint has {OTHERS}" in found["parity"].reason
    assert "2026-01-02" in found["canary"].reason and "a release other than" in found["watch"].reason


@pytest.mark.parametrize(
    ("name", "path", "fields", "said"),
    [
        ("tune", "tuned/tune.json", {"pays_to": 0}, "does not pay off at any load"),
        ("parity", "parity.json", {"greedy": {"verdict": "bug"}}, "greedy texts differ from the target's own"),
        ("parity", "parity.json", {"sampled": {"verdict": "different"}}, "sampled texts differ from the target's own"),
        ("parity", "export/outrider.json", {"verified": {"vllm 0": {"is_equal": False, "causes": ["taps"]}}}, "taps"),
        ("canary", "canary/replay.json", {"endpoints": [{"url": "a", "sent": 9, "answered": 9},
                                                        {"url": "b", "sent": 9, "answered": 8}]}, "b answered 8 of 9"),
        ("canary", "canary/replay.json", {"comparisons": [{"ratios": {"e2e_s": {"center": 1.2, "low": 1.1}}}]},
         "1.20 of its time without"),
        ("watch", "watch.json", {"alarmed": True, "side": "below"}, "below the release's interval"),
        ("watch", "watch.json", {"away": "no answer"}, "could not be read: no answer"),
    ],
)  # fmt: skip
def test_a_check_that_says_no_is_not_done(run: Path, name: str, path: str, fields: dict[str, Any], said: str) -> None:
    """Catches an item that is done because its file is there, whatever is in it."""
    whole()
    change(RUN / path, **fields)
    assert items()[name].state == "failed" and said in items()[name].reason


def test_candidates_must_be_exact_and_faster_than_what_needs_no_training(run: Path) -> None:
    """Catches a roll-out of a drafter that a lookup beats, or whose text is another."""
    report(RUN / "baseline", "ngram", 1.7)
    assert (items()["candidates"].state, items()["baseline"].state) == ("failed", "done")
    assert "ngram, 1.70 times" in items()["candidates"].reason
    report(RUN, "eagle3", 1.9, exact=False)
    assert items()["candidates"].state == "failed" and "differs from the target's own" in items()["candidates"].reason


def test_a_baseline_of_another_target_or_a_damaged_file_is_out_of_date(run: Path) -> None:
    """Catches a baseline that was measured elsewhere, and half a file that stops the list."""
    whole()
    report(RUN / "baseline", "ngram", 1.3, target="other")
    text(RUN / "parity.json", '{"weights":')
    text(RUN / "canary" / "replay.json", json.dumps({"endpoints": [{}]}))
    found = items()
    assert {found[name].state for name in ("baseline", "parity", "canary")} == {"out of date"}
    assert "it measured other" in found["baseline"].reason and "can't be read" in found["parity"].reason


@pytest.mark.parametrize("kind", ["eagle3", "ngram", "confu"])
def test_every_command_is_one_that_outrider_takes(run: Path, kind: str) -> None:
    """Catches a command with an option that was renamed, or a path that is not the run's own."""
    config = yaml.safe_load((RUN / "config.yaml").read_text())
    (RUN / "config.yaml").write_text(yaml.safe_dump(config | {"drafter": {"kind": kind}}))
    listed = [command for item in checklist.items(files.read(RUN, "my log.jsonl")) for command in item.commands]
    assert len(listed) >= 8 and any("'my log.jsonl'" in command for command in listed)
    for command in listed:
        program, verb, *words = shlex.split(command)
        assert program == "outrider"
        cli.app.load(verb).make_context(verb, words)  # raises where the words are not its own
    text_of = " ".join(listed)
    assert ("--engine" in text_of) == (kind != "confu") and ("runs/mine/export" in text_of) == (kind == "eagle3")


def test_what_is_in_the_way_is_deleted_first(run: Path) -> None:
    """Catches a command that is refused by the files of the last checkpoint, or deletes those of this one; an engine
    that was verified with the draft of last week, and a list that asks to evaluate what is not there."""
    whole()
    assert not any(command.startswith("rm") for item in items().values() for command in item.commands)
    train(OTHERS, None)
    commands = items()["tune"].commands
    assert [" ".join(command.split()[:3]) for command in commands] == [
        "rm -r runs/mine/export", "outrider export runs/mine/checkpoint", "rm -r runs/mine/tuned",
        "outrider tune traffic.jsonl",
    ]  # fmt: skip
    assert items()["canary"].commands[-1].endswith("--over") and "--overwrite" in items()["baseline"].commands[0]
    train(WEIGHTS, MADE)
    export(OTHERS, **{"vllm 0.32": {"is_equal": True}})
    assert items()["parity"].state == "out of date"
    export(WEIGHTS)
    assert (items()["parity"].state, items()["parity"].reason) == ("to do", "runs/mine/export was not verified in vllm")
    (RUN / "checkpoint" / "outrider.json").unlink()
    found = items()["candidates"]
    assert found.state == "to do" and found.commands == ("outrider run runs/mine/config.yaml",)


def test_a_folder_from_elsewhere_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches commands that would write into another run's folder."""
    with pytest.raises(ConfigError, match=r"has no config.yaml, so it is not a run's folder"):
        files.read(Path("runs"))
    monkeypatch.chdir(RUN)
    with pytest.raises(ConfigError, match=r"is not runs/mine from here"):
        files.read(Path())
    assert outrider_with("plan", "--checklist", ".", "--hardware", "h100") == 2
