"""A drafter that is sound, and the same one in set-ups that are spoilt on purpose."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import load_target
from outrider.diagnosis import run as diagnosis
from outrider.engines import export as exporting
from outrider.loading import describe
from outrider.measure.tasks.layouts import Prompt

from .conftest import prompts

pytestmark = pytest.mark.slow  # a target and a drafter are trained first
RAW = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def target(language: Path) -> Any:
    return load_target(language, compile=False)


@pytest.fixture
def named(target: Any) -> Callable[..., list[str]]:
    """The causes that are named for a drafter."""

    def named(drafter: Path, **options: Any) -> list[str]:
        rows = [Prompt(str(i), (text,)) for i, text in enumerate(prompts(24, 7))]
        result = diagnosis.run(str(drafter), target, rows, diagnosis.Options(**options))
        return sorted(cause.name for cause in result.causes)

    return named


def spoilt(checkpoint: Path, folder: Path, taps: bool = False, is_recorded: bool = True) -> Path:
    """A copy of a checkpoint with its taps one layer too high, or without the record of its training."""
    shutil.copytree(checkpoint, folder)
    manifest = json.loads((folder / "outrider.json").read_text())
    if taps:
        manifest["taps"] = manifest["config"]["taps"] = [tap + 1 for tap in manifest["taps"]]
    if not is_recorded:
        del manifest["training"]["conditions"]
    (folder / "outrider.json").write_text(json.dumps(manifest))
    return folder


def test_no_cause_is_named_for_a_sound_set_up(named, trained, tmp_path) -> None:
    """Catches a cause that is named because something was tried."""
    assert named(trained) == []
    assert named(spoilt(trained, tmp_path / "imported", is_recorded=False), temperature=0.5) == []


def test_spoilt_set_ups_are_named_singly_and_in_pairs(named, trained, tmp_path) -> None:
    """Catches an experiment that is not made, or does not change what it says."""
    shifted = spoilt(trained, tmp_path / "shifted", taps=True)
    assert named(shifted) == ["taps"]
    assert named(trained, template=RAW) == ["template"]
    assert named(shifted, template=RAW) == ["taps", "template"]
    assert named(spoilt(shifted, tmp_path / "both", is_recorded=False), temperature=0.5) == ["taps"]


def test_a_published_folder_with_wrong_layers_is_diagnosed(named, trained, target, tmp_path) -> None:
    """Catches a diagnosis for checkpoints alone."""
    folder = exporting.export(describe(trained), "speculators", tmp_path / "export", target.spec.name, None)
    (folder / "outrider.json").unlink()  # as another project writes it
    config = json.loads((folder / "config.json").read_text())
    config["aux_hidden_state_layer_ids"] = [layer + 1 for layer in config["aux_hidden_state_layer_ids"]]
    (folder / "config.json").write_text(json.dumps(config))
    assert named(folder, temperature=0.5) == ["taps"]
