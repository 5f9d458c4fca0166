"""A drafter by its name: a kind, a checkpoint, a draft model as others publish it, or a Hugging Face id of one of
these."""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider import checkpoint
from outrider.config import build, nearest
from outrider.decoding.protocols import Drafter
from outrider.drafters import find, kinds, method, trained
from outrider.errors import CheckpointError, ConfigError, DrafterError, first_line
from outrider.export import formats, reading
from outrider.export.manifest import read_config, read_manifest
from outrider.fast import Compiled
from outrider.formats.folder import has_config
from outrider.formats.gguf.file import FILE
from outrider.formats.keys import CONFIG, MANIFEST, target_of
from outrider.hub import missing_path
from outrider.kernels import prepacked
from outrider.nn.draft_model import DraftModel
from outrider.nn.drafting.remote import RemoteDrafter
from outrider.targets.protocol import Target
from outrider.targets.quantised import library, quantise


@dataclass(frozen=True, slots=True)
class Source:
    """The folder of a trained drafter."""

    name: str
    """As it was given."""
    folder: Path
    kind: str
    format: str | None
    """Of others, as in `outrider.export`; None for a checkpoint."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """A checkpoint's or our own export's; empty for a folder of others."""

    @property
    def target(self) -> str | None:
        """The target that it was made for; None where the folder does not name it."""
        name = (self.manifest.get("target") or {}).get("name")
        return name if name or self.format is None else target_of(read_config(self.folder))


def load_drafter(
    kind_or_path: str | Path, target: Target, *, device: str | torch.device | None = None, quantize: str | None = None,
    **config: Any,
) -> Drafter:  # fmt: skip
    """A drafter for `target`: a kind such as `ngram` with its settings, or a trained one by its folder or Hugging Face
    id.

    A folder is a checkpoint, or a draft model as its authors publish it: speculators, EAGLE, EAGLE-3, DFlash, DSpark,
    Medusa and the others of `outrider formats`; a GGUF file is named itself.  Of a trained drafter only settings on
    which its weights do not depend can be given, such as a dflash2's nodes.  A trainable kind by its name alone has
    new, random weights.  device: where it runs, if not where its config says, which is the target's own device unless
    given.  quantize: `int8` rounds the linear layers of the draft model, whatever the target's are; what it borrows of
    the target stays.  A checkpoint trained with the weights that a target was quantised from fits it, and the log
    reports it.

    Raises ConfigError for an unknown name or setting, CheckpointError for a checkpoint that is damaged or was made for
    another target, ExportError for a folder of others that can't be read or does not fit, DrafterError for one that
    reads more than the target sends.
    """
    if isinstance(target, str | Path):
        raise ConfigError(f"target must be loaded, got {target!r}; give load_target({str(target)!r})")
    name = str(kind_or_path)
    if name in kinds():
        _refuse_without_layers(name, name, target)
        module, given = find(name), {} if quantize is None else {"quantize": quantize}
        settings = build(module.Config, {"kind": name, **config, **given}, "drafter")
        # a drafter made of others opens checkpoints by this function, which is on a higher floor
        opens = {"load": load_drafter} if "load" in inspect.signature(module.build).parameters else {}
        place = device or getattr(settings, "device", None)
        return _placed(lambda target: module.build(settings, target, **opens), target, place)
    source = describe(name)
    _refuse_without_layers(name, source.kind, target)
    free = method(source.kind).free
    if fixed := sorted(config.keys() - {*free}):
        others = f"; {' and '.join(free)} can be set" if free else ""
        raise ConfigError(f"{name} is a trained drafter with settings of its own; leave out {', '.join(fixed)}{others}")
    own = source.manifest.get("config") or {}
    quantize = quantize or own.get("quantize")
    if quantize is not None:
        library(quantize)
    if source.manifest.get("target"):
        checkpoint.check_binding(source.manifest, target, source.folder, quantised=True)
        _tell_precision(source.manifest, target, name)

    def filled(target: Target) -> Drafter:
        model = draft_model(source, target)
        if config:
            model = with_settings(model, config, name)
        if quantize is not None:
            quantise(model, quantize)
        else:
            prepacked.halve(model)
        return model.drafter()

    return _placed(filled, target, device or own.get("device"))


def draft_model(source: str | Path | Source, target: Any) -> DraftModel:
    """The draft model of a checkpoint or of a folder of others, frozen, on the target's device and in its precision.

    Raises as `load_drafter` does.
    """
    source = source if isinstance(source, Source) else describe(source)
    if source.format is None:
        return checkpoint.load_model(source.folder, target)
    return reading.imported(source.folder, target, source.format, source.kind)


def with_settings(model: DraftModel, changes: Mapping[str, Any], name: str) -> DraftModel:
    """A loaded model with other values of settings on which its weights do not depend; see `Method.free`.

    Raises ConfigError for a value that is none, and for a longer draft than it was trained for.
    """
    own = model.config
    config = build(type(own), {**own.model_dump(), **changes}, "drafter")
    length = method(own.kind).length
    if getattr(config, length) > getattr(own, length):
        raise ConfigError(
            f"{length} {getattr(config, length)} is more than the {getattr(own, length)} that {name} was trained for; "
            "set it lower, or leave it out"
        )
    kind: Any = type(model)
    changed: DraftModel = kind(config, model.target)
    changed.to(model.target.device, model.dtype).load_state_dict(model.state_dict())
    return changed.eval().requires_grad_(False)


def describe(name: str | Path, format: str | None = None, kind: str | None = None) -> Source:
    """Find a trained drafter by its folder, its GGUF file or its Hugging Face id, without reading its weights.

    format, kind: of a folder of others; recognised by its config.json unless given. Raises ConfigError for a name that
    is neither, CheckpointError for an id that can't be fetched, ExportError for a folder that holds no drafter, or none
    that is known here.
    """
    folder = find_folder(name)
    if not (checkpoint.whole(folder) / MANIFEST).exists() and not has_config(folder):
        raise CheckpointError(f"{folder} has neither {MANIFEST} nor {CONFIG}; name the folder of a trained drafter")
    if formats.is_checkpoint(folder):
        manifest = checkpoint.manifest_of(folder)
        return Source(str(name), folder, manifest["kind"], None, manifest)
    format, kind = formats.identify(folder, format, kind)
    return Source(str(name), folder, kind, format, read_manifest(folder))


def find_folder(name: str | Path) -> Path:
    """A folder or a file here, or what the hub's repository of this name holds, fetched where it is not there yet.

    Raises ConfigError for a missing folder or a name that is neither, CheckpointError for what can't be fetched.
    """
    path = Path(name).expanduser()
    if path.name == FILE and (path.parent / MANIFEST).exists():
        return path.parent  # an export of ours, whose outrider.json belongs to it
    if path.exists() or checkpoint.whole(path).exists():
        return path
    name = str(name)
    if (problem := missing_path(name)) is not None:
        raise ConfigError(f"{problem}; name the folder of a trained drafter, its Hugging Face id, or a drafter's kind")
    if "/" not in name:
        raise ConfigError(f"{name!r} is neither a checkpoint folder nor a drafter{nearest(name, kinds())}")
    import huggingface_hub  # comes with transformers; a second to import, and only needed here

    try:
        return Path(huggingface_hub.snapshot_download(name))
    except (OSError, ValueError) as error:
        reason = first_line(error) or type(error).__name__
        raise CheckpointError(
            f"{name!r} is not a folder here and can't be fetched from the hub: {reason}; check the name, or download "
            "it and name the folder"
        ) from None


def _refuse_without_layers(name: str, kind: str, target: Target) -> None:
    """Raises DrafterError for a draft model that needs more of a server's target than tokens."""
    model = trained(kind)
    if not target.spec.layers and model is not None and model.reads_target:
        raise DrafterError(
            f"{name} reads hidden states, which {target.spec.name} does not send; take ngram, suffix or small_model"
        )


def _tell_precision(manifest: Mapping[str, Any], target: Target, name: str) -> None:
    trained, served = checkpoint.trained_on(manifest, target), target.spec.precision
    if trained not in (None, served):
        is_other = manifest["target"].get("weights_hash") != target.spec.weights_hash
        note = "; the text stays this target's own, but fewer tokens may be accepted" * is_other
        level = logging.WARNING if is_other else logging.INFO
        logging.getLogger(__name__).log(level, "%s: trained on %s, served on %s%s", name, trained, served, note)


def _placed(make: Callable[[Target], Drafter], target: Target, device: str | torch.device | None) -> Drafter:
    """A drafter for `target`, made on `device`.  With a compiled target its compiled steps come from the disk."""
    place = target.device if device is None else torch.empty(0, device=device).device  # cuda is cuda:0
    if place != target.device:
        return RemoteDrafter(make(target.copy_to(place)), place)
    drafter = make(target)
    theirs = getattr(target, "step", None)
    if isinstance(theirs, Compiled) and theirs.graph is not None:
        for own in drafter.steps:
            own.look()
    return drafter
