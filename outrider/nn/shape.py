"""Sizes of a draft model's decoder layers and how they turn by position: what models that come from elsewhere differ in."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.config import Config as Base

STRETCHES = ("linear", "llama3", "yarn")
"""Ways of stretching rotary angles that do not depend on how long the text is."""


class LayerConfig(Base):
    """What every drafter with decoder layers of its own can set."""

    heads: PositiveInt = 4
    kv_heads: PositiveInt = 4
    head_dim: PositiveInt = 64
    intermediate: PositiveInt = 704
    """Width of the MLP."""
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """How rotary angles are stretched, as in the rope_parameters of a config.json: rope_type linear, llama3 or yarn, and its
    numbers; not at all unless given."""
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    """Share of a head that turns by position; the rest stays as it is."""
    device: str | None = None
    """Where it drafts, such as cuda:1; the target's device unless given."""

    @field_validator("rope_scaling")
    @classmethod
    def _known_scaling(cls, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
        if scaling is not None and scaling.get("rope_type") not in STRETCHES:
            raise ValueError(f"rope_type must be one of {', '.join(STRETCHES)}, not {scaling.get('rope_type')!r}")
        if scaling is not None and scaling["rope_type"] != "linear" and "original_max_position_embeddings" not in scaling:
            raise ValueError(
                f"rope_type {scaling['rope_type']} needs original_max_position_embeddings, the context that is stretched; "
                "engines take other numbers for it where none is given"
            )
        # vLLM takes a whole number for a fault
        return scaling and {key: float(value) if key == "factor" else value for key, value in scaling.items()}


def frequencies(shape: LayerConfig, device: torch.device) -> tuple[Tensor, float]:
    """By how much each pair of a head turns per position, float32 [turning / 2], and what cos and sin are multiplied by."""
    scaling = json.dumps(shape.rope_scaling, sort_keys=True)
    return _frequencies(shape.head_dim, shape.partial_rotary_factor, shape.rope_theta, scaling, device)


@functools.cache
def _frequencies(head_dim: int, share: float, theta: float, scaling: str, device: torch.device) -> tuple[Tensor, float]:
    # not a buffer: a model that is moved to bf16 would take it along, and far positions would turn by wrong angles
    parameters = json.loads(scaling)
    turning = int(head_dim * share)
    if parameters is None:
        return theta ** -(torch.arange(0, turning, 2, device=device, dtype=torch.float32) / turning), 1.0
    parameters |= {"rope_theta": theta, "partial_rotary_factor": share}
    config = Qwen3Config(head_dim=head_dim, rope_parameters=parameters)
    found, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)
    return found.float(), float(scale)
