"""Save then load changes nothing; whatever is damaged or made for another target is refused; there is always a whole
one."""

import errno
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_folder

from outrider import checkpoint, drafters, generate, load_drafter
from outrider.config import build
from outrider.errors import CheckpointError, ConfigError, DrafterError, OutriderError, TrainingError
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.weights import weights_of
from training.bench import make_model


@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_a_saved_model_drafts_as_before(kind, talker, tmp_path) -> None:
    """Catches a weight that is not saved, or a setting that comes back as its default."""
    model = make_model(talker, kind, rope_theta=500.0)
    checkpoint.save(tmp_path / "c", model)
    loaded: Any = load_drafter(tmp_path / "c", talker)
    assert loaded.model.config == model.config
    mine, theirs = model.double().state_dict(), loaded.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    texts = [
        generate(talker, [[1, 2, 3, 4, 5], [7]], drafter, max_new_tokens=8, sampling=Sampling(1.0, seed=1))
        for drafter in (loaded, model.eval().drafter())
    ]
    assert [(one.tokens, one.accepted) for one in texts[0]] == [(one.tokens, one.accepted) for one in texts[1]]


def test_a_checkpoint_holds_no_weight_of_the_target(talker, tmp_path, monkeypatch) -> None:
    """Catches embedding or head saved with every drafter, and a target whose commit is not told."""
    model = make_model(talker)
    checkpoint.save(tmp_path / "c", model)
    saved = load_file(tmp_path / "c" / checkpoint.WEIGHTS)
    own = {f"confidence_head.{name}" for name in model.confidence_head.defaults}
    assert saved.keys() == dict(model.named_parameters()).keys() | own
    assert {path.name for path in (tmp_path / "c").iterdir()} == {checkpoint.MANIFEST, checkpoint.WEIGHTS}
    monkeypatch.setattr(talker, "spec", replace(talker.spec, revision="5f0b02c75b57c5855da9ae460ce51323ea669d8a"))
    checkpoint.save(tmp_path / "c", make_model(talker))
    said = checkpoint.manifest_of(tmp_path / "c")["target"]
    assert {"name", "revision", "precision", "tokenizer_hash", "weights_hash"} <= said.keys()
    assert said["revision"] == talker.spec.revision


@pytest.fixture(scope="module")
def once(talker: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("once") / "c"
    checkpoint.save(place, make_model(talker), {"step": 1})
    return place


@pytest.fixture
def saved(once: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own for each test."""
    return shutil.copytree(once, tmp_path / "c")


class Stop(BaseException):
    """The process ends here."""


STEPS = [
    (Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (Path, "unlink"), (os, "fsync"), (os, "unlink"), (os,
    "rmdir"),
    (os, "replace"), (checkpoint, "save_file"),
]  # fmt: skip


def stopping(monkeypatch: pytest.MonkeyPatch, at: int, error: type[BaseException]) -> list[str]:
    """Every step of a save is noted, and those from step `at` on raise this; counted from 0."""
    taken: list[str] = []

    def stopped(name: str, real: Any) -> Any:
        def step(*given: Any, **more: Any) -> Any:
            if len(taken) == at:
                raise error(errno.EIO, "broken")
            taken.append(name)
            return real(*given, **more)

        return step

    for place, name in STEPS:
        monkeypatch.setattr(place, name, stopped(name, getattr(place, name)))
    return taken


@pytest.mark.parametrize("error", [Stop, OSError])
@pytest.mark.parametrize("how", ["over a whole one", "over remains", "amend", "amend weights"])
def test_a_reader_finds_a_whole_checkpoint_wherever_a_save_was_stopped(how, error, saved, talker) -> None:
    """Catches a step behind which no manifest, or a manifest without its weights, stands where a reader looks."""
    whole = saved.with_name("whole")
    saved.rename(whole)
    new = make_model(talker, seed=2)
    weights = {name: weight.detach() for name, weight in weights_of(new).items()}
    for at in itertools.count():
        for name in ("c", "c.old", "c.part"):
            shutil.rmtree(saved.with_name(name), ignore_errors=True)
        shutil.copytree(whole, saved.with_name("c.old") if how == "over remains" else saved)
        if how == "over remains":
            shutil.copytree(whole, saved, ignore=shutil.ignore_patterns(checkpoint.MANIFEST))
        with pytest.MonkeyPatch.context() as patch, suppress(Stop, TrainingError):
            taken = stopping(patch, at, error)
            if how.startswith("amend"):
                checkpoint.amend(saved, weights if how == "amend weights" else {}, {"training": {"step": 2}})
            else:
                checkpoint.save(saved, new, {"step": 2})
        step = checkpoint.manifest_of(saved)["training"]["step"]
        found = load_file(checkpoint.whole(saved) / checkpoint.WEIGHTS)["backbone.fc.weight"]
        assert torch.equal(found, weights["backbone.fc.weight"].float()) == (step == 2 and how != "amend"), taken
        if len(taken) < at:
            break
    assert at >= 4 and step == 2


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_place(saved, talker, monkeypatch) -> None:
    """Catches a rename that a power cut leaves behind with empty files in the folder."""
    synced: list[int] = []
    missing: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def checked(self: Path, to: Path) -> Path:
        if to == saved:
            missing.extend(path.name for path in (self, *self.iterdir()) if path.stat().st_ino not in synced)
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    monkeypatch.setattr(Path, "rename", checked)
    checkpoint.save(saved, make_model(talker, seed=2), {"step": 2}, {"moment": torch.zeros(2)})
    assert not missing
    assert synced[-1] == saved.parent.stat().st_ino


def test_what_is_half_deleted_is_no_checkpoint(saved, monkeypatch) -> None:
    """Catches a manifest that outlives the weights it speaks of."""

    def crash(folder: Path, **_: Any) -> None:
        (folder / checkpoint.WEIGHTS).unlink()
        raise Stop

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(Stop):
        checkpoint.discard(saved)
    assert not checkpoint.is_there(saved)


def change_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / checkpoint.MANIFEST
        manifest = json.loads(path.read_text())
        changed = change(manifest)
        path.write_text(json.dumps(manifest if changed is None else changed))

    return damage


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / checkpoint.WEIGHTS)
        change(weights)
        save_file(weights, folder / checkpoint.WEIGHTS)

    return damage


class Trap:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("/tmp/outrider-was-tricked-by-a-checkpoint", "w")


def norm(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return change_weights(lambda w: w.update({"backbone.norm.weight": make(w["backbone.norm.weight"])}))


def write(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


MANIFEST, WEIGHTS = checkpoint.MANIFEST, checkpoint.WEIGHTS
NORM, NO_MANIFEST = "backbone.norm.weight", "is not a checkpoint manifest"
DEEP = b'{"a":' + b"[" * 99_999 + b"]" * 99_999 + b"}"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "has neither outrider.json nor config.json"),
    "no JSON": (write(MANIFEST, b'{"version": 1, '), NO_MANIFEST),
    "a list": (change_manifest(lambda m: [m]), NO_MANIFEST),
    "no kind": (change_manifest(lambda m: m.pop("kind") and None), NO_MANIFEST),
    "next version": (change_manifest(lambda m: m.update(version=2)), "version 2, but this Outrider reads version 1"),
    "target is null": (change_manifest(lambda m: m.update(target=None)), "manifest"),
    "target's shape": (change_manifest(lambda m: m["target"].update(hidden=33)), "hidden was 33, is 32"),
    "target's weights": (change_manifest(lambda m: m["target"].update(weights_hash="0")), "weights_hash was 0, is"),
    "no binding": (change_manifest(lambda m: m.update(target={})), "was trained for target None"),
    "other taps": (change_manifest(lambda m: m.update(taps=[2])), "taps"),
    "other block": (change_manifest(lambda m: m["config"].update(layers=2)), "lacks weights"),
    "missing weight": (change_weights(lambda w: w.pop("backbone.fc.weight")), "lacks weights: backbone.fc.weight"),
    "extra weight": (change_weights(lambda w: w.update(lm_head=torch.zeros(2))), "has unknown weights: lm_head"),
    "misshapen weight": (norm(lambda w: torch.zeros(2)), f"has wrongly shaped weights: {NORM}"),
    "NaN weight": (norm(lambda w: w.index_fill(0, torch.tensor([3]), float("nan"))), f"non-finite weights: {NORM}"),
    "truncated weights": (lambda folder: os.truncate(folder / WEIGHTS, 1000), "can't be read"),
    "version is true": (change_manifest(lambda m: m.update(version=True)), "its version must be of type int, got bool"),
    "training is text": (change_manifest(lambda m: m.update(training="x")), "its training must be of type dict"),
    "deep nesting": (write(MANIFEST, DEEP), "nested too deeply"),
    "a key that is in it twice": (write(MANIFEST, b'{"version": 1, "version": 1}'), "'version' is in it twice"),
    "8 bits": (norm(lambda w: w.to(torch.float8_e4m3fn)), f"has 8-bit weights: {NORM}"),
    "whole numbers": (norm(lambda w: w.to(torch.int8)), f"has wrongly typed weights: {NORM}"),
    "numbers beyond 32 bits": (norm(lambda w: w.double().sign() * 1e300), f"has non-finite weights: {NORM}"),
    "a pickle": (write(WEIGHTS, pickle.dumps(Trap())), "can't be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage: str, saved: Path, talker: TransformersTarget) -> None:
    """Catches a traceback, or weights that load and draft nonsense."""
    act, said = DAMAGES[damage]
    act(saved)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(saved, talker)
    assert said in str(caught.value)
    assert saved.name in str(caught.value) or str(saved) in str(caught.value)
    assert not Path("/tmp/outrider-was-tricked-by-a-checkpoint").exists()


OTHER = "manifest of one drafter and the weights of another"
MAPS = {
    "out of range": (lambda w: w["head.d2t"].__setitem__(-1, 10_000), OTHER),
    "twice": (lambda w: w["head.d2t"].__setitem__(1, w["head.d2t"][0] - 1), OTHER),
    "of fractions": (lambda w: w.update({"head.d2t": w["head.d2t"].double()}), "wrongly typed weights: head.d2t"),
    "another t2d": (lambda w: w.update({"head.t2d": ~w["head.t2d"]}), "d2t and t2d name different tokens"),
}


@pytest.mark.parametrize("fault", MAPS)
def test_a_stale_vocabulary_is_refused(fault: str, talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a map from another drafter: every draft would be another token than the head meant."""
    change, said = MAPS[fault]
    module = drafters.find("eagle3")
    layer = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
    model = module.Model(
        build(module.Config, {"kind": "eagle3", "vocabulary": 40, "taps": [0], **layer}, "drafter"), talker
    )
    checkpoint.save(tmp_path / "c", model)
    load_drafter(tmp_path / "c", talker)
    change_weights(change)(tmp_path / "c")
    with pytest.raises(CheckpointError, match=said):
        load_drafter(tmp_path / "c", talker)


def test_values_that_the_targets_type_cannot_hold_are_refused(folder: Path, tmp_path: Path) -> None:
    """Catches infinities that come up after the check, when a model is moved to 16 bits."""
    halves = load_target(folder, dtype="float16")
    checkpoint.save(tmp_path / "c", make_model(halves))
    load_drafter(tmp_path / "c", halves)
    change_weights(lambda w: w["backbone.norm.weight"].fill_(1e6))(tmp_path / "c")
    with pytest.raises(CheckpointError, match="values in backbone.norm.weight that float16 can't hold"):
        load_drafter(tmp_path / "c", halves)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(kind="dsprk"), "did you mean 'dspark'"),
        (lambda m: m.update(kind="ngram"), "unknown key"),
        (lambda m: m["config"].update(blok=3), "did you mean 'block'"),
    ],
)
def test_a_manifest_of_no_known_drafter_is_refused(change, said, saved, talker) -> None:
    """Catches a KeyError for a kind of a later version, or a setting that is dropped."""
    change_manifest(change)(saved)
    with pytest.raises(OutriderError) as caught:
        load_drafter(saved, talker)
    assert said in str(caught.value) or "ngram" in str(caught.value)


def test_the_same_target_under_another_name_and_dtype_is_no_other(saved, tmp_path, talker) -> None:
    """Catches a binding to a path, or to the precision of the weights."""
    moved = load_target(make_folder(tmp_path / "moved"), dtype="float32")
    assert moved.spec.name != talker.spec.name
    assert load_drafter(saved, moved).limit == 3


@pytest.mark.parametrize(
    ("name", "settings", "error", "said"),
    [
        ("ngarm", {}, ConfigError, "neither a checkpoint folder nor a drafter; did you mean 'ngram'?"),
        ("./nowhere", {}, ConfigError, "no such folder"),
        ("ngram", {"lenght": 3}, ConfigError, "drafter: unknown key 'lenght'; did you mean 'length'?"),
        ("dspark", {"block": 0}, ConfigError, "drafter.block"),
        ("dspark", {"taps": (1, 40)}, DrafterError, "taps (1, 40) are out of range"),
        ("dflash", {"taps": (2, 1)}, DrafterError, "in ascending order"),
        ("dflash", {"taps": ()}, OutriderError, "taps"),
        ("dflash", {"heads": 4, "kv_heads": 3}, DrafterError, "not a multiple of kv_heads"),
        ("dspark", {"layers": 2, "init_from_layers": (0,)}, DrafterError,
        "one target layer for each of 2 draft layers"),
        ("dspark", {"layers": 1, "init_from_layers": (4,)}, DrafterError, "each from 0 to 3"),
        ("dspark", {"layers": 1, "init_from_layers": (3,), "head_dim": 16}, DrafterError,
        "give the draft the target's heads"),
        ("small_model", {"model": "/no/such/folder"}, OutriderError, "can't load target '/no/such/folder'"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_said(name, settings, error, said, talker) -> None:
    """Catches a traceback of torch's, or a default taken in silence."""
    with pytest.raises(error) as caught:
        load_drafter(name, talker, **settings)
    assert said in str(caught.value)


def test_a_checkpoint_takes_no_settings(saved: Path, talker: TransformersTarget) -> None:
    """Catches a setting that is given and ignored."""
    with pytest.raises(ConfigError, match="with settings of its own; leave out block, rank"):
        load_drafter(saved, talker, block=2, rank=3)


def test_an_id_that_is_not_to_be_had_is_said(talker: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an exception of the hub's, a long wait, or an id taken for a misspelt kind."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="can't be fetched from the hub"):
        load_drafter("no-such/drafter", talker)
