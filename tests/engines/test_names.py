"""Engines and formats by any of their names, and the model card of what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from published import LAYOUTS, Sizes
from tiny import make_folder
from verbs import outrider_with

from outrider import load_target
from outrider.engines import card, commands, names
from outrider.engines.engine import ENGINES, engine_name
from outrider.errors import ConfigError, ExportError
from outrider.export.formats import find, formats
from outrider.export.reading import import_folder
from outrider.targets.transformers import TransformersTarget


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a checkpoint of a DFlash for it."""
    place = tmp_path_factory.mktemp("home")
    target = load_target(make_folder(place / "target", num_hidden_layers=8))
    folder = LAYOUTS["zlab_dflash"](Sizes(target)).write(place / "published")
    import_folder(folder, place / "checkpoint", target)
    return place


CHOICES = [
    ("vllm", "dflash", "speculators"), ("vLLM", "eagle3", "speculators"), ("vllm", "small_model", "transformers"),
    ("vllm", "medusa", "medusa"), ("sglang", "dflash", "sglang"), ("sglang", "small_model", "transformers"),
    ("llama.cpp", "small_model", "gguf"), ("gguf", "small_model", "gguf"), ("llamacpp", "dflash", "speculators"),
    ("gguf", "dspark", "speculators"), ("transformers", "small_model", "transformers"), ("trtllm", "eagle3", "trtllm"),
    ("TensorRT-LLM", "dspark", "deepspec"), ("speculators", "mtp", "speculators"), ("triton", "dflash", "speculators"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "format"), CHOICES)
def test_an_engine_stands_for_the_format_that_it_reads(name: str, kind: str, format: str) -> None:
    """Catches `--to vllm` that is unknown, and a folder that the engine does not read."""
    found = names.chosen(name, kind)
    assert found.format == format
    assert found.engine is None or format in ENGINES[found.engine].methods[kind].formats


REFUSED = [
    ("vlm", "dflash", "unknown engine or format 'vlm'; did you mean 'vllm'?"),
    ("speculator", "dflash", "did you mean 'speculators'?"), ("ours", "dflash",
    "unknown engine or format 'ours'; known: "),
    ("vllm", "domino", "vLLM does not run domino: sglang runs it"), ("vllm", "mtp", "vLLM takes no folder of mtp"),
    ("sglang", "peagle", "SGLang does not run peagle: vllm runs it"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "reason"), REFUSED)
def test_an_unknown_name_offers_the_nearest(name: str, kind: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names.chosen(name, kind)
    assert reason in str(caught.value)


def test_one_list_has_every_engine_and_format() -> None:
    """Catches an engine or a format that `outrider formats` does not print, and a name with two meanings."""
    rows, engines = names.rows(), names.engines()
    assert {row["format"] for row in rows} == set(formats()) and [one["engine"] for one in engines] == list(ENGINES)
    every = [name for one in engines for name in (one["engine"], *one["names"])]
    assert len(every) == len(set(every)) and all(engine_name(name.upper()) in ENGINES for name in every)
    for name, engine in ENGINES.items():
        for kind, method in engine.methods.items():
            for format in method.formats:
                assert [name in row["engines"] for row in rows if (row["format"], row["kind"]) == (format, kind)] in (
                    [],
                    [True],
                )
                assert format in formats() and find(format)
    with pytest.raises(
        ConfigError, match="speculators is a format, not an engine; name an engine that reads it: vllm, llamacpp"
    ):
        engine_name("speculators")


def test_export_deploy_and_verify_export_take_the_same_names(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches `--to llama.cpp` that one verb knows and another does not; the misspelt one offers the nearest in all
    three."""
    checkpoint, target = str(home / "checkpoint"), str(home / "target")
    assert outrider_with("export", checkpoint, "--to", "vLLM", "--out", str(tmp_path / "out"), "--target", target) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "vLLM reads dflash in the layout of speculators" in said and "dflash as speculators for vLLM" in said
    assert outrider_with("deploy", str(tmp_path / "out"), "--to", "VLLM", "--target", target) == 0
    for words in (
        ["export", checkpoint, "--to", "vlm", "--out", str(tmp_path / "no")],
        ["deploy", checkpoint, "--to", "vlm"],
        ["verify-export", checkpoint, "--engine", "vlm"],
    ):
        capsys.readouterr()
        assert outrider_with(*words, "--target", target) == 2
        assert "did you mean 'vllm'?" in capsys.readouterr().err
    assert outrider_with("verify-export", checkpoint, "--engine", "llama.cpp", "--target", target) == 2
    assert "drafts of llama.cpp can't be compared" in " ".join(capsys.readouterr().err.split())
    assert outrider_with("verify-export", checkpoint, "--engine", "vLLM", "--python", "x", "--target", target) == 2
    assert "export it first: `outrider export" in " ".join(capsys.readouterr().err.split())


def test_a_published_folder_is_exported_without_an_import(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a verb that takes checkpoints only, and a target that is asked for after it loaded."""
    published, target = str(home / "published"), str(home / "target")
    assert outrider_with("export", published, "--to", "vllm", "--out", str(tmp_path / "out"), "--target", target) == 0
    weights = [
        path.read_bytes() for path in (home / "checkpoint", tmp_path / "out") for path in path.glob("*.safetensors")
    ]
    assert len(weights) == 2
    manifest = json.loads((tmp_path / "out" / "outrider.json").read_text())
    assert manifest["kind"] == "dflash" and manifest["format"] == "speculators"
    capsys.readouterr()
    assert outrider_with("export", published, "--to", "vllm", "--out", str(tmp_path / "two")) == 2
    assert "does not name its target; name it with --target" in " ".join(capsys.readouterr().err.split())
    assert outrider_with("export", published, "--to", "vllm", "--out", str(tmp_path / "out"), "--target", "/none") == 1
    assert "exists already" in capsys.readouterr().err


# ── the model card ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def exported(home: Path, tmp_path: Path) -> Path:
    out = tmp_path / "served"
    words = ("export", str(home / "checkpoint"), "--to", "vllm", "--out", str(out), "--target", str(home / "target"))
    assert outrider_with(*words) == 0
    return out


def change(folder: Path, **changed: Any) -> None:
    path = folder / "outrider.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_an_exported_folder_has_a_model_card(exported: Path) -> None:
    """Catches metadata that the hub does not read, a private path, and a command that is not deploy's."""
    manifest = json.loads((exported / "outrider.json").read_text())
    text = (exported / "README.md").read_text()
    assert str(exported.parent) not in text and "Not measured." in text and "Licence" in text
    assert ModelCard(text).data.base_model is None
    row = {
        "task": "gsm8k", "temperature": 0.0, "prompts": 24, "tokens_per_step": 2.345, "accepted_by_depth": [0.7, 0.4,
        0.2],
    }  # fmt: skip
    training = {
        "step": 480,
        "tokens": 845_670,
        "config": {"lr": 0.008, "optimizer": "muon", "batch": 8, "loss": {"kl": 1.0}},
    }
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


def test_a_card_that_somebody_edited_stays(exported: Path) -> None:
    """Catches a licence that is lost when acceptance in an engine is noted."""
    change(exported, verified={"vllm 0.33.0": {
        "texts_equal": 24, "prompts": 24, "steps": 1302, "steps_equal": 1.0, "error": None,
    }})  # fmt: skip
    assert card.write(exported) and "In vllm 0.33.0: 24 of 24 texts equal" in (exported / "README.md").read_text()
    edited = "---\nlicense: apache-2.0\n---\nMine.\n"
    (exported / "README.md").write_text(edited)
    assert not card.write(exported) and (exported / "README.md").read_text() == edited


@pytest.mark.parametrize("layout", ["safeailab_eagle3", "medusa_heads"])
def test_a_folder_of_others_is_deployed_by_its_own_target(
    layout: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches `--target` that is asked for although config.json names it."""
    target: TransformersTarget = load_target(str(home / "target"))
    folder = LAYOUTS[layout](Sizes(target)).write(tmp_path / "published")
    if layout == "medusa_heads":
        found = commands.command("vllm", commands.draft_of(folder), version="0.32.0")
        assert "vllm serve org/target" in found.shell
        return
    with pytest.raises(ConfigError, match="the target of .* is not known; name it with --target"):
        commands.draft_of(folder)


def test_only_what_was_exported_here_gets_a_card(home: Path) -> None:
    with pytest.raises(ExportError, match="was not written by `outrider export`"):
        card.write(home / "published")
    assert not (home / "published" / "README.md").exists()
