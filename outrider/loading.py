"""Load a drafter by name: a kind, a checkpoint, a published draft model, or a Hugging Face id."""

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
from outrider.targets.quantised import check_mode, quantise


@dataclass(frozen=True, slots=True)
class Source:
    """The folder of a trained drafter."""

    name: str
    """Name that the user gave."""
    folder: Path
    kind: str
    format: str | None
    """Published format, as in `outrider.export`; None for a checkpoint."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Of a checkpoint or an Outrider export; otherwise empty."""

    @property
    def target(self) -> str | None:
        """The target that it was trained for; None if the folder does not name it."""
        name = (self.manifest.get("target") or {}).get("name")
        return name if name or self.format is None else target_of(read_config(self.folder))


def load_drafter(
    kind_or_path: str | Path, target: Target, *, device: str | torch.device | None = None, quantize: str | None = None,
    **config: Any,
) -> Drafter:  # fmt: skip
    """A drafter for `target`: a kind such as `ngram` with its settings, or a trained one by its folder or Hugging Face
    id.

    A folder is a checkpoint or a published draft model: speculators, EAGLE, EAGLE-3, DFlash, DSpark, Medusa and the
    other formats of `outrider formats`; a GGUF file is given by its own path.  A trained drafter accepts only settings
    that its weights do not depend on, such as a dflash2's nodes.  A trainable kind without a checkpoint has random
    weights.  device: where it runs; by default the device in its config, otherwise the target's.  quantize: `q8_0`,
    `q4_0`, `q4_k` or `int8` rounds the linear layers of the draft model, independent of the target; layers shared with
    the target are not rounded.  A checkpoint trained on the unquantised weights of a quantised target works with it;
    the log reports this.

    Raises ConfigError for an unknown name or setting, CheckpointError for a checkpoint that is damaged or was made for
    another target, ExportError for a published folder that can't be read or does not fit, DrafterError for a drafter
    that needs hidden states that the target does not send.
    """
    if isinstance(target, str | Path):
        raise ConfigError(f"target must be loaded, got {target!r}; give load_target({str(target)!r})")
    name = str(kind_or_path)
    if name in kinds():
        _refuse_without_layers(name, name, target)
        module = find(name)
        if quantize is not None:
            config["quantize"] = quantize
        settings = build(module.Config, {"kind": name, **config}, "drafter")
        # a drafter that combines others loads them with this function, which its layer can't import
        loader = {"load": load_drafter} if "load" in inspect.signature(module.build).parameters else {}
        device = device or getattr(settings, "device", None)
        return _on_device(lambda target: module.build(settings, target, **loader), target, device)
    source = describe(name)
    _refuse_without_layers(name, source.kind, target)
    free = method(source.kind).free
    if fixed := sorted(config.keys() - {*free}):
        others = f"; {' and '.join(free)} can be set" if free else ""
        raise ConfigError(f"{name} is a trained drafter with settings of its own; leave out {', '.join(fixed)}{others}")
    trained_config = source.manifest.get("config") or {}
    quantize = quantize or trained_config.get("quantize")
    if quantize is not None:
        check_mode(quantize)
    if source.manifest.get("target"):
        checkpoint.check_binding(source.manifest, target, source.folder, quantised=True)
        _log_precision(source.manifest, target, name)

    def load(target: Target) -> Drafter:
        model = draft_model(source, target)
        if config:
            model = with_settings(model, config, name)
        if quantize is not None:
            quantise(model, quantize)
        else:
            prepacked.halve(model)
        return model.drafter()

    return _on_device(load, target, device or trained_config.get("device"))


def draft_model(source: str | Path | Source, target: Any) -> DraftModel:
    """The draft model of a checkpoint or a published folder, frozen, on the target's device and in its precision.

    Raises the errors of `load_drafter`.
    """
    source = source if isinstance(source, Source) else describe(source)
    if source.format is None:
        return checkpoint.load_model(source.folder, target)
    return reading.imported(source.folder, target, source.format, source.kind)


def with_settings(model: DraftModel, changes: Mapping[str, Any], name: str) -> DraftModel:
    """A loaded model with other values for settings that its weights do not depend on; see `Method.free`.

    Raises ConfigError for an invalid value, and for a longer draft than it was trained for.
    """
    before = model.config
    config = build(type(before), {**before.model_dump(), **changes}, "drafter")
    length = method(before.kind).length
    if getattr(config, length) > getattr(before, length):
        raise ConfigError(
            f"{length} {getattr(config, length)} is more than the {getattr(before, length)} that {name} was trained "
            "for; set it lower, or leave it out"
        )
    kind: Any = type(model)
    changed: DraftModel = kind(config, model.target)
    changed.to(model.target.device, model.dtype).load_state_dict(model.state_dict())
    return changed.eval().requires_grad_(False)


def describe(name: str | Path, format: str | None = None, kind: str | None = None) -> Source:
    """Find a trained drafter by its folder, its GGUF file or its Hugging Face id, without reading its weights.

    format, kind: of a published folder; by default detected from its config.json.  Raises ConfigError for a name that
    is neither, CheckpointError for an id that can't be fetched, ExportError for a folder without a known drafter.
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
    """A local folder or file, or the downloaded Hugging Face repository of this name.

    Raises ConfigError for a missing folder or a name that is neither, CheckpointError if the download fails.
    """
    path = Path(name).expanduser()
    if path.name == FILE and (path.parent / MANIFEST).exists():
        return path.parent  # an Outrider export, with its outrider.json
    if path.exists() or checkpoint.whole(path).exists():
        return path
    name = str(name)
    if (problem := missing_path(name)) is not None:
        raise ConfigError(f"{problem}; name the folder of a trained drafter, its Hugging Face id, or a drafter's kind")
    if "/" not in name:
        raise ConfigError(f"{name!r} is neither a checkpoint folder nor a drafter{nearest(name, kinds())}")
    import huggingface_hub  # takes a second to import

    try:
        return Path(huggingface_hub.snapshot_download(name))
    except (OSError, ValueError) as error:
        reason = first_line(error) or type(error).__name__
        raise CheckpointError(
            f"{name!r} is not a local folder and can't be fetched from the hub: {reason}; check the name, or download "
            "it and name the folder"
        ) from None


def _refuse_without_layers(name: str, kind: str, target: Target) -> None:
    """Raises DrafterError for a draft model that needs hidden states from a target on a server."""
    model = trained(kind)
    if not target.spec.layers and model is not None and model.reads_target:
        raise DrafterError(
            f"{name} reads hidden states, which {target.spec.name} does not send; use ngram, suffix or small_model"
        )


def _log_precision(manifest: Mapping[str, Any], target: Target, name: str) -> None:
    trained, served = checkpoint.trained_on(manifest, target), target.spec.precision
    if trained not in (None, served):
        is_other = manifest["target"].get("weights_hash") != target.spec.weights_hash
        note = "; the text stays this target's own, but fewer tokens may be accepted" * is_other
        level = logging.WARNING if is_other else logging.INFO
        logging.getLogger(__name__).log(level, "%s: trained on %s, served on %s%s", name, trained, served, note)


def _on_device(make: Callable[[Target], Drafter], target: Target, device: str | torch.device | None) -> Drafter:
    """A drafter for `target`, created on `device`.  If the target is compiled, the drafter's steps use compiled
    packages on disk."""
    place = target.device if device is None else torch.empty(0, device=device).device  # cuda is cuda:0
    if place != target.device:
        return RemoteDrafter(make(target.copy_to(place)), place)
    drafter = make(target)
    target_step = getattr(target, "step", None)
    if isinstance(target_step, Compiled) and target_step.graph is not None:
        for step in drafter.steps:
            step.look()
    return drafter
