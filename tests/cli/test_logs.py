"""What the stages of a run print into a log: where they go on, how far they are, what they reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console
from tiny import write_run_file
from verbs import outrider_with

from outrider.cli import console, stages


@pytest.fixture
def log(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file in an empty folder, and a log that gets a line at every tenth of the work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "LINE_AFTER_S", 0.0)
    monkeypatch.setattr(console, "note", Console(stderr=True, width=300))
    file = (tmp_path / "log.txt").open("w")
    monkeypatch.setattr(console, "out", Console(file=file, width=300))
    return write_run_file(tmp_path / "tiny.yaml", folder)


def lines(log: Path) -> list[str]:
    """What was printed since the last call."""
    console.out.file.flush()
    path = log.parent / "log.txt"
    text = path.read_text()
    console.out.file.seek(0)
    console.out.file.truncate()
    return text.splitlines()


def test_a_piped_run_says_how_far_it_is_and_ends_every_stage_with_what_it_reached(log: Path) -> None:
    """Catches a night of Slurm whose log has four lines, and a stage that ends without a figure."""
    less = ("evaluate.temperatures=[0.0]", "evaluate.baselines=[]", "evaluate.traced_prompts=0")
    assert outrider_with("run", "tiny.yaml", *less) == 0
    said = "\n".join(lines(log))
    for pattern in (
        r"^ +\d of 6 answers, .* left$",
        r"^ +6 answers, \d+ tokens to learn, took .*; in .*answers\.jsonl$",
        r"^ +2 of 4 steps, loss \d\.\d+, expected \d\.\d+ tokens per step, .* left$",
        r"^ +4 of 4 steps, loss ",
        r"^ +loss \d.*; expected \d\.\d\d tokens per step, accepted to depth 1, 2, 3: \d+, \d+, \d+ %; took ",
        r"^ +.*measured \d\.\d\d on a few prompts$",
        r"^ +1 of 2 prompts, \d\.\d\d tokens per step, ",
        r"^ +1 row over 2 prompts; took ",
    ):
        assert re.search(pattern, said, re.MULTILINE), f"{pattern}\n{said}"


def test_what_was_resumed_is_said(log: Path) -> None:
    """Catches a run that goes on in silence, so that nobody knows whether it began again."""
    assert outrider_with("prepare", "tiny.yaml", "prepare.count=2") == 0
    assert not [line for line in lines(log) if "goes on" in line]
    assert outrider_with("prepare", "tiny.yaml") == 0
    assert [line.strip() for line in lines(log) if "goes on" in line] == ["goes on from answer 2 of 6"]
    assert outrider_with("train", "tiny.yaml", "train.steps=2") == 0
    assert outrider_with("train", "tiny.yaml") == 0
    assert [line.strip() for line in lines(log) if "goes on" in line] == ["goes on from step 2 of 4"]
    assert outrider_with("train", "tiny.yaml") == 0
    assert "          all 4 steps were done before" in lines(log)


def test_the_pace_is_that_of_this_process_and_the_last_acceptance_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens of an earlier run counted as written now, and acceptance that is shown at every twentieth step
    only."""
    now = 0.0
    monkeypatch.setattr(stages.time, "monotonic", lambda: now)
    note = stages._Notes("expected ")
    assert note(tokens=5000.0, loss=2.0, tokens_per_step=1.5) == "loss 2.000, expected 1.50 tokens per step"
    now = 10.0
    assert note(tokens=6000.0, loss=1.5) == "loss 1.500, expected 1.50 tokens per step, 100 tokens/s"
    assert note(tokens=6000.0, left_out=2) == "expected 1.50 tokens per step, 100 tokens/s, 2 left out"
