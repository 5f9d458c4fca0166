"""Verbs with `--tensor-parallel` under torchrun: one process prints, and prints what the whole target does."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from verbs import outrider_with

from outrider.cli.evaluate import _of_drafters
from outrider.runs import evaluation
from outrider.runs.file import TargetConfig
from tests.runs.forks import fork_all


def test_decode_shares_its_target(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that is not passed on, and a text of two processes' outputs."""
    words = ("decode", "abcabcabc", "--target", str(folder), "--max-new-tokens", "24", "--drafter", "ngram")
    said = fork_all(2, *words, "--tensor-parallel", "2", log=tmp_path / "log")
    assert outrider_with(*words, "--no-compile") == 0
    assert said.count(capsys.readouterr().out) == 1


def test_a_shared_target_needs_a_launcher(folder, capsys):
    """Catches an option that is not passed on."""
    for verb in (("decode", "hello"), ("evaluate", "ngram"), ("serve",)):
        assert outrider_with(*verb, "--target", str(folder), "--tensor-parallel", "2") != 0
        said = " ".join(capsys.readouterr().err.split())
        assert "tensor_parallel 2 needs 2 processes, but there is one; start them with torchrun" in said


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
