"""A drafter on disk: weights in safetensors, a manifest that binds it to its target, and, during training, the state
for resuming.

    checkpoint/
    ├── outrider.json         kind, config, target, taps, how it was trained
    ├── model.safetensors     the draft model's weights, without an embedding or head shared with the target
    ├── training.grams        hashes of the training texts, if known; the manifest has its checksum
    └── training.safetensors  optimiser moments and random state; may be deleted after training

A checkpoint is written next to the old one, synced to disk, and then replaces it, so a complete one exists at any
time, even after a crash or a power cut.
"""

import errno
import functools
import json
import os
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.config import build, read_object
from outrider.drafters import find
from outrider.errors import CheckpointError, TrainingError
from outrider.nn.draft_model import DraftModel, binding
from outrider.nn.masks import LEARNT
from outrider.nn.shape import FORMER, LayerConfig
from outrider.storage.atomic import replacing, sync
from outrider.storage.trusted import regular
from outrider.targets.protocol import Target
from outrider.targets.quantised import is_of_blocks
from outrider.weights import check_shapes, defaults, not_finite, problems, stale_map, weights_of

VERSION = 1
MANIFEST, WEIGHTS, TRAINING = "outrider.json", "model.safetensors", "training.safetensors"
NGRAM_HASHES, PROVENANCE = "training.grams", "provenance.json"
MEASURED = ("calibration", "report", "held_out")
"""Manifest keys about finished weights; further training drops them, export and import copy them."""
SHAPE: Mapping[str, type] = {
    "version": int, "kind": str, "config": dict, "target": dict, "taps": list, "facts": dict, "training": dict,
}  # fmt: skip
"""Types of the manifest's keys."""
OPTIONAL = ("facts", "training")
"""Keys that older manifests may lack; they are then empty."""


def save(
    folder: str | Path, model: DraftModel, training: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None, files: Mapping[str, Path] | None = None,
    measured: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint atomically.  `training` goes into the manifest, `state` into training.safetensors.

    files: copied into it under their keys; missing files are skipped.
    measured: measurements of these weights after training, by the keys of `MEASURED`.

    Raises TrainingError if the disk is full or the folder can't be written; the old checkpoint is kept.
    """
    manifest = manifest_for(model, training, measured)
    with _instead_of(Path(folder)) as part:
        save_file({name: w.detach().contiguous().cpu() for name, w in weights_of(model).items()}, part / WEIGHTS)
        if state:
            save_file({name: value.contiguous().cpu() for name, value in state.items()}, part / TRAINING)
        for name, path in (files or {}).items():
            if path.exists():  # losing hours of training would be worse than not knowing the training texts
                shutil.copyfile(path, part / name)
        manifest["checksums"] = _checksums(part)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2))


def _checksums(folder: Path) -> dict[str, str]:
    """crc32 of weights and training state, by file name, to detect corruption."""
    checksums = {}
    for name in (WEIGHTS, TRAINING):
        if (folder / name).exists():
            with regular(folder / name).open("rb") as file:
                checksums[name] = f"{functools.reduce(lambda crc, part: zlib.crc32(part, crc), _parts(file), 0):08x}"
    return checksums


def _parts(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(1 << 22), b"")


def checksum(folder: str | Path) -> str | None:
    """The checksum of a drafter's weights in the manifest of its checkpoint or export; None if it has none."""
    path = whole(Path(folder)) / MANIFEST
    manifest = read_object(path) if path.exists() else {}
    value = (manifest.get("checksums") or {}).get(WEIGHTS)
    return None if value is None else str(value)


def check_files(folder: Path) -> None:
    """Raises CheckpointError if weights or moments are corrupt; older manifests have no checksums."""
    expected = manifest_of(folder).get("checksums") or {}
    try:
        actual = _checksums(whole(folder))
    except OSError as error:
        raise CheckpointError(f"{whole(folder)} can't be read: {error}; copy it again") from None
    if corrupt := [name for name in actual if name in expected and actual[name] != expected[name]]:
        raise CheckpointError(
            f"{whole(folder) / corrupt[0]} is corrupt: its checksum is {actual[corrupt[0]]}, "
            f"expected {expected[corrupt[0]]}; copy it again, or use an earlier checkpoint"
        )


def manifest_for(
    model: DraftModel, training: Mapping[str, Any] | None = None, measured: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The manifest of a draft model; arguments as in `save`."""
    config = model.config.model_dump(mode="json")
    spec = model.target.spec
    return {
        "version": VERSION,
        "kind": config.pop("kind"),
        "config": config,
        "target": {key: getattr(spec, key) for key in ("name", "revision", "precision", "base_hash")}
        | binding(model.target),
        "taps": list(model.taps),
        "tap_convention": "output of decoder layer i, counted from 0",
        "facts": dict(model.facts()),
        "training": dict(training or {}),
        **(measured or {}),
    }


def amend(folder: str | Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Replace these weights and manifest keys atomically; other files are copied.

    Without weights only the manifest is replaced.  Raises TrainingError like `save`, and CheckpointError if there is no
    checkpoint.
    """
    folder = Path(folder)
    source = whole(folder)
    manifest = manifest_of(folder) | dict(facts)
    if not weights:
        with _disk_errors(folder), replacing(source / MANIFEST) as part:
            part.write_text(json.dumps(manifest, indent=2))
        return
    stored = load_file(regular(source / WEIGHTS))
    with _instead_of(folder) as part:
        shutil.copytree(source, part, dirs_exist_ok=True)
        save_file(stored | {name: w.detach().contiguous().cpu() for name, w in weights.items()}, part / WEIGHTS)
        manifest["checksums"] = _checksums(part)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2))


def copy(source: Path, folder: Path, without: Collection[str] = ()) -> None:
    """Copy a checkpoint atomically, with hard links if the disk supports them.

    without: files to skip.  Raises TrainingError like `save`.
    """
    with _instead_of(folder) as part:
        for path in whole(source).iterdir():
            if path.name in without:
                continue
            try:
                os.link(path, part / path.name)
            except OSError:
                shutil.copyfile(path, part / path.name)


@contextmanager
def _instead_of(folder: Path) -> Iterator[Path]:
    """A new folder that replaces `folder` on exit; after an error the old one is kept."""
    part = folder.with_name(folder.name + ".part")
    old = folder.with_name(folder.name + ".old")
    try:
        with _disk_errors(folder):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            yield part
            for path in (*part.rglob("*"), part):
                sync(path)
            if (folder / MANIFEST).exists():
                discard(old)
                folder.rename(old)
            else:  # after a crash in between, .old is the last complete checkpoint
                discard(folder)
            part.rename(folder)
            sync(folder.parent)
            discard(old)
    except TrainingError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def tidy(folder: Path) -> None:
    """Delete what a crash left next to a complete checkpoint: the previous one, and an unfinished one."""
    if (folder / MANIFEST).exists():
        for end in (".old", ".part"):
            discard(folder.with_name(folder.name + end))


def discard(folder: Path) -> None:
    """Delete a folder, the manifest first, so that a crash does not leave a partial checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn disk errors into TrainingErrors."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        is_full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        what = "the disk is full" if is_full else str(error)
        raise TrainingError(
            f"can't write checkpoint {folder}: {what}; the last checkpoint is intact; free some space and run again"
        ) from error


def manifest_of(folder: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.  Raises CheckpointError if it is missing or this version can't read it."""
    path = whole(folder) / MANIFEST
    try:
        manifest = read_object(path)
        for key, kind in SHAPE.items():
            value = manifest.get(key)
            # not isinstance: True is not a version
            if type(value) is not kind and not (value is None and key in OPTIONAL):
                raise ValueError(f"its {key} must be of type {kind.__name__}, got {type(value).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint manifest ({error}); train or copy it again") from None
    if (version := manifest["version"]) != VERSION:
        raise CheckpointError(
            f"{path} has version {version}, but this Outrider reads version {VERSION}; use the release that wrote it"
        )
    return manifest | {key: {} for key in OPTIONAL if manifest.get(key) is None}


def whole(folder: str | Path) -> Path:
    """The folder itself, or the previous checkpoint after a crash during replacement."""
    folder = Path(folder)
    old = folder.with_name(folder.name + ".old")
    return old if not (folder / MANIFEST).exists() and (old / MANIFEST).exists() else folder


def is_there(folder: str | Path) -> bool:
    """Whether there is a checkpoint, or the previous one after a crash."""
    return (whole(folder) / MANIFEST).exists()


def check_binding(manifest: Mapping[str, Any], target: Target, folder: str | Path, quantised: bool = False) -> None:
    """Refuse a checkpoint made for another target: bound by shape, vocabulary and weights, not by name.

    quantised: weights and their quantised versions count as the same target.  A GGUF file does not name its source, so
    one of another precision is assumed to be the same model.
    """
    actual, trained, spec = binding(target), manifest["target"], target.spec
    ignored = set()
    if None in (actual["tokenizer_hash"], trained.get("tokenizer_hash")):
        ignored.add("tokenizer_hash")
    if "" in (actual["weights_hash"], trained.get("weights_hash")):  # trained with the weights on a server
        ignored.add("weights_hash")
    if quantised and (trained.get("base_hash") or trained.get("weights_hash")) == (spec.base_hash or spec.weights_hash):
        ignored.add("weights_hash")
    if quantised and _differ_in_blocks(trained_on(manifest, target), spec.precision):
        ignored.add("weights_hash")
    if wrong := [key for key in actual if key not in ignored and trained.get(key) != actual[key]]:
        differences = ", ".join(f"{key} was {trained.get(key)}, is {actual[key]}" for key in wrong)
        remedy = "load the target it was trained for, or train a drafter for this one"
        if spec.quantised is not None and not spec.base_hash:
            remedy += (
                " (it was already quantised, from unknown weights; quantise those weights here to use their drafters)"
            )
        raise CheckpointError(
            f"{folder} was trained for target {trained.get('name')!r}, not for {spec.name!r}: {differences}; {remedy}"
        )


def _differ_in_blocks(trained: str | None, served: str) -> bool:
    """Whether two precisions differ and one of them is that of a GGUF file."""
    return trained is not None and trained != served and (is_of_blocks(trained) or is_of_blocks(served))


def trained_on(manifest: Mapping[str, Any], target: Target) -> str | None:
    """The target's precision in training, such as float32 or int8; None if unknown.

    Older manifests do not record it; then `unquantised weights` if the hashes show that.
    """
    precision: str | None = manifest["target"].get("precision")
    is_base = target.spec.quantised and manifest["target"].get("weights_hash") == target.spec.base_hash
    return precision or ("unquantised weights" if is_base else None)


def check_taps(manifest: Mapping[str, Any], model: DraftModel, folder: str | Path) -> None:
    """Refuse a checkpoint whose taps differ from those of its config."""
    if (taps := manifest["taps"]) != list(model.taps):
        raise CheckpointError(
            f"{folder} was trained on taps {taps}, but its config gives {list(model.taps)}; set drafter.taps to "
            "those of training"
        )


def check_facts(manifest: Mapping[str, Any], model: DraftModel, folder: str | Path) -> None:
    """Refuse weights that differ from the manifest's facts, such as another vocabulary's."""
    facts = manifest["facts"]
    for key, value in model.facts().items():
        if facts.get(key) != value:
            wrong = f"{key} is {facts.get(key)} in the manifest and {value} in the weights"
            raise CheckpointError(
                f"{folder} has the manifest of one drafter and the weights of another: {wrong}; copy or train it again"
            )


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Load weights into a model.  Raises CheckpointError for missing, extra or misshapen weights, and for values that
    it can't hold.

    Buffers in a module's `defaults` may be missing, and keep their values.
    """
    path = whole(folder) / WEIGHTS
    try:
        weights = load_file(regular(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; copy or train it again") from None
    expected = weights_of(model)
    weights = {name: expected[name] for name in defaults(model)} | weights
    for problem, names in problems(weights, expected):
        if names:
            raise CheckpointError(f"{path} {problem} weights: {', '.join(sorted(names)[:4])}; copy or train it again")
    model.load_state_dict(weights, strict=False)  # tied weights have one name only


def has_state(folder: str | Path) -> bool:
    """Whether a checkpoint has the state for resuming."""
    return (whole(folder) / TRAINING).exists()


def load_state(folder: str | Path) -> dict[str, Tensor] | None:
    """The state for resuming, or None if the checkpoint has only weights."""
    path = whole(folder) / TRAINING
    try:
        return load_file(regular(path)) if path.exists() else None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} can't be read: {error}; delete it to restart training from these weights"
        ) from None


def load_model(folder: str | Path, target: Target) -> DraftModel:
    """The draft model of a checkpoint, frozen, on the target's device and in its precision.

    Raises CheckpointError for a checkpoint that is damaged or was made for another target.
    """
    manifest = manifest_of(folder)
    check_binding(manifest, target, folder, quantised=True)
    module = find(manifest["kind"])
    if not hasattr(module, "Model"):
        raise CheckpointError(
            f"{folder} is of kind {manifest['kind']!r}, which has no weights to load; name the kind instead of the "
            "folder"
        )
    settings = build(module.Config, {"kind": manifest["kind"], **config_of(manifest, folder, target)}, "drafter")
    check_shapes(whole(folder) / WEIGHTS, settings, lambda: module.Model(settings, target))
    model: DraftModel = module.Model(settings, target)
    check_taps(manifest, model, folder)
    load_weights(folder, model)
    check_facts(manifest, model, folder)
    if (problem := stale_map(model)) is not None:
        raise CheckpointError(f"{folder}: {problem}; copy or train it again")
    model.to(target.device, getattr(torch, target.spec.dtype)).eval().requires_grad_(False)
    if lost := not_finite(weights_of(model)):
        raise CheckpointError(
            f"{folder} has values in {', '.join(lost[:4])} that {target.spec.dtype} can't hold; load the target in "
            "float32"
        )
    return model


def config_of(manifest: Mapping[str, Any], folder: str | Path, target: Target) -> dict[str, Any]:
    """The drafter's settings, completed for older manifests.

    Missing sizes have the defaults from before sizes came from the target; a missing mask token is learnt if the
    weights have one, otherwise the tokenizer's.
    """
    schema = find(manifest["kind"]).Config
    config = {**(FORMER if issubclass(schema, LayerConfig) else {}), **manifest["config"]}
    if "mask_token" in schema.model_fields and config.get("mask_token") is None:
        config["mask_token"] = LEARNT if _has_own_mask(whole(folder) / WEIGHTS) else target.mask_token
    return config


def _has_own_mask(path: Path) -> bool:
    try:
        with safe_open(regular(path), framework="pt") as file:
            return any(name.split(".")[-1] == "mask" for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; copy or train it again") from None
