"""Runs that start from a trained drafter, or measure one: `drafter: FOLDER`, `drafter: {from: FOLDER}`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from published import LAYOUTS, Sizes
from tiny import make_folder, write_run_file

from outrider import checkpoint, load_target, run
from outrider.errors import ConfigError, OutriderError
from outrider.export.reading import import_folder
from outrider.loading import draft_model
from outrider.runs.baselines import load_all
from outrider.runs.evaluation import of_run
from outrider.runs.file import load
from outrider.runs.reporter import Reporter
from outrider.weights import weights_of

TRAIN: dict[str, Any] = {"steps": 1, "batch": 2, "lr": 1e-9, "dtype": "float32", "log_every": 1, "save_every": 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a published DSpark and EAGLE-3 for it, and a checkpoint of the DSpark."""
    place = tmp_path_factory.mktemp("home")
    target = load_target(make_folder(place / "target", num_hidden_layers=8))
    for name in ("deepspec_dspark", "speculators_eagle3"):
        LAYOUTS[name](Sizes(target)).write(place / name)
    import_folder(place / "deepspec_dspark", place / "checkpoint", target)
    return place


@pytest.fixture
def written(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(drafter: Any, **sections: Any) -> Path:
        return write_run_file(tmp_path / "mine.yaml", home / "target", drafter=drafter, **({"train": TRAIN} | sections))

    return write


@pytest.mark.parametrize("name", ["speculators_eagle3", "checkpoint"])
def test_training_starts_from_a_trained_drafter(name: str, home: Path, written: Any) -> None:
    """Catches weights that begin at random, or are begun again: after one step of no size they are those of the
    folder."""
    report = run(written({"from": str(home / name)}, evaluate=None))
    assert report is None
    target = load_target(str(home / "target"))
    before, after = (weights_of(draft_model(place, target)) for place in (home / name, Path("runs/mine/checkpoint")))
    moved = {key: (after[key].double() - before[key].double()).abs().max().item() for key in before}
    assert before.keys() == after.keys() and max(moved.values()) < 1e-5, moved
    training = checkpoint.manifest_of("runs/mine/checkpoint")["training"]
    assert training["from"] == str(home / name) and training["ngram_hashes"][0] is None
    config = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert config["drafter"]["from"] == str(home / name)
    again, _ = load(Path("runs/mine/config.yaml"))  # the resolved file is a run file
    assert again.drafter == load(Path("mine.yaml"))[0].drafter


def test_a_run_measures_a_trained_drafter(home: Path, written: Any) -> None:
    """Catches `drafter: FOLDER` that is taken for a kind."""
    settings, _ = load(written(str(home / "deepspec_dspark"), train=None, prepare=None))
    measured = of_run(settings)
    assert measured.drafters == ("ngram", str(home / "deepspec_dspark"))
    found = load_all(measured.drafters, load_target(str(home / "target")), {}, Reporter())
    assert list(found.drafters) == ["ngram", "dspark"] and found.own == "dspark"


def test_settings_that_contradict_are_refused(home: Path, written: Any) -> None:
    """Catches a setting that is ignored, or that gives the weights another meaning."""
    name = "deepspec_dspark"
    for more, reason in (
        ({"kind": "dflash"}, "drafter.kind is dflash, but .* is of kind dspark; leave out drafter.kind"),
        ({"block": 5}, "drafter.block is 5, but .* was trained with 3; leave out drafter.block"),
        ({"taps": [0, 1]}, r"drafter.taps is \[0, 1\], but .* was trained with \[1, 5\]"),
        ({"blok": 3}, "unknown key 'blok'.*did you mean 'block'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load(written({"from": str(home / name), **more}))
    own, origins = load(written({"from": str(home / name), "block": 3, "anchors": 7, "siblings": []}))
    assert (own.drafter["kind"], own.drafter["anchors"], own.drafter["block"]) == ("dspark", 7, 3)
    assert own.drafter_config.taps == (1, 5)
    assert (origins["drafter.heads"], origins["drafter.anchors"]) == ("from", "file")
    with pytest.raises(ConfigError, match="drafter.anchors would have no effect: .*; leave it out, or add a `train:`"):
        load(written({"from": str(home / name), "anchors": 7}, train=None))


def test_a_drafter_of_another_target_or_none_is_refused_before_anything_loads(home, written, tmp_path):
    """Catches hours of preparing answers for a drafter that never fits."""
    with pytest.raises(ConfigError, match="no such folder: runs/none"):
        load(written({"from": "runs/none"}))
    folder = shutil.copytree(home / "deepspec_dspark", tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": 48}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OutriderError, match="hidden_size is 48, .* has 32; load the target it was trained for"):
        load(written({"from": str(folder)}))
