"""Sizes and rotary positions of a draft model's decoder layers: the target's own, unless a config names others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from outrider.config import Config as Base
from outrider.errors import DrafterError
from outrider.targets.protocol import LayerSizes, TargetSpec

STRETCHES = ("linear", "llama3", "yarn")
"""Kinds of rotary scaling that do not depend on the length of the text."""
PLAIN = {"rope_type": "default"}
"""Value of rope_scaling that leaves the target's scaling out."""


class LayerConfig(Base):
    """Settings of every drafter with decoder layers of its own.  Sizes that are not given are those of the target's
    layers."""

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
    """Base of the rotary frequencies.  Unless given, the target's, with its rope_scaling; longrope and other kinds of
    scaling that depend on the length of the text are left out."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling, as in the rope_parameters of a config.json: rope_type linear, llama3 or yarn, and its numbers;
    default for none.  With a rope_theta it is none unless given."""
    partial_rotary_factor: float | None = Field(None, gt=0, le=1)
    """Share of a head, above 0 to 1, that is rotated by position; the rest is not."""
    device: str | None = None
    """Device that drafts, such as cuda:1; the target's unless given."""

    @field_validator("rope_scaling")
    @classmethod
    def _known_scaling(cls, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
        if scaling is None or scaling == PLAIN:
            return scaling
        if scaling.get("rope_type") not in STRETCHES:
            raise ValueError(f"rope_type must be one of {', '.join(STRETCHES)}, not {scaling.get('rope_type')!r}")
        if scaling["rope_type"] != "linear" and "original_max_position_embeddings" not in scaling:
            raise ValueError(
                f"rope_type {scaling['rope_type']} needs original_max_position_embeddings, the context before scaling; "
                "engines assume different values where none is given"
            )
        # vLLM refuses a whole number
        return {key: float(value) if key == "factor" else value for key, value in scaling.items()}


SIZES = tuple(field.name for field in fields(LayerSizes))
"""Fields of LayerConfig that a target can fill."""
FORMER: Mapping[str, Any] = {
    "heads": 4, "kv_heads": 4, "head_dim": 64, "intermediate": 704, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "rope_scaling": None, "partial_rotary_factor": 1.0,
}  # fmt: skip
"""Defaults from before sizes came from the target; older checkpoints are read with them."""
L = TypeVar("L", bound=LayerConfig)


def resolved(config: L, spec: TargetSpec) -> tuple[L, LayerSizes]:
    """The config with every size filled in, and these sizes.  What it does not name is taken from the target's layers.

    A config that names all is returned as it is.  Raises DrafterError where the target does not say what is missing.
    """
    given = {name: getattr(config, name) for name in SIZES if getattr(config, name) is not None}
    missing = [name for name in SIZES if name not in given and name != "rope_scaling"]
    if missing and spec.sizes is None:
        raise DrafterError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, and the config of {spec.name} does "
            "not say "
            "how large its layers are; set them under drafter"
        )
    sizes = LayerSizes(**(({} if spec.sizes is None else _taken(spec.sizes, given)) | given))
    if sizes.rope_scaling == PLAIN:
        sizes = LayerSizes(**(asdict(sizes) | {"rope_scaling": None}))
    return config.model_copy(update=asdict(sizes)), sizes


def left_out(sizes: LayerSizes) -> str | None:
    """The target's kind of rotary scaling, such as longrope, that a drafter's layers can't have; None where they
    can."""
    kind = (sizes.rope_scaling or PLAIN)["rope_type"]
    return None if kind in (*STRETCHES, "default") else kind


def _taken(theirs: LayerSizes, given: dict[str, Any]) -> dict[str, Any]:
    """What a config that names `given` takes from the target.  Scaling belongs to its base."""
    found = asdict(theirs)
    if "rope_theta" in given:
        found["rope_scaling"] = None
    elif "rope_scaling" not in given and (kind := left_out(theirs)) is not None:
        message = "a drafter can't use the target's rope_type %s; its rotary positions are not scaled"
        logging.getLogger(__name__).warning(message, kind)
        found["rope_scaling"] = None
    return found
