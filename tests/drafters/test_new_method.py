"""A new method that an engine serves is one file, and every verb takes it: DFlash again, under another name."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serve.running import running
from tiny import folder, talker, write_run_file
from verbs import outrider_with

from outrider import drafters, generate
from outrider.checkpoint import load_model
from outrider.engines import engine
from outrider.loading import load_drafter
from outrider.targets.hf.transformers import TransformersTarget
from outrider.weights import weights_of

__all__ = ["folder", "talker"]

AGAIN = """
from typing import Literal

from outrider.drafters import dflash
from outrider.formats import released, speculators
from outrider.formats.layout import Layout
from outrider.method import Method

METHOD = Method(
    cost="once", usual=9, tokens=3, length="block", chain={"siblings": ()},
    engines={"vllm": {"name": "dflash", "formats": ("speculators",)}}, instead={"sglang": "use vllm"},
    layers={"speculators": ("aux_hidden_state_layer_ids", 1)},
    in_anchor={"speculators": ("sample_from_anchor", False)},
)


class Config(dflash.Config):
    kind: Literal["again"] = "again"


class Model(dflash.Model):
    pass


build = Model.build
FORMATS = {
    "speculators": Layout(
        released.BLOCK, lambda source: speculators.block(source, "dflash", "DFlashSpeculator"),
        lambda config, target: speculators.read_block(config, target, METHOD), shift=speculators.SHIFT,
        refuses=released.BLOCK_REFUSES,
    )
}
"""
SETTINGS = {
    "kind": "again", "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 3,
    "taps": [0, 1], "mask_token": 5, "anchor_predicts": False, "init_from_layers": None,
}  # fmt: skip


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file lies in a folder where drafters are looked for."""
    place = tmp_path / "drafters"
    place.mkdir()
    (place / "again.py").write_text(AGAIN)
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(place)])
    for name, one in engine._engines().items():
        monkeypatch.setitem(engine.ENGINES, name, one)  # type: ignore[arg-type]
    drafters.formats.cache_clear()
    yield
    drafters.formats.cache_clear()
    sys.modules.pop("outrider.drafters.again", None)


def test_a_new_method_is_one_file(
    again: None, folder: Path, talker: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches a verb that has a list of methods of its own."""
    monkeypatch.chdir(tmp_path)
    run = write_run_file(tmp_path / "again.yaml", folder, drafter=SETTINGS)
    assert outrider_with("run", str(run)) == 0  # trains and evaluates
    checkpoint, out, back = tmp_path / "runs/again/checkpoint", tmp_path / "out", tmp_path / "back"
    assert outrider_with("export", str(checkpoint), "--to", "vllm", "--target", str(folder), "--out", str(out)) == 0
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "dflash"
    assert outrider_with("import", str(out), "--target", str(folder), "--out", str(back)) == 0
    own, same = (weights_of(load_model(place, talker)) for place in (checkpoint, back))
    assert own.keys() == same.keys() and all(torch.equal(own[name], same[name]) for name in own)
    capsys.readouterr()
    assert outrider_with("deploy", str(out), "--to", "vllm", "--json", "-") == 0
    settings = json.loads(capsys.readouterr().out)["speculative"]
    assert settings["method"] == "dflash" and settings["num_speculative_tokens"] == 3
    traffic = ("--prompt-tokens", "200", "--new-tokens", "100", "--concurrency", "4")
    assert outrider_with("plan", "--target", "demo", "--hardware", "h100", *traffic, "--json", "-") == 0
    assert "acceptance of again" in capsys.readouterr().out
    with running(talker, load_drafter(back, talker), ("again",)) as server:
        answer = server.client().completions.create(model="tiny", prompt="abcabc", max_tokens=12, temperature=0)
    assert answer.choices[0].text == generate(talker, ["abcabc"], max_new_tokens=12)[0].text
