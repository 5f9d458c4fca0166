"""A drafter by its name: kinds, checkpoints, published folders and Hugging Face ids."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
import torch
from conftest import first
from published import LAYOUTS, Published, Sizes
from tiny import make_folder
from verbs import outrider_with

from outrider import checkpoint, generate, load_drafter, load_target
from outrider.errors import CheckpointError, ConfigError, ExportError, OutriderError, TrainingError
from outrider.export.reading import import_folder
from outrider.loading import describe, draft_model
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.fitting import calibrate
from outrider.weights import weights_of

FAST = ("speculators_eagle3", "zlab_dflash", "medusa_heads")
PROMPTS = ("a text of some words", "and one more")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> TransformersTarget:
    """Eight layers, so that EAGLE-3's usual taps are three."""
    return load_target(make_folder(tmp_path_factory.mktemp("target") / "deep", num_hidden_layers=8), dtype="float64")


def texts(target: TransformersTarget, drafter: Any) -> list[tuple[list[int], list[int]]]:
    prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    found = generate(target, prompts, drafter, max_new_tokens=16)
    return [(one.tokens, list(one.accepted)) for one in found]


@pytest.mark.parametrize("name", first([*FAST, *sorted(LAYOUTS.keys() - set(FAST))], len(FAST)))
def test_a_published_folder_drafts_as_it_is(name: str, verifier: TransformersTarget, tmp_path: Path) -> None:
    """Catches a layout that only `outrider import` reads, one that is read otherwise there."""
    made = LAYOUTS[name](Sizes(verifier))
    folder = made.write(tmp_path / "published")
    source = describe(folder)
    assert (source.kind, source.format) == (made.kind, made.format)
    plain = [tokens for tokens, _ in texts(verifier, None)]
    drafted = texts(verifier, load_drafter(folder, verifier))
    assert [tokens for tokens, _ in drafted] == plain
    import_folder(folder, tmp_path / "checkpoint", verifier)
    assert texts(verifier, load_drafter(tmp_path / "checkpoint", verifier)) == drafted
    read, imported = (weights_of(draft_model(place, verifier)) for place in (folder, tmp_path / "checkpoint"))
    assert read.keys() == imported.keys() and all(torch.equal(read[key], imported[key]) for key in read)
    # every weight is read: none stays as it began
    values = {weight.double().sum().item() for weight in read.values() if weight.is_floating_point()}
    ignored = ("embed_tokens.weight", "lm_head.weight") if "d2t" not in made.weights else ("embed_tokens.weight",)
    for key, weight in made.weights.items():
        if weight.is_floating_point() and key not in ignored:
            assert weight.double().sum().item() in values, key


def _config(**changed: Any) -> Callable[[Path, Published], None]:
    def edit(folder: Path, made: Published) -> None:
        (folder / "config.json").write_text(json.dumps(made.config | changed))

    return edit


def _without(key: str) -> Callable[[Path, Published], None]:
    def edit(folder: Path, made: Published) -> None:
        shutil.rmtree(folder)
        made._replace(weights={name: weight for name, weight in made.weights.items() if name != key}).write(folder)

    return edit


REFUSED: dict[str, tuple[str, Callable[[Path, Published], None], str]] = {
    "a vocabulary": ("zlab_dflash", _config(vocab_size=300), "vocab_size is 300, .* has 261; load the target"),
    "a vocabulary without a map": ("speculators_eagle3", _without("d2t"), "lacks the weights d2t"),
    "an architecture": (
        "zlab_dflash", _config(architectures=["HydraModel"], dflash_config=None),
        r"has architectures \['HydraModel'\] in config.json, and matches no drafter of .*; name its format and kind",
    ),
    "no config.json": (
        "medusa_heads", lambda folder, made: (folder / "config.json").unlink(), "neither outrider.json nor config.json",
    ),
    "Gemma's layers": ("deepspec_dflash", _config(architectures=["Gemma4DSparkModel"]), "Gemma layers"),
    "a sliding window": ("zlab_dflash", _config(layer_types=["full_attention", "sliding_attention"]), "full attention"),
    "shapes": ("zlab_dflash", _config(head_dim=16), r"does not fit its config: .*q_proj.weight \(16, 32\), wanted "
    r"\(32, 32\)"),
}  # fmt: skip


def test_a_published_folder_is_refused_with_the_reason(verifier: TransformersTarget, tmp_path: Path) -> None:
    """Catches a drafter that loads and drafts nonsense."""
    for case, (name, spoil, reason) in REFUSED.items():
        made = LAYOUTS[name](Sizes(verifier))
        folder = made.write(tmp_path / case)
        spoil(folder, made)
        with pytest.raises(OutriderError, match=reason) as caught:
            load_drafter(folder, verifier)
        assert ";" in str(caught.value) and "\n" not in str(caught.value), case


def in_the_cache(home: Path, name: str, made: Published) -> None:
    """A repository as huggingface_hub keeps it after a download."""
    place = home / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0123abc")
    made.write(place / "snapshots" / "0123abc")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's, without a network."""
    home = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return home


def test_a_drafter_comes_from_the_hub_by_its_id(verifier, tmp_path, hub, monkeypatch):
    """Catches an id that needs `outrider import` first, or that is taken for a folder."""
    monkeypatch.chdir(tmp_path)
    made = LAYOUTS["zlab_dflash"](Sizes(verifier))
    in_the_cache(hub, "org/tiny-dflash", made)
    folder = made.write(tmp_path / "published")
    assert texts(verifier, load_drafter("org/tiny-dflash", verifier)) == texts(verifier, load_drafter(folder, verifier))
    assert describe("org/tiny-dflash").kind == "dflash"


def test_what_a_folder_or_an_id_can_not_give_is_refused(verifier, hub, tmp_path, monkeypatch):
    """Catches a minute of waiting for the network over a misspelt path, a setting that is given and ignored."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="'org/none' .* can't be fetched from the hub: .*; check the name"):
        describe("org/none")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: pytest.fail("asked the hub"))
    for name in ("./x", "x/drafter.safetensors"):
        with pytest.raises(ConfigError, match="no such (folder|file): "):
            describe(name)
    targets = dict.fromkeys(("speculators_mtp", "deepspec_eagle3", "medusa_heads"), "org/target") | {
        "zlab_dflash": None
    }
    for name, target in targets.items():
        folder = LAYOUTS[name](Sizes(verifier)).write(tmp_path / name)
        assert describe(folder).target == target
    with pytest.raises(ConfigError, match="with settings of its own; leave out block"):
        load_drafter(folder, verifier, block=2)
    import_folder(folder, tmp_path / "checkpoint", verifier)
    with pytest.raises(ExportError, match="is already a checkpoint"):
        import_folder(tmp_path / "checkpoint", tmp_path / "again", verifier)


def test_a_published_drafter_is_calibrated_into_a_new_checkpoint(tmp_path, capsys, monkeypatch):
    """Catches a published folder that is changed, one that needs `outrider import` first."""
    monkeypatch.setattr(calibrate, "MIN_DRAFTS", 10)
    target = make_folder(tmp_path / "target", num_hidden_layers=8)
    made = LAYOUTS["deepspec_dspark"](Sizes(load_target(target)))
    folder = made.write(tmp_path / "published")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"id": "{i}", "prompt": "say {i}"}}\n' for i in range(8)))
    lengths = "--count", "8", "--max-new-tokens", "16"
    words = "calibrate", str(folder), "--prompts", str(tmp_path / "prompts.jsonl"), *lengths
    assert outrider_with(*words) == 2
    assert "does not name its target; name it with --target" in " ".join(capsys.readouterr().err.split())
    assert outrider_with(*words, "--target", str(target)) == 2
    assert "which is never modified; name a new checkpoint with --out" in " ".join(capsys.readouterr().err.split())
    there = sorted(path.name for path in tmp_path.iterdir())
    writing = (*words, "--target", str(target), "--out", str(tmp_path / "scaled"))
    with monkeypatch.context() as patched:  # too few drafts, and a disk that is full when the scaling is written
        patched.setattr(calibrate, "MIN_DRAFTS", 10_000)
        assert outrider_with(*writing) == 1
        patched.setattr(calibrate, "MIN_DRAFTS", 10)
        patched.setattr(checkpoint, "amend", Mock(side_effect=TrainingError("the disk is full")))
        assert outrider_with(*writing) == 1
        assert "the disk is full" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert outrider_with(*writing) == 0, capsys.readouterr().err
    assert outrider_with(*writing) == 1
    assert "exists already" in capsys.readouterr().err
    assert "calibration" in describe(tmp_path / "scaled").manifest and not (folder / "outrider.json").exists()
