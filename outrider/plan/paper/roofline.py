"""The time of a pass on paper: what it reads over the speed of memory, or its products over their speed.

Beside the roofline there is what a layer, a step and an exchange between accelerators take whatever their size.  The
layers' part and attention's are two rooflines: with long texts attention waits for memory while the layers compute.
No torch.
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
    """What decides its time."""


def experts_touched(experts: int, per_token: int, rows: float) -> float:
    """Expected number of distinct experts of a layer that so many tokens choose, each `per_token` at random."""
    return experts * (1 - (1 - per_token / experts) ** rows) if experts else 0.0


def weights_read(model: Anatomy, rows: float) -> float:
    """Bytes of weights that a pass over so many rows reads."""
    touched = experts_touched(model.experts, model.experts_per_token, rows)
    return (
        model.read * model.weight.bytes
        + touched * model.expert * model.expert_weight.bytes
        + model.head * model.head_bytes
    )


def pass_of(model: Anatomy, place: Place, batch: float, rows: float, context: float) -> Pass:
    """A pass over `batch` texts of `context` tokens, `rows` rows of each.  The cache of a text is read once, whatever
    its rows."""
    every = batch * rows
    weights, cache = weights_read(model, every), batch * model.cache_bytes(context)
    made = 2 * model.active * every
    attended = every * sum(own.flops * own.attended(context) for own in model.attention)
    kind = model.expert_weight.matmul if model.experts else model.weight.matmul
    layers = weights / place.bandwidth, made / place.flops(kind)
    attention = cache / place.bandwidth, attended / place.flops("bf16")
    work = max(layers) + max(attention)
    overhead = model.layers * place.efficiency.layer_s
    if place.devices > 1:
        overhead += 2 * model.layers * place.efficiency.exchange_s
    is_memory = layers[0] + attention[0] >= layers[1] + attention[1]
    bound: Bound = "launch" if overhead > work else "memory" if is_memory else "compute"
    return Pass(work + overhead, weights + cache, made + attended, bound)


def prefill_seconds(model: Anatomy, place: Place, tokens: float) -> float:
    """Of reading a prompt of so many tokens in one pass."""
    if tokens <= 0:
        return 0.0
    own = pass_of(model, place, 1, tokens, 0)
    attended = sum(layers.flops * layers.attended(tokens / 2) for layers in model.attention) * tokens
    return own.seconds + attended / place.flops("bf16")


def saturation_rows(model: Anatomy, place: Place) -> float:
    """Rows beyond which a pass over dense layers computes instead of waiting for memory."""
    return model.weight.bytes / 2 * place.flops(model.weight.matmul) / place.bandwidth
