"""A drafter on disk: weights in safetensors, a manifest that binds it to its target, and, while training, what a resume
needs.

    checkpoint/
    ├── outrider.json         kind, config, target it is bound to, taps, how it was trained
    ├── model.safetensors     the draft's own weights; embedding and head where they are the target's are not here
    ├── training.grams        hashes of the texts it was trained on, where they are known; the manifest names it by its
    content └── training.safetensors  optimiser moments and random state; may be deleted once training is done

A checkpoint is written next to the old one, forced to the disk, and then replaces it, so there is always a whole one,
also after a crash or a power cut.
"""

import errno
import functools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
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
from outrider.nn.draft_model import LEARNT, DraftModel, binding
from outrider.nn.shape import FORMER, LayerConfig
from outrider.storage.atomic import replacing, sync
from outrider.storage.trusted import regular
from outrider.targets.protocol import Target
from outrider.targets.quantised import is_of_blocks
from outrider.weights import defaults, mistyped, not_finite, rounded, stale_map, weights_of

VERSION = 1
MANIFEST, WEIGHTS, TRAINING, NGRAM_HASHES, PROVENANCE = (
    "outrider.json",
    "model.safetensors",
    "training.safetensors",
    "training.grams",
    "provenance.json",
)
MEASURED = ("calibration", "report", "held_out")
"""Keys of a manifest about finished weights; further training drops them, export and import copy them."""
SHAPE: Mapping[str, type] = {
    "version": int, "kind": str, "config": dict, "target": dict, "taps": list, "facts": dict, "training": dict,
}  # fmt: skip
"""What a manifest's keys hold."""
OPTIONAL = ("facts", "training")
"""Keys that an older manifest may lack; they are empty then."""


def save(
    folder: str | Path, model: DraftModel, training: Mapping[str, Any] | None = None, state: Mapping[str,
    Tensor] | None = None,
    files: Mapping[str, Path] | None = None, measured: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint whole or not at all.  `training` goes into the manifest, `state` into training.safetensors.

    files: copied into it, by their new names; one that is gone is left out.
    measured: measurements of these weights after their training, by the keys of `MEASURED`.

    Raises TrainingError where the disk is full or the folder can't be written; the old checkpoint stays.
    """
    manifest = manifest_for(model, training, measured)
    with _instead_of(Path(folder)) as part:
        save_file({name: w.detach().contiguous().cpu() for name, w in weights_of(model).items()}, part / WEIGHTS)
        if state:
            save_file({name: value.contiguous().cpu() for name, value in state.items()}, part / TRAINING)
        for name, path in (files or {}).items():
            if path.exists():  # deleted while it trained: hours of training are worth more than knowing on what
                shutil.copyfile(path, part / name)
        manifest["checksums"] = _checksums(part)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2))


def _checksums(folder: Path) -> dict[str, str]:
    """crc32 of what a training goes on from, by the name of the file: it finds what a disk or a copy spoilt."""
    found = {}
    for name in (WEIGHTS, TRAINING):
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                found[name] = f"{functools.reduce(lambda crc, part: zlib.crc32(part, crc), _parts(file), 0):08x}"
    return found


def _parts(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(1 << 22), b"")


def checksum(folder: str | Path) -> str | None:
    """The checksum of a drafter's weights, of a checkpoint or an export of ours, as its manifest has it; None where it
    has none."""
    place = whole(Path(folder)) / MANIFEST
    found = read_object(place) if place.exists() else {}
    value = (found.get("checksums") or {}).get(WEIGHTS)
    return None if value is None else str(value)


def check_files(folder: Path) -> None:
    """Raises CheckpointError where weights or moments are not those that were written; older manifests can't tell."""
    wanted = manifest_of(folder).get("checksums") or {}
    found = _checksums(whole(folder))
    if spoilt := [name for name in found if name in wanted and found[name] != wanted[name]]:
        raise CheckpointError(
            f"{whole(folder) / spoilt[0]} is not what was written: its checksum is {found[spoilt[0]]}, "
            f"{wanted[spoilt[0]]} is wanted; copy it again, or take an earlier checkpoint"
        )


def manifest_for(
    model: DraftModel, training: Mapping[str, Any] | None = None, measured: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The manifest of a draft model, with what `save` gets."""
    config, spec = model.config.model_dump(mode="json"), model.target.spec
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
    """Give these weights and these keys of the manifest other values, whole or not at all; the rest of the files is
    copied.

    Without weights only the manifest is replaced.  Raises TrainingError as `save` does, CheckpointError where there is
    no checkpoint.
    """
    folder, source = Path(folder), whole(folder)
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
    """A checkpoint in a second place, whole or not at all; its files are linked where the disk can, else copied.

    without: files that are left out.  Raises TrainingError as `save` does.
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
    """A folder to write into, which then replaces `folder`; after an error the old one stays."""
    part, old = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")
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
            else:  # a crash came in between, and .old is the last whole one
                discard(folder)
            part.rename(folder)
            sync(folder.parent)
            discard(old)
    except TrainingError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def tidy(folder: Path) -> None:
    """Delete what a crash left beside a checkpoint that is whole: the one before it, and one that was not finished."""
    if (folder / MANIFEST).exists():
        for end in (".old", ".part"):
            discard(folder.with_name(folder.name + end))


def discard(folder: Path) -> None:
    """Delete a folder, its manifest first: the rest after a crash is then not a checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Errors of the disk as TrainingErrors."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        what = "the disk is full" if full else str(error)
        raise TrainingError(
            f"can't write checkpoint {folder}: {what}; the last checkpoint is intact; free some space and run again"
        ) from error


def manifest_of(folder: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.  Raises CheckpointError where there is none, or none that this version
    reads."""
    path = whole(folder) / MANIFEST
    try:
        manifest = read_object(path)
        for key, wanted in SHAPE.items():
            found = manifest.get(key)
            if type(found) is not wanted and not (
                found is None and key in OPTIONAL
            ):  # not isinstance: True is not a version
                raise ValueError(f"its {key} must be of type {wanted.__name__}, got {type(found).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint manifest ({error}); train or copy it again") from None
    if (found := manifest["version"]) != VERSION:
        raise CheckpointError(
            f"{path} has version {found}, but this Outrider reads version {VERSION}; use the release that wrote it"
        )
    return manifest | {key: {} for key in OPTIONAL if manifest.get(key) is None}


def whole(folder: str | Path) -> Path:
    """The folder itself, or the previous one where a crash came while the new one replaced it."""
    folder = Path(folder)
    old = folder.with_name(folder.name + ".old")
    return old if not (folder / MANIFEST).exists() and (old / MANIFEST).exists() else folder


def is_there(folder: str | Path) -> bool:
    """Whether a folder has a checkpoint, or the previous one is still beside it."""
    return (whole(folder) / MANIFEST).exists()


def check_binding(manifest: Mapping[str, Any], target: Target, folder: str | Path, quantised: bool = False) -> None:
    """Refuse a checkpoint made for another target: bound by shape, vocabulary and weights, not by name.

    quantised: these weights, and those that they were quantised from or to, are one target.  A GGUF file does not say
    from which it was: one of another precision is taken for the same model.
    """
    mine, theirs, spec = binding(target), manifest["target"], target.spec
    free = set()
    if None in (mine["tokenizer_hash"], theirs.get("tokenizer_hash")):  # one that is not there can't disagree
        free.add("tokenizer_hash")
    if "" in (mine["weights_hash"], theirs.get("weights_hash")):  # trained while a server had the weights
        free.add("weights_hash")
    if quantised and (theirs.get("base_hash") or theirs.get("weights_hash")) == (spec.base_hash or spec.weights_hash):
        free.add("weights_hash")
    if quantised and _differ_in_blocks(trained_on(manifest, target), spec.precision):
        free.add("weights_hash")
    if wrong := [key for key in mine if key not in free and theirs.get(key) != mine[key]]:
        differences = ", ".join(f"{key} was {theirs.get(key)}, is {mine[key]}" for key in wrong)
        came_so = " (it came quantised, from unknown weights; quantise those weights here to use their drafters)"
        remedy = "load the target it was trained for, or train a drafter for this one"
        remedy += came_so * (spec.quantised is not None and not spec.base_hash)
        own = f"target {theirs.get('name')!r}, not for {spec.name!r}"
        raise CheckpointError(f"{folder} was trained for {own}: {differences}; {remedy}")


def _differ_in_blocks(trained: str | None, served: str) -> bool:
    """Whether one of two precisions is of a GGUF file, and the other is another."""
    return trained is not None and trained != served and (is_of_blocks(trained) or is_of_blocks(served))


def trained_on(manifest: Mapping[str, Any], target: Target) -> str | None:
    """The precision of the target that a checkpoint was trained with, such as float32 or int8; None where it is not
    known.

    Older manifests do not name it: `unquantised weights` where the hashes show that.
    """
    precision: str | None = manifest["target"].get("precision")
    is_base = target.spec.quantised and manifest["target"].get("weights_hash") == target.spec.base_hash
    return precision or ("unquantised weights" if is_base else None)


def check_taps(manifest: Mapping[str, Any], model: DraftModel, folder: str | Path) -> None:
    """Refuse a checkpoint that was trained on other layers than its config gives now."""
    if (taps := manifest["taps"]) != list(model.taps):
        raise CheckpointError(
            f"{folder} was trained on taps {taps}, but its config gives {list(model.taps)}; set drafter.taps to "
            "those of training"
        )


def check_facts(manifest: Mapping[str, Any], model: DraftModel, folder: str | Path) -> None:
    """Refuse weights that the manifest describes otherwise, such as another vocabulary's."""
    facts = manifest["facts"]
    for key, own in model.facts().items():
        if facts.get(key) != own:
            wrong = f"{key} is {facts.get(key)} in the manifest and {own} in the weights"
            raise CheckpointError(
                f"{folder} has the manifest of one drafter and the weights of another: {wrong}; copy or train it again"
            )


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Fill a model.  Raises CheckpointError for missing, extra or misshapen weights, and for numbers that it can't
    hold.

    What a module lists as its `defaults` may be missing, and stays as it is.
    """
    path = whole(folder) / WEIGHTS
    try:
        weights = load_file(regular(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; copy or train it again") from None
    expected = weights_of(model)
    weights = {name: expected[name] for name in defaults(model)} | weights
    for problem, names in _problems(weights, expected):
        if names:
            raise CheckpointError(f"{path} {problem} weights: {', '.join(sorted(names)[:4])}; copy or train it again")
    model.load_state_dict(weights, strict=False)  # without the other names of tied ones


def _problems(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[tuple[str, Collection[str]]]:
    """What may be wrong with weights, and of which it is true; each is asked where those before it are fine."""
    yield "lacks", expected.keys() - weights.keys()
    yield "has unknown", weights.keys() - expected.keys()
    yield "has wrongly shaped", [name for name in expected if expected[name].shape != weights[name].shape]
    yield "has 8-bit", rounded(weights)
    yield "has wrongly typed", mistyped(weights, expected)
    yield "has non-finite", not_finite({name: weight.to(expected[name].dtype) for name, weight in weights.items()})


def has_state(folder: str | Path) -> bool:
    """Whether a checkpoint has what a resume needs besides the weights."""
    return (whole(folder) / TRAINING).exists()


def load_state(folder: str | Path) -> dict[str, Tensor] | None:
    """What a resume needs, or None where the checkpoint holds weights only."""
    path = whole(folder) / TRAINING
    try:
        return load_file(regular(path)) if path.exists() else None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} can't be read: {error}; delete it to start training again from these weights"
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
    check_shapes(folder, settings, lambda: module.Model(settings, target))
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


def check_shapes(folder: str | Path, settings: Any, build: Callable[[], nn.Module]) -> None:
    """Refuse a manifest whose model is not the one of the weights, by the head of their file, before memory is taken
    for either.  A method whose model can't be built without memory is left to `load_weights`."""
    path = whole(folder) / WEIGHTS
    try:
        with safe_open(regular(path), framework="pt") as file:
            stored = {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; copy or train it again") from None
    layers = getattr(settings, "layers", 0)
    if isinstance(layers, int) and layers > max(1, len(stored)):
        raise CheckpointError(f"{path} has {len(stored)} weights, and the manifest {layers} layers; copy it again")
    try:
        with torch.device("meta"):
            expected = weights_of(build())
    except Exception:  # of a method, which may compute with what it makes
        return
    if wrong := [name for name in expected.keys() & stored.keys() if expected[name].shape != stored[name].shape]:
        raise CheckpointError(
            f"{path} has wrongly shaped weights: {', '.join(sorted(wrong)[:4])}; copy or train it again"
        )


def config_of(manifest: Mapping[str, Any], folder: str | Path, target: Target) -> dict[str, Any]:
    """The drafter's settings as its weights mean them.  Older manifests leave open what newer ones name.

    Sizes that they lack are those of before sizes came from the target; a mask that they do not name is the vector that
    the weights have, or else the tokenizer's token.
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
