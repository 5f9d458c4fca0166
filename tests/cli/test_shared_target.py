"""Verbs with `--tensor-parallel` under torchrun: one process prints, and prints what the whole target does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import first

from outrider.cli.evaluate import _of_drafters
from outrider.runs import evaluation
from outrider.runs.file import TargetConfig

ROOT = Path(__file__).resolve().parents[2]


def run(count: int, place: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A verb in so many processes."""
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"] if count > 1 else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *start, "-m", "outrider", *map(str, words)], cwd=place, env=environment, text=True,
        capture_output=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_decode_shares_its_target(folder: Path, tmp_path: Path) -> None:
    """Catches an option that is not passed on, a text of two processes' outputs, and one that waits for standard
    input."""
    words = ("decode", "abcabcabc", "--target", folder, "--max-new-tokens", 24, "--drafter", "ngram")
    done = run(2, tmp_path, *words, "--tensor-parallel", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "its steps stay plain" in done.stderr
    assert done.stdout == run(1, tmp_path, *words, "--no-compile").stdout


@pytest.mark.slow
def test_evaluate_shares_the_target_of_a_drafter(folder: Path, tmp_path: Path) -> None:
    """Catches an option that a drafter by name ignores."""
    (tmp_path / "held_out.jsonl").write_text('{"id": "h", "prompt": "tell me xyxyxy"}\n')
    options = ("--tasks", "held_out.jsonl", "--prompts", 1, "--max-new-tokens", 12, "--temperatures", 0, "--out", "out")
    done = run(
        2, tmp_path, "evaluate", "ngram", "--target", folder, "--tensor-parallel", 2, *options, "evaluate.repeats=0"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "its steps stay plain" in done.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rows"]


@pytest.mark.parametrize("verb", first([("decode", "hello"), ("evaluate", "ngram"), ("serve",)]))
def test_a_shared_target_needs_a_launcher(verb: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    done = run(1, tmp_path, *verb, "--target", folder, "--tensor-parallel", 2)
    assert done.returncode
    assert "tensor_parallel 2 needs 2 processes, and there is one; start them by torchrun" in done.stderr


def test_a_setting_of_the_target_reaches_the_one_that_a_checkpoint_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a --tensor-parallel that is ignored without --target."""
    seen: list[TargetConfig | None] = []

    def of_drafters(names: object, config: object, out: object, target: TargetConfig | None = None) -> SimpleNamespace:
        seen.append(target)
        return SimpleNamespace(target=TargetConfig(name="its own"))

    monkeypatch.setattr(evaluation, "of_drafters", of_drafters)
    monkeypatch.setattr(evaluation, "run", lambda *_: None)
    _of_drafters(["runs/mine/checkpoint"], ["target.tensor_parallel=2"], None, False, None)
    assert seen[-1] == TargetConfig(name="its own", tensor_parallel=2)
