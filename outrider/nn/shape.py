"""The shape of a draft model's decoder layers, by default that of the target's: sizes, rotary positions, taps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from torch import nn

from outrider.config import Config as Base
from outrider.errors import DrafterError
from outrider.targets.protocol import LayerSizes, Target, TargetSpec

STRETCHES = ("linear", "llama3", "yarn")
"""Kinds of rotary scaling that do not depend on the length of the text."""
PLAIN = {"rope_type": "default"}
"""Value of rope_scaling that leaves the target's scaling out."""
InitLayers = Annotated[
    tuple[NonNegativeInt, ...] | None,
    Field(
        description="Target layers, one per draft layer and counted from 0, whose weights the draft layers start from; "
        "random by default."
    ),
]
"""Type of the setting `init_from_layers`."""


class LayerConfig(Base):
    """Settings of every drafter with decoder layers of its own.  Sizes default to those of the target's layers."""

    heads: PositiveInt | None = None
    """Attention heads per layer."""
    kv_heads: PositiveInt | None = None
    """Heads of keys and values per layer."""
    head_dim: PositiveInt | None = None
    """Width of one attention head."""
    intermediate: PositiveInt | None = None
    """Width of the MLP."""
    rms_norm_eps: PositiveFloat | None = None
    """Number added to the mean square in every norm."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies.  Defaults to the target's, with its rope_scaling; longrope and other kinds of
    scaling that depend on the length of the text are left out."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling, as in the rope_parameters of a config.json: rope_type linear, llama3 or yarn, and its numbers;
    rope_type default for no scaling.  If rope_theta is set, the default is no scaling."""
    partial_rotary_factor: float | None = Field(None, gt=0, le=1)
    """Share of a head, above 0 and at most 1, that is rotated by position."""
    device: str | None = None
    """Device of the drafter, such as cuda:1; the target's by default."""

    @field_validator("rope_scaling")
    @classmethod
    def _check_scaling(cls, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
        if scaling is None or scaling == PLAIN:
            return scaling
        if scaling.get("rope_type") not in STRETCHES:
            raise ValueError(f"rope_type must be one of {', '.join(STRETCHES)}, not {scaling.get('rope_type')!r}")
        if scaling["rope_type"] != "linear" and "original_max_position_embeddings" not in scaling:
            raise ValueError(
                f"rope_type {scaling['rope_type']} needs original_max_position_embeddings, the context before scaling; "
                "engines assume different values where none is given"
            )
        # vLLM refuses an integer
        return {key: float(value) if key == "factor" else value for key, value in scaling.items()}


SIZES = tuple(field.name for field in fields(LayerSizes))
"""Fields of LayerConfig that a target can fill."""
FORMER: Mapping[str, Any] = {
    "heads": 4, "kv_heads": 4, "head_dim": 64, "intermediate": 704, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "rope_scaling": None, "partial_rotary_factor": 1.0,
}  # fmt: skip
"""Defaults of older versions, whose sizes did not come from the target; used to read their checkpoints."""
L = TypeVar("L", bound=LayerConfig)


def resolved(config: L, spec: TargetSpec) -> tuple[L, LayerSizes]:
    """The config with unset sizes filled in from the target's layers, and all sizes.

    Raises DrafterError if the sizes of the target's layers are needed and not known.
    """
    settings = {name: getattr(config, name) for name in SIZES if getattr(config, name) is not None}
    missing = [name for name in SIZES if name not in settings and name != "rope_scaling"]
    if missing and spec.sizes is None:
        raise DrafterError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, and the config of {spec.name} does "
            "not say how large its layers are; set them under drafter"
        )
    defaults = {} if spec.sizes is None else _defaults(spec.sizes, settings)
    sizes = LayerSizes(**(defaults | settings))
    if sizes.rope_scaling == PLAIN:
        sizes = LayerSizes(**(asdict(sizes) | {"rope_scaling": None}))
    return config.model_copy(update=asdict(sizes)), sizes


def left_out(sizes: LayerSizes) -> str | None:
    """The target's kind of rotary scaling if a drafter's layers don't support it, such as longrope; otherwise None."""
    kind = (sizes.rope_scaling or PLAIN)["rope_type"]
    return None if kind in (*STRETCHES, "default") else kind


def _defaults(sizes: LayerSizes, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The target's sizes as defaults for a config with these settings.  Rotary scaling belongs to its base."""
    defaults = asdict(sizes)
    if "rope_theta" in settings:
        defaults["rope_scaling"] = None
    elif "rope_scaling" not in settings and (kind := left_out(sizes)) is not None:
        message = "a drafter can't use the target's rope_type %s; its rotary positions are not scaled"
        logging.getLogger(__name__).warning(message, kind)
        defaults["rope_scaling"] = None
    return defaults


def resolve_taps(taps: Sequence[int] | None, spec: TargetSpec, count: int = 5) -> tuple[int, ...]:
    """The configured taps, checked; by default `count` of them, spread from layer 1 to three before the last.

    Raises DrafterError for taps that are out of range, repeated or not in ascending order.
    """
    if taps is None:
        last = max(spec.layers - 3, 0)
        first = min(1, last)
        return tuple(sorted({first + round(i * (last - first) / max(1, count - 1)) for i in range(count)}))
    if not all(0 <= tap < spec.layers for tap in taps):
        raise DrafterError(
            f"taps {tuple(taps)} are out of range for {spec.name}, which has {spec.layers} layers; choose taps from 0 "
            f"to {spec.layers - 1}"
        )
    if not taps or list(taps) != sorted(set(taps)):
        raise DrafterError(f"taps must be at least one layer, in ascending order, each named once, got {tuple(taps)}")
    return tuple(taps)


@torch.no_grad()
def copy_layers(layers: Sequence[nn.Module] | nn.ModuleList, indices: Sequence[int], target: Target) -> None:
    """Copy the weights of target layers `indices` into the draft layers, where both have them.

    Raises DrafterError if the number of layers or the shape of a weight does not fit.
    """
    if len(indices) != len(layers) or max(indices) >= target.spec.layers:
        raise DrafterError(
            f"init_from_layers {tuple(indices)} must name one target layer for each of {len(layers)} draft layers, "
            f"each from 0 to {target.spec.layers - 1}"
        )
    for layer, index in zip(layers, indices, strict=True):
        draft_weights, target_weights = layer.state_dict(), target.layer(index).state_dict()
        shared = draft_weights.keys() & target_weights.keys()
        wrong = sorted(name for name in shared if draft_weights[name].shape != target_weights[name].shape)
        if wrong or not shared:
            name = wrong[0] if wrong else next(iter(draft_weights))
            shape = tuple(target_weights[name].shape) if name in target_weights else "missing"
            raise DrafterError(
                f"layer {index} of {target.spec.name} can't be copied: {name} is {tuple(draft_weights[name].shape)} in "
                f"the draft and {shape} in the target; give the draft the target's heads, kv_heads, head_dim and "
                "intermediate, or leave init_from_layers out"
            )
        for name in shared:
            draft_weights[name].copy_(target_weights[name])
