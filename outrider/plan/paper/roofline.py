"""The time of a pass on paper: bytes / bandwidth or operations / their speed, whichever is longer.

Layers, steps and exchanges between accelerators also have a fixed time.  Linear layers and attention are two separate
rooflines: with long texts attention is bound by memory while the layers are bound by compute.  No torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from outrider.plan.paper.anatomy import Anatomy, Attention
from outrider.plan.paper.hardware import Place

Bound = Literal["memory", "compute", "launch"]
FEW_ROWS = 32
"""Maximum number of rows of a pass, over all texts, for which matrix products and attention have special kernels
(`outrider.kernels.gpu.FEW`); above it, torch's are used."""
MATRIX_TEXTS = 4
"""Maximum number of texts whose attention over several rows is two matrix products
(`targets.hf.gpu_attention.FEW_HEADS`, divided by the usual eight heads of keys)."""
OVERLAP = 3.5
"""Exponent with which the times of reading and computing combine; infinity would mean that they overlap completely."""


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
    efficiency, all_rows = place.efficiency, batch * rows
    weights, cache = weights_read(model, all_rows), batch * model.cache_bytes(context)
    products = 2 * model.active * all_rows
    attended = all_rows * sum(layers.flops * layers.attended(context) for layers in model.attention)
    kind = model.expert_weight.matmul if model.experts else model.weight.matmul
    reading, multiplying = weights / place.bandwidth, products / place.flops(kind)
    is_few = all_rows <= FEW_ROWS
    if is_few:
        work = reading + multiplying * efficiency.matmuls / efficiency.few_matmuls
    else:  # near saturation they do not overlap completely
        work = (reading**OVERLAP + multiplying**OVERLAP) ** (1 / OVERLAP)
    attention = sum(_attention_s(place, layers, batch, rows, context) for layers in model.attention)
    overhead = model.layers * (efficiency.layer_s if is_few else efficiency.many_layer_s)
    if place.devices > 1:
        overhead += 2 * model.layers * efficiency.exchange_s
    bound: Bound = "launch" if overhead > work + attention else "memory" if reading >= multiplying else "compute"
    return Pass(work + attention + overhead, weights + cache, products + attended, bound)


def _attention_s(place: Place, layers: Attention, batch: float, rows: float, context: float) -> float:
    """Seconds of attention in all of these layers, by the kernel that is used for a pass of this size."""
    efficiency, columns = place.efficiency, layers.attended(context)
    reading = batch * layers.cache_bytes * columns / place.bandwidth
    operations = batch * rows * layers.flops * columns / place.flops("bf16") * efficiency.matmuls
    if batch * rows <= FEW_ROWS:  # the kernel for few rows processes a text's columns in a single pass
        waiting = layers.layers * columns * efficiency.few_column_s
        return (
            reading * efficiency.bandwidth / efficiency.few_bandwidth + operations / efficiency.few_attention + waiting
        )
    fixed = layers.layers * efficiency.attention_s
    if rows == 1:
        return fixed + reading
    if batch <= MATRIX_TEXTS:  # as two matrix products, with all scores in memory
        return fixed + operations / efficiency.matrix_attention
    waiting = layers.layers * columns * efficiency.many_column_s
    return fixed + max(waiting, reading * efficiency.bandwidth / efficiency.many_bandwidth)


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
