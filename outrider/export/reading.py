"""Import a draft model from another program's format.  Every weight must be accounted for; nothing is executed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoint import MEASURED, save
from outrider.config import build
from outrider.drafters import find as find_drafter
from outrider.errors import ExportError, first_line
from outrider.export.formats import borrowed, borrowed_kind, identify, layout_of, renamed
from outrider.export.manifest import read_manifest
from outrider.formats import folder as folders
from outrider.formats.keys import MANIFEST
from outrider.formats.layout import Config, Layout
from outrider.nn.draft_model import DraftModel, binding
from outrider.targets.hf.transformers import TransformersTarget
from outrider.weights import described as described_weights
from outrider.weights import is_larger, mistyped, not_finite, stale_map, weights_of

STALE = "*rotary_emb*"
"""Keys in other formats that contain no trained weights."""
BEGINNINGS = (
    "accuracies", "confidence_head.temperatures", "confidence_head.shifts", "candidate_selector.share",
)  # fmt: skip
"""Our weights that have a usable initial value, so that a folder may lack them.  All others start out random."""


def import_folder(
    folder: str | Path, out: str | Path, target: TransformersTarget, format: str | None = None, kind: str | None = None
) -> DraftModel:
    """Convert a draft model in another format to a checkpoint; `format` and `kind` are detected unless given.

    Raises ExportError, and writes nothing, if the folder is not a draft, is damaged, or was made for another target.
    """
    if Path(out).exists():
        raise ExportError(f"{out} exists already; name a new folder, or delete it first")
    model = imported(Path(folder), target, format, kind)
    facts, measured = described(Path(folder), format)
    save(out, model, facts, measured=measured)
    return model


def described(folder: Path, format: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts about the training of an imported folder and measurements of its weights, from its manifest."""
    manifest = read_manifest(folder)
    facts = {
        "imported_from": str(folder),
        "format": manifest.get("format", format),
        **dict(manifest.get("training", {})),
    }
    return facts, {key: manifest[key] for key in MEASURED if key in manifest}


def imported(
    folder: Path, target: TransformersTarget, format: str | None = None, kind: str | None = None
) -> DraftModel:
    """The draft model of a folder in another format, frozen."""
    manifest = read_manifest(folder)
    format, kind = identify(folder, format, kind)
    layout, module = layout_of(format, kind, writes=False), find_drafter(kind)
    _check_target(folder, manifest, target)
    try:
        weights = layout.reads(folder)
    # according to its own keys
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"can't be read as {kind}: {(first_line(error) or type(error).__name__)[:300]}"
        raise ExportError(f"{folder} {what}; copy the folder again") from error
    settings = settings_of(folder, target, format, kind)
    with _readable(folder, format, kind):
        config = build(module.Config, settings, f"{folder} as {format}")
        _check_sizes(config, weights, target)
        expected = described_weights(lambda: module.Model(config, target))
        if expected is not None and is_larger(expected, weights):
            raise ExportError("its config describes a model larger than its weights; copy the folder again")
        model: DraftModel = module.Model(config, target)
        weights = dict(layout.translates(weights))
    fill(model, weights, layout, folder, target, manifest.get("unmapped", {}).keys())
    _fill_unmapped(model, manifest, layout, folder)
    model.to(target.device, getattr(torch, target.spec.dtype)).eval().requires_grad_(False)
    if lost := not_finite(weights_of(model)):
        raise ExportError(
            f"{folder} has values in {', '.join(lost[:4])} that {target.spec.dtype} can't hold; load the target in "
            "float32"
        )
    return model


def settings_of(folder: Path, target: Any, format: str, kind: str) -> dict[str, Any]:
    """A folder's drafter settings converted to ours, including `kind`; reads no weights.  target: may be a sketch."""
    manifest, config, layout = read_manifest(folder), folders.read_config(folder), layout_of(format, kind, writes=False)
    assert layout.settings is not None
    # our manifest gives the settings that the format has no key for; the format's own keys take precedence
    ours = manifest.get("config", {}) if manifest.get("kind") == kind else {}
    with _readable(folder, format, kind):
        inferred = layout.inferred(config, folders.read_names(folder))
        return {"kind": kind, **layout.assumed, **ours, **inferred, **layout.settings(config, target)}


@contextmanager
def _readable(folder: Path, format: str, kind: str) -> Iterator[None]:
    """Turn any error into an ExportError: a config can contain anything, and any reader or constructor may fail on
    it."""
    try:
        yield
    except ExportError as error:
        raise ExportError(f"can't read {folder} as {format}: {error}") from None
    except Exception as error:
        message = (first_line(error) or type(error).__name__)[:300]
        raise ExportError(
            f"{folder} can't be read as {kind}: {message}; name its kind with --kind, or use another folder"
        ) from error


def _check_sizes(settings: Any, weights: Mapping[str, Tensor], target: TransformersTarget) -> None:
    """Refuse a config that describes a far larger model than its files contain, before allocating memory for it."""
    held = sum(weight.numel() for weight in weights.values())
    settings_read = (settings.model_dump(), getattr(settings, "architecture", None) or {})
    size = {key: value for place in settings_read for key, value in place.items() if type(value) is int}
    hidden = size.get("hidden_size", target.spec.hidden)
    layers = size.get("layers", size.get("num_hidden_layers", 1))
    widths = [
        size.get(key, 1) for key in ("intermediate", "intermediate_size", "rank", "gru", "vocabulary", "vocab_size")
    ]
    widths.append(size.get("heads", size.get("num_attention_heads", 1)) * size.get("head_dim", 1))
    if max(layers * hidden, max(widths), layers * size.get("intermediate", 1) * hidden, hidden * widths[1]) > held:
        raise ExportError(
            f"config.json describes a model larger than its weights, which have {held:,} numbers; copy the folder again"
        )
    for key in ("block", "length"):
        if size.get(key, 0) > target.spec.context:
            raise ExportError(
                f"it drafts {size[key]} tokens per step, more than the context of {target.spec.name}, "
                f"{target.spec.context}; load a target with a longer context"
            )


def _check_target(folder: Path, manifest: Config, target: TransformersTarget) -> None:
    mine, theirs = binding(target), manifest.get("target", {})
    wrong = [key for key in mine if theirs.get(key) is not None and mine[key] is not None and theirs[key] != mine[key]]
    if wrong:
        differences = ", ".join(f"{key} was {theirs[key]}, is {mine[key]}" for key in wrong)
        raise ExportError(
            f"{folder} was made for target {theirs.get('name')!r}, not for {target.spec.name!r}: {differences}; "
            "load that target"
        )


def fill(
    model: DraftModel, weights: Mapping[str, Tensor], layout: Layout, folder: Path, target: TransformersTarget,
    unmapped: Collection[str],
) -> None:  # fmt: skip
    """Copy their weights into our model.  Raises ExportError unless every key on both sides is matched.

    unmapped: our names whose values come from elsewhere.
    """
    expected = weights_of(model)
    names = renamed(expected, layout.names)
    if missing := [theirs for theirs in names.values() if theirs not in weights]:
        raise ExportError(
            f"{folder} lacks the weights {', '.join(missing[:4])}; copy it again, or name its format with --format"
        )
    if random := sorted(expected.keys() - names.keys() - set(unmapped) - set(BEGINNINGS)):
        raise ExportError(
            f"{folder} has no values for {', '.join(random[:4])}, which would stay random; export it again"
        )
    for name in sorted(weights.keys() - set(names.values())):
        _account_for(name, weights[name], folder, target)
    theirs = {ours: weights[name] for ours, name in names.items()}
    shapes = [
        f"{names[ours]} {tuple(weight.shape)}, wanted {tuple(expected[ours].shape)}"
        for ours, weight in theirs.items() if weight.shape != expected[ours].shape
    ]  # fmt: skip
    if shapes:
        raise ExportError(f"{folder} does not fit its config: {', '.join(shapes[:3])}; copy the folder again")
    if types := [f"{names[ours]} is {theirs[ours].dtype}".replace("torch.", "") for ours in mistyped(theirs, expected)]:
        raise ExportError(f"{folder} has weights of the wrong dtype: {', '.join(types[:3])}; copy the folder again")
    model.load_state_dict({ours: weight.to(expected[ours].dtype) for ours, weight in theirs.items()}, strict=False)
    if problem := stale_map(model):
        raise ExportError(f"{folder}: {problem}")


def _account_for(name: str, weight: Tensor, folder: Path, target: TransformersTarget) -> None:
    """Check a weight that our model does not have: it must be a copy of the target's own, or a buffer.  Raises
    ExportError otherwise."""
    if fnmatch(name, STALE):
        return
    kind = borrowed_kind(name)
    if kind is None:
        shown = ascii(name)[1:-1]  # a name may contain terminal escape sequences
        raise ExportError(
            f"{folder} has {shown} {tuple(weight.shape)}, a weight that this kind of drafter does not have; name the "
            "right kind with --kind"
        )
    theirs = borrowed(target, name)
    if weight.shape != theirs.shape:
        raise ExportError(
            f"{folder}: {name} has shape {tuple(weight.shape)}, the target's has {tuple(theirs.shape)}; "
            "load the target it was trained for"
        )
    in_8_bits = name in folders.rounded_heads(folder) and _is_within_a_step(weight, theirs)
    if not in_8_bits and not _is_copy(weight, theirs, rounded=target.spec.quantised is not None):
        raise ExportError(
            f"{folder} has its own {kind} in {name}, but Outrider uses the target's; use a draft that shares the "
            f"target's {kind}"
        )


def _is_within_a_step(weight: Tensor, theirs: Tensor) -> bool:
    """Whether every value differs by at most one 8-bit step, which is 1/127 of the largest value in its row."""
    step = theirs.float().abs().amax(-1, keepdim=True) / 127
    return bool(((weight.float() - theirs.float()).abs() <= step).all())


def _is_copy(weight: Tensor, theirs: Tensor, rounded: bool) -> bool:
    """Whether the two are equal after rounding to the coarser of their types.  rounded: whether the loaded target has
    8-bit weights."""
    if not weight.is_floating_point():
        return False
    if rounded:  # an 8-bit matrix only approximates the one that was copied
        return torch.allclose(weight.float(), theirs.float(), rtol=1e-2, atol=1e-2)
    if {weight.dtype, theirs.dtype} == {torch.float16, torch.bfloat16}:  # both were rounded from a finer original
        return torch.allclose(weight.float(), theirs.float(), rtol=torch.finfo(torch.bfloat16).eps, atol=2**-24)
    coarser = max(weight.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(weight.to(coarser), theirs.to(coarser))


def _fill_unmapped(model: DraftModel, manifest: Config, layout: Layout, folder: Path) -> None:
    """Set small weights that the format has no key for, such as a confidence head's temperatures; leave the others
    unchanged."""
    current, stored = model.state_dict(), manifest.get("unmapped", {})
    try:
        restored = {name: torch.tensor(value, dtype=current[name].dtype) for name, value in stored.items()}
        fits = all(value.shape == current[name].shape for name, value in restored.items()) and not renamed(
            restored, layout.names
        )
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise ExportError(
            f"{folder / MANIFEST} has weights that this draft does not have; delete that file and import again"
        )
    model.load_state_dict(restored, strict=False)
