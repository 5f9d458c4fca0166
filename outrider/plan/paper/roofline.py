"""The time of a pass on paper: bytes / bandwidth or operations / their speed, whichever is longer.

Layers, steps and exchanges between accelerators also have a fixed time.  Linear layers and attention are two separate
rooflines: with long texts attention is bound by memory while the layers are bound by compute.  No torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from outrider.plan.paper.anatomy import Anatomy
from outrider.plan.paper.hardware import Place

Bound = Literal["memory", "compute", "launch"]


class Pass(NamedTuple):
    """One pass on paper."""

    seconds: float
    read_bytes: float
    flops: float
    bound: Bound
    """What limits its speed."""


def experts_touched(experts: int, per_token: int, rows: float) -> float:
    """Expected number of distinct experts of a layer for `rows` tokens that each choose `per_token` at random."""
    return experts * (1 - (1 - per_token / experts) ** rows) if experts else 0.0


def weights_read(model: Anatomy, rows: float) -> float:
    """Bytes of weights that a pass over this many rows reads."""
    touched = experts_touched(model.experts, model.experts_per_token, rows)
    return (
        model.read * model.weight.bytes
        + touched * model.expert * model.expert_weight.bytes
        + model.head * model.head_bytes
    )


def pass_of(model: Anatomy, place: Place, batch: float, rows: float, context: float) -> Pass:
    """A pass over `batch` texts of `context` tokens with `rows` rows each.  A text's cache is read once for all its
    rows."""
    all_rows = batch * rows
    weights, cache = weights_read(model, all_rows), batch * model.cache_bytes(context)
    products = 2 * model.active * all_rows
    attended = all_rows * sum(layers.flops * layers.attended(context) for layers in model.attention)
    kind = model.expert_weight.matmul if model.experts else model.weight.matmul
    layers = weights / place.bandwidth, products / place.flops(kind)
    attention = cache / place.bandwidth, attended / place.flops("bf16")
    work = max(layers) + max(attention)
    overhead = model.layers * place.efficiency.layer_s
    if place.devices > 1:
        overhead += 2 * model.layers * place.efficiency.exchange_s
    is_memory = layers[0] + attention[0] >= layers[1] + attention[1]
    bound: Bound = "launch" if overhead > work else "memory" if is_memory else "compute"
    return Pass(work + overhead, weights + cache, products + attended, bound)


def prefill_seconds(model: Anatomy, place: Place, tokens: float) -> float:
    """Seconds to read a prompt of `tokens` tokens in one pass."""
    if tokens <= 0:
        return 0.0
    matrices = pass_of(model, place, 1, tokens, 0)
    attended = sum(layers.flops * layers.attended(tokens / 2) for layers in model.attention) * tokens
    return matrices.seconds + attended / place.flops("bf16")


def saturation_rows(model: Anatomy, place: Place) -> float:
    """Rows above which a pass over dense layers is bound by compute, not by memory."""
    return model.weight.bytes / 2 * place.flops(model.weight.matmul) / place.bandwidth
