"""Write a checkpoint in an outside format and read one from it: rename, account for every key, write, read back,
compare.

A format has, for each method that it knows, the names of our weights and the form of the settings: a `Layout`.  What a
format has no key for (how many siblings, how it was calibrated, how it was trained) is written next to it into
`outrider.json`, which engines don't read and `import_folder` does: a manifest like a checkpoint's, and small weights
that have no key elsewhere.

Layer numbers: ours count decoder layers from 0 and mean what comes out of them; a layout's `shift` is what is added
there.
"""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider import export as package
from outrider.atomic import new_folder
from outrider.checkpoint import MEASURED, load_model, manifest_of, save
from outrider.config import build, nearest
from outrider.drafters import find as find_drafter
from outrider.errors import ConfigError, ExportError, first_line
from outrider.export import folder as folders
from outrider.export.layout import Config, Format, Layout, Source, first
from outrider.export.manifest import CONFIG, MANIFEST, at, read_config, read_json, read_manifest
from outrider.nn.draft_model import DraftModel, binding
from outrider.targets.transformers import TransformersTarget
from outrider.weights import mistyped, not_finite, stale_map, weights_of

MACHINERY = ("folder", "formats", "layout", "manifest", "released")
"""Files of this folder that are not formats."""
BORROWED = {"embed_tokens.weight": "embedding", "lm_head.weight": "head", "lm_heads.*.weight": "head"}
"""The target's own matrices, as formats call them."""
STALE = "*rotary_emb*"
"""Keys of theirs that were not trained."""
BEGINNINGS = ("accuracies", "confidence_head.temperatures", "confidence_head.shifts")
"""Weights of ours with a usable initial value: a folder may lack them.  All others are random at first."""


def formats() -> list[str]:
    """The formats there are."""
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name not in MACHINERY)


def find(name: str) -> Format:
    """A format by its name.  Raises ConfigError with the nearest name for an unknown one."""
    if name not in formats():
        raise ConfigError(f"unknown format {name!r}{nearest(name, formats())}; known: {', '.join(formats())}")
    return importlib.import_module(f"{package.__name__}.{name}").FORMAT


def matrix() -> list[dict[str, Any]]:
    """Which kinds can be written and read in which format: [{format, kind, export, import, shift}], by format and kind."""
    return [
        {
            "format": name, "kind": kind, "export": layout.config is not None, "import": layout.settings is not None,
            "shift": layout.shift,
        }
        for name in formats() for kind, layout in sorted(find(name).layouts.items())
    ]  # fmt: skip


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def export(
    checkpoint: str | Path, to: str, out: str | Path, target: TransformersTarget, precision: str | None = None
) -> Path:  # fmt: skip
    """Write a checkpoint in a format, whole or not at all, read it back and compare every weight.  Returns the folder.

    precision: type of number to round to, where the format has a choice; the target's unless given. A layout's note is
    logged as a warning.  Raises ExportError where the format does not know the method or can't say its settings, or
    where `out` is there already; ConfigError for a precision that the format has not.
    """
    about = manifest_of(checkpoint)
    format, layout = find(to), _layout(to, about["kind"], writes=True)
    if precision is not None and precision not in format.precisions:
        choice = f"choose one of {', '.join(format.precisions)}" if format.precisions else "leave the precision out"
        raise ConfigError(f"{to} can't be written in {precision!r}; {choice}")
    source = Source(load_model(checkpoint, target), target, precision)
    if reason := first(layout.refuses, source):
        raise ExportError(f"{checkpoint} can't be written as {to}: {reason}")
    own = {name: weight.detach().cpu() for name, weight in weights_of(source.model).items()}
    names = renamed(own, layout.names)
    weights = {theirs: own[ours] for ours, theirs in names.items()}
    weights |= {name: borrowed(target, name) for name in layout.duplicates(source) if name not in weights}
    unmapped = {name: weight.tolist() for name, weight in own.items() if name not in names}
    assert layout.config is not None
    with new_folder(Path(out), ExportError, (OSError, SafetensorError)) as part:
        format.writes(part, layout.config(source), weights, source)
        layout.files(source, part)
        manifest = {**about, "format": to, "tap_shift": layout.shift, "unmapped": unmapped}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _compare(own, part, to, layout, target)
    if note := first(layout.notes, source):
        logging.getLogger(__name__).warning("%s as %s: %s", out, to, note)
    return Path(out)


def _compare(own: Mapping[str, Tensor], written: Path, to: str, layout: Layout, target: TransformersTarget) -> None:
    """Read what was written and hold it against what was meant.  Raises ExportError for any difference."""
    if layout.settings is not None:
        back, meant = weights_of(imported(written, target, to)), dict(own)
    else:
        format, names = find(to), renamed(own, layout.names)
        found = format.reads(written)
        back = {ours: found[theirs] for ours, theirs in names.items() if theirs in found}
        meant = {ours: own[ours].to(back[ours].dtype) if format.precisions and ours in back else own[ours] for ours in names}
    if wrong := [name for name in meant if name not in back or not torch.equal(back[name].cpu(), meant[name])]:
        raise ExportError(
            f"what was written as {to} reads back with other weights: {', '.join(wrong[:4])}; "
            "the folder was deleted"
        )


def renamed(names: Iterable[str], rules: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Ours to theirs by the first rule that fits; names that no rule fits are left out."""
    found: dict[str, str] = {}
    for name in names:
        for old, new in rules:
            fits = re.fullmatch(re.escape(old).replace(r"\*", "(.*)"), name)
            if fits:
                found[name] = new.replace("*", "".join(fits.groups()))
                break
    return found


def borrowed(target: TransformersTarget, name: str) -> Tensor:
    """The target's embedding or head [V, H], on the CPU."""
    ids = torch.arange(target.spec.vocabulary, device=target.device)
    rows = target.embedding_rows(ids) if _borrowed_kind(name) == "embedding" else target.head_rows(ids)
    return rows.detach().cpu()


def _borrowed_kind(name: str) -> str | None:
    """embedding or head; None for a name that is neither."""
    return next((kind for pattern, kind in BORROWED.items() if fnmatch(name, pattern)), None)


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def import_folder(
    folder: str | Path, out: str | Path, target: TransformersTarget, format: str | None = None, kind: str | None = None
) -> DraftModel:
    """Make a checkpoint of a draft model in an outside format; `format` and `kind` are found by its config unless
    given.

    Raises ExportError for a folder that is not a draft, is damaged, or was made for another target; nothing is then
    written.
    """
    if Path(out).exists():
        raise ExportError(f"{out} exists already; name a new folder, or delete it first")
    model = imported(Path(folder), target, format, kind)
    manifest = read_manifest(Path(folder))
    facts = {"imported_from": str(folder), "format": manifest.get("format", format), **dict(manifest.get("training", {}))}
    save(out, model, facts, measured={key: manifest[key] for key in MEASURED if key in manifest})
    return model


def imported(folder: Path, target: TransformersTarget, format: str | None = None, kind: str | None = None) -> DraftModel:
    """The draft model of such a folder, frozen."""
    manifest = read_manifest(folder)
    format, kind = identify(folder, format or manifest.get("format"), kind)
    layout, module = _layout(format, kind, writes=False), find_drafter(kind)
    _check_target(folder, manifest, target)
    weights = folders.read_weights(folder)
    settings = settings_of(folder, target, format, kind)
    with _readable(folder, format, kind):
        wanted = build(module.Config, settings, f"{folder} as {format}")
        _check_sizes(wanted, weights, target)
        model: DraftModel = module.Model(wanted, target)
        weights = dict(layout.translates(weights))
    fill(model, weights, layout, folder, target, manifest.get("unmapped", {}).keys())
    _fill_unmapped(model, manifest, layout, folder)
    model.to(target.device, getattr(torch, target.spec.dtype)).eval().requires_grad_(False)
    if lost := not_finite(weights_of(model)):
        raise ExportError(f"{folder} has values in {', '.join(lost[:4])} that {target.spec.dtype} can't hold; bring others")
    return model


def settings_of(folder: Path, target: Any, format: str, kind: str) -> dict[str, Any]:
    """A folder's drafter in our settings, `kind` among them; its weights are not read.  target: or a sketch of it."""
    manifest, config, layout = read_manifest(folder), read_json(folder / CONFIG), _layout(format, kind, writes=False)
    assert layout.settings is not None
    # settings that the format has no key for are ours; those that it has replace them
    ours = manifest.get("config", {}) if manifest.get("kind") == kind else {}
    with _readable(folder, format, kind):
        inferred = layout.inferred(config, folders.read_names(folder))
        return {"kind": kind, **layout.assumed, **ours, **inferred, **layout.settings(config, target)}


@contextmanager
def _readable(folder: Path, format: str, kind: str) -> Iterator[None]:
    """Any error as an ExportError: a config may hold anything, and any reader or constructor may fail on it."""
    try:
        yield
    except ExportError as error:
        raise ExportError(f"{folder} as {format}: {error}") from None
    except Exception as error:
        message = (first_line(error) or type(error).__name__)[:300]
        raise ExportError(f"{folder} can't be read as {kind}: {message}; bring another, or import it with --kind") from error


def _check_sizes(settings: Any, weights: Mapping[str, Tensor], target: TransformersTarget) -> None:
    """Refuse a config that claims far more than its files hold, before memory is taken for it."""
    held = sum(weight.numel() for weight in weights.values())
    settings_read = (settings.model_dump(), getattr(settings, "architecture", None) or {})
    size = {key: value for place in settings_read for key, value in place.items() if type(value) is int}
    hidden = size.get("hidden_size", target.spec.hidden)
    layers = size.get("layers", size.get("num_hidden_layers", 1))
    widths = [size.get(key, 1) for key in ("intermediate", "intermediate_size", "rank", "gru", "vocabulary", "vocab_size")]
    widths.append(size.get("heads", size.get("num_attention_heads", 1)) * size.get("head_dim", 1))
    if max(layers * hidden, max(widths), layers * size.get("intermediate", 1) * hidden, hidden * widths[1]) > held:
        raise ExportError(
            f"config.json describes a larger model than the {held:,} numbers in its weights; "
            "copy the folder again"
        )
    for key in ("block", "length"):
        if size.get(key, 0) > target.spec.context:
            raise ExportError(
                f"it drafts {size[key]} tokens a step; "
                f"{target.spec.name} reads {target.spec.context} in all: load a longer target"
            )


def candidates(config: Config, format: str | None, kind: str | None, weights: Collection[str] = ()) -> list[tuple[str, str]]:
    """Formats and kinds that a config.json may be of, among what was asked for.  weights: names of its weights."""
    found = []
    for name in formats() if format is None else [format]:
        with suppress(AttributeError, IndexError, KeyError, TypeError):  # nothing in it is of the right type
            known = kind or find(name).kind_of(config, weights)
            found += [] if known is None else [(name, known)]
    return found


def identify(folder: Path, format: str | None = None, kind: str | None = None) -> tuple[str, str]:
    """(format, kind) of a folder of others, by its config.json and the names of its weights.

    format, kind: what is known of it.  Raises ExportError for a folder that is none, or could be several.
    """
    if format is not None and all(layout.settings is None for layout in find(format).layouts.values()):
        raise ExportError(
            f"{folder} is of format {format}, which is written here and not read; use the checkpoint it was made from"
        )
    if not (folder / CONFIG).exists() and "format" not in read_manifest(folder) and (folder / MANIFEST).exists():
        raise ExportError(f"{folder} is a checkpoint already; use it as it is")
    if not (folder / CONFIG).exists():
        raise ExportError(f"{folder} has no {CONFIG}; name the folder of a draft model as it was published")
    if kind is not None and format is None:
        raise ExportError(f"{kind} exists in several formats; name that of {folder} with --format")
    config = read_json(folder / CONFIG)
    found = candidates(config, format, kind, folders.read_names(folder))
    if len(found) == 1:
        return found[0]
    key = next((key for key in ("speculators_model_type", "architectures") if config.get(key)), None)
    given = f"has no architectures in {CONFIG}" if key is None else f"has {key} {config[key]} in {CONFIG}"
    guesses = ", ".join(f"{name} ({known})" for name, known in found)
    readable = [name for name in formats() if any(layout.settings is not None for layout in find(name).layouts.values())]
    which = f"it may be {guesses}" if found else f"none of {format or ', '.join(readable)} has such a drafter"
    raise ExportError(f"{folder} {given}, and {which}; bring another, or import it with --format and --kind")


def target_of(folder: Path) -> str | None:
    """The target that a folder of others names; None where it names none."""
    config = read_config(folder)
    own = at(config, "speculators_config.verifier") or {}
    name = own.get("name_or_path") if isinstance(own, Mapping) else None
    name = name or config.get("target_model_name_or_path") or config.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _check_target(folder: Path, manifest: Config, target: TransformersTarget) -> None:
    mine, theirs = binding(target), manifest.get("target", {})
    wrong = [key for key in mine if theirs.get(key) is not None and mine[key] is not None and theirs[key] != mine[key]]
    if wrong:
        differences = ", ".join(f"{key} {theirs[key]} against {mine[key]}" for key in wrong)
        raise ExportError(
            f"{folder} was made for target {theirs.get('name')!r}, not for {target.spec.name!r}: {differences}; "
            "load that target"
        )


def fill(
    model: DraftModel, weights: Mapping[str, Tensor], layout: Layout, folder: Path, target: TransformersTarget,
    unmapped: Collection[str],
) -> None:  # fmt: skip
    """Copy their weights into our model.  Raises ExportError unless every key of both sides has its place.

    unmapped: names of ours that get their values from elsewhere.
    """
    own = weights_of(model)
    names = renamed(own, layout.names)
    if missing := [theirs for theirs in names.values() if theirs not in weights]:
        raise ExportError(f"{folder} lacks {', '.join(missing[:4])}; it is not whole, or not of this format")
    if random := sorted(own.keys() - names.keys() - set(unmapped) - set(BEGINNINGS)):
        raise ExportError(f"{folder} has no values for {', '.join(random[:4])}, which would stay random; export it again")
    for name in sorted(weights.keys() - set(names.values())):
        _account_for(name, weights[name], folder, target)
    theirs = {ours: weights[name] for ours, name in names.items()}
    shapes = [
        f"{names[ours]} {tuple(weight.shape)} where {tuple(own[ours].shape)} belongs"
        for ours, weight in theirs.items() if weight.shape != own[ours].shape
    ]  # fmt: skip
    if shapes:
        raise ExportError(f"{folder} does not fit its config: {', '.join(shapes[:3])}; copy the folder again")
    if types := [f"{names[ours]} is {theirs[ours].dtype}".replace("torch.", "") for ours in mistyped(theirs, own)]:
        raise ExportError(f"{folder} has numbers of the wrong type: {', '.join(types[:3])}; copy the folder again")
    model.load_state_dict({ours: weight.to(own[ours].dtype) for ours, weight in theirs.items()}, strict=False)
    if problem := stale_map(model):
        raise ExportError(f"{folder}: {problem}")


def _account_for(name: str, weight: Tensor, folder: Path, target: TransformersTarget) -> None:
    """A weight of theirs that is none of ours: a copy of the target's own, or a buffer.  Raises ExportError for any other."""
    if fnmatch(name, STALE):
        return
    kind = _borrowed_kind(name)
    if kind is None:
        shown = ascii(name)[1:-1]  # a name may hold what moves a terminal's cursor
        raise ExportError(
            f"{folder} has {shown} {tuple(weight.shape)}, which nothing here reads; "
            "name the --kind that has it"
        )
    theirs = borrowed(target, name)
    if weight.shape != theirs.shape:
        raise ExportError(
            f"{folder}: {name} is {tuple(weight.shape)}, the target's {tuple(theirs.shape)}; "
            "load the target it was trained for"
        )
    if not _is_copy(weight, theirs, rounded=target.spec.quantised is not None):
        raise ExportError(
            f"{folder} brings a {kind} of its own in {name}, not the target's; only the target's can be read here"
        )


def _is_copy(weight: Tensor, theirs: Tensor, rounded: bool) -> bool:
    """Whether one is the other up to rounding to the coarser of their types.  rounded: the target's are of 8 bits here."""
    if not weight.is_floating_point():
        return False
    if rounded:  # an 8-bit matrix is only close to the one that was copied
        return torch.allclose(weight.float(), theirs.float(), rtol=1e-2, atol=1e-2)
    if {weight.dtype, theirs.dtype} == {torch.float16, torch.bfloat16}:  # each rounded from what neither holds
        return torch.allclose(weight.float(), theirs.float(), rtol=torch.finfo(torch.bfloat16).eps, atol=2**-24)
    coarser = max(weight.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(weight.to(coarser), theirs.to(coarser))


def _fill_unmapped(model: DraftModel, manifest: Config, layout: Layout, folder: Path) -> None:
    """Set small weights that the format has no key for, such as a confidence head's temperatures; others stay as they are."""
    own, stored = model.state_dict(), manifest.get("unmapped", {})
    try:
        found = {name: torch.tensor(value, dtype=own[name].dtype) for name, value in stored.items()}
        fits = all(value.shape == own[name].shape for name, value in found.items()) and not renamed(found, layout.names)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise ExportError(
            f"{folder / MANIFEST} holds weights that are not this draft's; "
            "delete the file to import the rest"
        )
    model.load_state_dict(found, strict=False)


def _layout(format: str, kind: str, writes: bool) -> Layout:
    """Raises ExportError for a method that this format does not know, or knows the other way only."""
    able = {
        name: one for name, one in find(format).layouts.items() if (one.config if writes else one.settings) is not None
    }  # fmt: skip
    if kind not in able:
        way = "written as" if writes else "read from"
        raise ExportError(f"{kind} can't be {way} {format}; what can be: {', '.join(able) or 'nothing'}")
    return able[kind]
