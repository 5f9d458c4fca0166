"""The sizes of a run's drafter for its target, before any weight loads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.config import flatten
from outrider.drafters import find
from outrider.errors import DrafterError, TargetError
from outrider.nn.draft_model import DraftModel
from outrider.nn.shape import LayerConfig, left_out, resolved
from outrider.runs.file import RunConfig, load
from outrider.targets.load import default_device
from outrider.targets.sketch import Sketch, sketch
from outrider.training.trainer import with_dtype


class OnPaper(NamedTuple):
    """The sizes of a run's drafter, as far as the target's config gives them."""

    values: dict[str, Any]
    """Settings filled in from the target, by key path, such as drafter.heads."""
    parameters: int | None = None
    """Weights that are trained; None where they can't be counted."""
    dtype: torch.dtype = torch.float32
    """Of the target's checkpoint."""
    notes: tuple[str, ...] = ()
    """What is unknown or does not fit, and why."""
    problem: DrafterError | None = None
    """Why the drafter does not fit its target."""

    @property
    def sizes(self) -> dict[str, int]:
        """The drafter's weights, and the memory they take: in serving, and with gradients and two float32 moments."""
        if self.parameters is None:
            return {}
        serving, training = self.parameters * self.dtype.itemsize, 16 * self.parameters
        return {"sizes.parameters": self.parameters, "sizes.serving_bytes": serving, "sizes.training_bytes": training}


def on_paper(run: RunConfig, target: Sketch | None = None) -> OnPaper:
    """The sizes of a run's drafter.  Reads the target's config, unless `target` is given, and no weights."""
    config, module = run.drafter_config, find(run.drafter["kind"])
    if not hasattr(module, "Model") or "model" in module.Config.model_fields:  # a language model has its own sizes
        return OnPaper({})
    try:
        target = target or sketch(run.target.name, run.target.revision, run.target.trust_remote_code)
    except TargetError as error:
        return OnPaper({}, notes=(f"sizes shown as null will be taken from the target, and are unknown here: {error}",))
    values, notes, dtype = {}, [], getattr(torch, target.spec.dtype)
    try:
        if isinstance(config, LayerConfig):
            full, _ = resolved(config, target.spec)
            values = {
                f"drafter.{key}": value for key, value in full if getattr(config, key) is None and value is not None
            }
            sizes, is_named = target.spec.sizes, (config.rope_theta, config.rope_scaling) != (None, None)
            if sizes is not None and not is_named and (kind := left_out(sizes)) is not None:
                notes = [
                    f"{target.spec.name} uses {kind} rotary scaling, which drafters do not have; they use the base "
                    f"alone"
                ]
        with torch.device("meta"):
            model: DraftModel = module.Model(config, target)
    except DrafterError as error:
        return OnPaper(values, None, dtype, (*notes, str(error)), error)
    if model.taps and getattr(config, "taps", ()) is None:
        values["drafter.taps"] = list(model.taps)
    if getattr(config, "mask_token", 0) is None:
        values["drafter.mask_token"] = model.config.mask_token
    return OnPaper(values, sum(weight.numel() for weight in model.parameters()), dtype, tuple(notes))


class Shown(NamedTuple):
    """A setting of a run file, resolved."""

    key: str
    value: Any
    origin: str
    """file, override or default; target if it comes from the target's config; counted for a size."""
    here: str | None = None
    """The value on this machine of a setting that is `auto`."""

    @property
    def is_bytes(self) -> bool:
        return self.origin == "counted" and self.key.endswith("_bytes")


def shown(file: str | Path, overrides: Sequence[str] = ()) -> tuple[list[Shown], tuple[str, ...]]:
    """All settings of a run file and the sizes of its drafter, and notes on what is unknown.  Reads no weights."""
    run, origins = load(file, overrides)
    paper = on_paper(run)
    here = {}
    if run.train is not None and run.train.dtype == "auto":
        here["train.dtype"] = with_dtype(run.train, run.folder, default_device(run.target.device)).dtype
    origins |= dict.fromkeys(paper.values, "target") | dict.fromkeys(paper.sizes, "counted")
    values = flatten(run.model_dump(mode="json")) | paper.values | paper.sizes
    return [Shown(key, value, origins[key], here.get(key)) for key, value in values.items()], paper.notes
