"""The examples run as they stand, each at most a screen."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SHORT = [
    "prepare.count=12", "prepare.max_new_tokens=24", "train.steps=4", "train.save_every=4", "evaluate.prompts=2",
    "evaluate.max_new_tokens=16",
]  # fmt: skip


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_decode_writes_the_same_with_drafts_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    load("decode").main()
    assert "the same text" in capsys.readouterr().out


@pytest.mark.slow
def test_a_drafter_of_one_file_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    load("write_a_drafter").main()
    assert capsys.readouterr().out.count("equal with and without drafts") == 2


@pytest.mark.slow
def test_a_served_text_is_the_same_with_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    load("serve").main()
    out = capsys.readouterr().out
    assert out.endswith("the same text\n")
    steps = [int(line.split()[0]) for line in out.splitlines() if " steps, " in line]
    assert steps[0] < steps[1] == 64


@pytest.mark.slow
def test_a_servers_text_is_the_same_with_drafts_made_here(capsys: pytest.CaptureFixture[str]) -> None:
    load("remote").main()
    out = capsys.readouterr().out
    assert "the same text with drafts and without" in out and "than plain requests" in out
    load("pasted_draft").main()
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
def test_a_drafter_is_trained_exported_and_served(tmp_path, monkeypatch, capsys):
    """The three examples use what the one before left."""
    monkeypatch.chdir(tmp_path)
    load("train").main(SHORT)
    load("export").main()
    assert "the same drafts accepted" in capsys.readouterr().out
    if shutil.which("vllm") is None:
        load("serve_in_vllm").main()
        assert capsys.readouterr().out.startswith("vllm serve ")
