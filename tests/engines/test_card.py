"""The model card of an exported drafter."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from published import LAYOUTS, Sizes

from outrider import load_target
from outrider.engines import card, commands
from outrider.engines.export import export
from outrider.errors import ConfigError, ExportError


@pytest.fixture
def exported(home: Path, tmp_path: Path) -> Path:
    return export(home / "checkpoint", "vllm", tmp_path / "served", str(home / "target"))


def change(folder: Path, **changed: Any) -> None:
    path = folder / "outrider.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_an_exported_folder_has_a_model_card(exported: Path) -> None:
    """Catches metadata that the hub does not read, a private path, a command that is not deploy's, and an edited card
    that is lost when acceptance in an engine is noted."""
    manifest = json.loads((exported / "outrider.json").read_text())
    text = (exported / "README.md").read_text()
    assert str(exported.parent) not in text and "Not measured." in text and "Licence" in text
    assert ModelCard(text).data.base_model is None
    row = {"task": "gsm8k", "temperature": 0.0, "prompts": 24, "tokens_per_step": 2.345}
    row["accepted_by_depth"] = [0.7, 0.4, 0.2]
    config = {"lr": 0.008, "optimizer": "muon", "batch": 8, "loss": {"kl": 1.0}}
    training = {"step": 480, "tokens": 845_670, "config": config}
    change(exported, target=manifest["target"] | {"name": "Qwen/Qwen3-4B"}, report={"rows": [row]}, training=training)
    assert card.write(exported)
    text = (exported / "README.md").read_text()
    data = ModelCard(text).data
    assert (data.base_model, data.library_name) == ("Qwen/Qwen3-4B", "speculators")
    assert "speculative-decoding" in data.tags and "dflash" in data.tags and data.license is None
    assert "| gsm8k | 0 | 24 | 2.35 | 70%, 40%, 20% |" in text
    assert "480 steps; 845,670 tokens; batches of 8 texts; learning rate 0.008 (muon); loss 1 kl." in text
    draft = commands.draft_of(exported)
    assert commands.command("vllm", draft).shell.replace(str(exported), "FOLDER") in text
    change(exported, verified={"vllm 0.33.0": {
        "texts_equal": 24, "prompts": 24, "steps": 1302, "steps_equal": 1.0, "error": None,
    }})  # fmt: skip
    line = "In vllm 0.33.0: 24 of 24 texts equal to Outrider's, 1,302 steps, 100.0% accept the same number."
    assert card.write(exported) and line in (exported / "README.md").read_text()
    edited = "---\nlicense: apache-2.0\n---\nMine.\n"
    (exported / "README.md").write_text(edited)
    assert not card.write(exported) and (exported / "README.md").read_text() == edited


def test_a_folder_of_others_is_deployed_by_its_own_target(home: Path, tmp_path: Path) -> None:
    """Catches `--target` that is asked for although config.json names it, and a card over what others published."""
    sizes = Sizes(load_target(str(home / "target")))
    medusa = LAYOUTS["medusa_heads"](sizes).write(tmp_path / "medusa")
    assert "vllm serve org/target" in commands.command("vllm", commands.draft_of(medusa), version="0.32.0").shell
    with pytest.raises(ConfigError, match="the target of .* is not known; name it with --target"):
        commands.draft_of(LAYOUTS["safeailab_eagle3"](sizes).write(tmp_path / "eagle3"))
    with pytest.raises(ExportError, match="was not written by `outrider export`"):
        card.write(home / "published")
    assert not (home / "published" / "README.md").exists()
