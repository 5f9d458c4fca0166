"""Attention with injected context in every layer, rotary positions, norm and MLP; masks of drafted blocks.

B sequences, C context rows, Q query rows, H hidden size, h heads, d head size.  Parameter names follow the released
DFlash and DSpark checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outrider.errors import DrafterError
from outrider.nn.shape import LayerConfig, resolved
from outrider.targets.protocol import LayerSizes, Target
from outrider.targets.sizes import frequencies

BLOCK_ROWS = {"cpu": 128}
"""Rows of drafted blocks that share an attention call in training, by device; elsewhere 1024."""


class Attend(Protocol):
    """Attention as a layer calls it; the caller of the layer decides what is attended to."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """q [B, h, n, d], k and v [B, kv heads, n, d] to the attention's output [B, h, n, d]; keys and values may be
        stored.

        Layers are counted through all modules of a model.  sinks as in `attention`.
        """


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention; each kv head serves a group of query heads.

    mask [B or 1, 1, n, all] additive or bool.  sinks [h]: logits of one more key of every head, whose value is 0
    (gpt-oss, MiMo-V2).
    """
    if sinks is not None:
        mask = q.new_zeros(1, 1, 1, k.shape[2]) if mask is None else mask
        mask = (
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        )
        mask = mask.expand(len(q), q.shape[1], q.shape[2], -1)
        mask = torch.cat([mask, sinks.to(mask.dtype).view(1, -1, 1, 1).expand_as(mask[..., :1])], -1)
        k, v = (F.pad(one, (0, 0, 0, 1)) for one in (k, v))
    times = q.shape[1] // k.shape[1]
    if times > 1 and mask is not None and stores_scores(q):
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def stores_scores(q: Tensor) -> bool:
    """Whether torch would keep all scores of heads that share keys for the backward pass.  With a mask only cuDNN knows
    such heads on a GPU, which does not attend there (`targets.hf.gpu_attention`); keys copied to each head cost far
    less."""
    return q.is_cuda and torch.is_grad_enabled()


def attending(mask: Tensor | None, cache: Any = None) -> Attend:
    """Attention under this mask, over the keys in `cache`, where one is given, and the new ones."""
    before: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        if layer in before:  # asked again: the layer is recomputed, and the cache has more by now
            k, v = (torch.cat([held, own], 2) for held, own in zip(before[layer], (k, v), strict=True))
        elif cache is not None:
            new = k.shape[2]
            k, v = cache.update(k, v, layer)
            if torch.is_grad_enabled():
                before[layer] = k[:, :, :-new], v[:, :, :-new]
        return attention(q, k, v, mask, sinks)

    return attend


class RMSNorm(nn.RMSNorm):
    """torch's, with its weight in the input's dtype: under autocast they differ, and torch would leave its fused
    kernel."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def check_heads(shape: LayerSizes) -> None:
    """Raises DrafterError for heads that don't fit together."""
    if shape.heads % shape.kv_heads:
        raise DrafterError(f"heads {shape.heads} is not a multiple of kv_heads {shape.kv_heads}; choose one that is")
    rotated = int(shape.head_dim * shape.partial_rotary_factor)
    if rotated % 2 or not rotated:
        raise DrafterError(
            f"head_dim {shape.head_dim} times partial_rotary_factor {shape.partial_rotary_factor} is {rotated}; rotary "
            "positions need an even number above 0"
        )


class Attention(nn.Module):
    """Self-attention with rotary positions; its caller decides what is attended to.

    gated: sigmoid(W x + b) scales every number of every head before o_proj, x being the layer's input.
    """

    def __init__(
        self, hidden: int, shape: LayerSizes, width: int | None = None, qk_norm: bool = True, gated: bool = False
    ):
        """width: size of the rows it reads, where they are not of the hidden size that it writes.

        Raises DrafterError for heads that don't fit together.
        """
        super().__init__()
        check_heads(shape)
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        width, inner, kv_inner = width or hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, kv_inner, bias=False)
        self.v_proj = nn.Linear(width, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.gate = nn.Linear(width, inner) if gated else None

    def forward(
        self, x: Tensor, cos_sin: Tensor, attend: Attend, layer: int, rows: Tensor | None = None,
        rows_cos_sin: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, n, width]; rows [B, m, width] give keys and values, x unless given; returns [B, n, H]."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))).transpose(1, 2), cos_sin)
        k, v = self.keys_values(x, cos_sin) if rows is None else self.keys_values(rows, rows_cos_sin)
        out = attend(q, k, v, layer).transpose(1, 2).flatten(2)
        return self.o_proj(out if self.gate is None else out * self.gate(x).sigmoid())

    def keys_values(self, rows: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, h, m, d] of rows [B, m, width]."""
        assert cos_sin is not None
        k = self.k_norm(self.k_proj(rows).unflatten(-1, (self.kv_heads, -1))).transpose(1, 2)
        return rotate(k, cos_sin), self.v_proj(rows).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A decoder layer of a draft model."""

    is_recomputed = False
    """In training its inputs alone are kept for the backward pass, which computes the rest again."""


L = TypeVar("L", bound=DecoderLayer)
P = ParamSpec("P")


def recomputable(forward: Callable[Concatenate[L, P], Tensor]) -> Callable[Concatenate[L, P], Tensor]:
    """A layer's pass, computed again in the backward pass where `is_recomputed` says so.

    What it attends with may be called twice for one pass, and must answer the same.
    """

    # nothing in a layer is drawn
    twice: Callable[..., Tensor] = functools.partial(
        checkpoint, forward, use_reentrant=False, preserve_rng_state=False
    )  # fmt: skip

    @functools.wraps(forward)
    def either(layer: L, *given: P.args, **named: P.kwargs) -> Tensor:
        is_recomputed = layer.is_recomputed and layer.training and torch.is_grad_enabled()
        return (twice if is_recomputed else forward)(layer, *given, **named)

    return either


def recompute(model: nn.Module, is_recomputed: bool) -> int:
    """Set `is_recomputed` of all layers of a model.  Returns how many it has."""
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    for layer in layers:
        layer.is_recomputed = is_recomputed
    return len(layers)


class ContextLayer(DecoderLayer):
    """One decoder layer of a draft model.  The context enters as keys and values only, without this layer's input
    norm."""

    def __init__(
        self, hidden: int, shape: LayerSizes, qk_norm: bool = True, input_norm: bool = True,
        convolution: Callable[[], nn.Module] | None = None,
    ):  # fmt: skip
        """convolution: makes what goes around each sublayer, such as a `DynamicConvolution`; nothing unless given."""
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(hidden, shape, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mlp = MLP(hidden, shape.intermediate)
        self.attention_conv = None if convolution is None else convolution()
        self.mlp_conv = None if convolution is None else convolution()

    @recomputable
    def forward(
        self, x: Tensor, cos_sin: Tensor, attend: Attend, layer: int = 0, context: Tensor | None = None,
        rows_cos_sin: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, Q, H]; context [B, C, H] or none, rows_cos_sin of context and x; returns [B, Q, H]."""

        def attended(own: Tensor) -> Tensor:
            rows = None if context is None else torch.cat([context, own], 1)
            return self.self_attn(own, cos_sin, attend, layer, rows, rows_cos_sin)

        x = x + _around(self.attention_conv, self.input_layernorm(x), attended)
        return x + _around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _around(convolution: nn.Module | None, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    return sublayer(x) if convolution is None else convolution(x, sublayer)


class PairLayer(DecoderLayer):
    """The first layer of EAGLE-3 (arXiv 2503.01840): its attention reads [embedding; feature], each with its own norm;
    the residual is the feature's."""

    def __init__(
        self, hidden: int, shape: LayerSizes, norm_before_residual: bool, qk_norm: bool = True, gated: bool = False
    ):  # fmt: skip
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.self_attn = Attention(hidden, shape, 2 * hidden, qk_norm, gated)
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mlp = MLP(hidden, shape.intermediate)

    @recomputable
    def forward(self, words: Tensor, features: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """words, features [B, n, H]; returns [B, n, H]."""
        normed = self.hidden_norm(features)
        joined = torch.cat([self.input_layernorm(words), normed], -1)
        x = (normed if self.norm_before_residual else features) + self.self_attn(joined, cos_sin, attend, 0)
        return x + self.mlp(self.post_attention_layernorm(x))


class FusedTaps(nn.Module):
    """The input of a draft model that reads several target layers: fc makes one feature of them."""

    config: Any

    def __init__(self, config: LayerConfig, target: Target, taps: tuple[int, ...]):
        super().__init__()
        self.config, self.shape = resolved(config, target.spec)
        self.target, self.taps = target, taps
        self.fc = nn.Linear(target.spec.hidden * len(taps), target.spec.hidden, bias=False)

    def fused(self, taps: Tensor) -> Tensor:
        """Features [B, n, H] of taps [B, n, T, H]."""
        return self.fc(taps.flatten(2).to(self.fc.weight.dtype))


def rotary(positions: Tensor, shape: LayerSizes) -> Tensor:
    """cos and sin of the rotary angles, float32: [2, B, 1, n, rotated / 2] for positions [B, n]."""
    each, scale = frequencies(shape, positions.device)
    phase = positions[:, None, :, None].float() * each
    found = torch.stack([phase.cos(), phase.sin()])
    return found if scale == 1.0 else found * scale


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply rotary positions to x [B, h, n, d]: number i and i + rotated / 2 are rotated together, the rest stays."""
    cos, sin = cos_sin.to(x.dtype)
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated if 2 * half == x.shape[-1] else [*rotated, x[..., 2 * half :]], -1)


def block_mask(
    anchors: Tensor, length: int, block: int, documents: Tensor, live: Tensor, window: int | None = None
) -> Tensor:
    """Attention mask of drafted blocks in training: [B, 1, A * block, length + A * block] bool.

    A block whose anchor is at position a attends to context strictly before a, of a's own text, and to all of itself,
    never to another block.  anchors [B, A] positions, documents [B, S], of which the first `length` are context; live
    [B, A] bool; a dead block attends to itself alone. block: its input slots.  window: positions back from each slot
    that it attends to, its own included; at least a block, all unless given.
    """
    before = torch.arange(length, device=anchors.device) < anchors[..., None]
    own = documents.gather(1, anchors)[..., None] == documents[:, None, :length]
    itself = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).repeat_interleave(block, 1)
    mask = torch.cat([before & own & live[..., None], itself.expand(len(anchors), -1, -1)], -1)
    mask = mask.repeat_interleave(block, 1)
    if window is not None:
        slots = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
        mask[..., :length] &= torch.arange(length, device=anchors.device) > slots[..., None] - window
    return mask[:, None]


class BlockAttention:
    """Attention of drafted blocks in training as under `block_mask`, a few blocks at a time.

    Blocks do not attend to each other, so most scores of one mask over all are computed to be hidden; here a group has
    the context up to its last anchor and its own keys alone.
    """

    def __init__(self, anchors: Tensor, block: int, documents: Tensor, live: Tensor, window: int | None = None):
        """As `block_mask`; anchors ascending."""
        self._length, self._width = documents.shape[1], block
        self._blocks = max(1, BLOCK_ROWS.get(anchors.device.type, 1024) // block)
        groups = anchors.split(self._blocks, 1)
        # a GPU would have to be waited for
        is_cpu = anchors.device.type == "cpu"
        self._ends = [int(at.max()) if is_cpu else self._length for at in groups]
        parts = zip(groups, live.split(self._blocks, 1), self._ends, strict=True)
        self._masks = [block_mask(at, end, block, documents, there, window) for at, there, end in parts]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        if self._masks[0].dtype != q.dtype:  # once for all layers: each would store its own for the backward pass
            self._masks = [torch.zeros_like(one, dtype=q.dtype).masked_fill(~one, -torch.inf) for one in self._masks]
        rows, found = self._blocks * self._width, []
        own = (x[:, :, self._length :].split(rows, 2) for x in (k, v))
        for asks, keys, values, end, mask in zip(q.split(rows, 2), *own, self._ends, self._masks, strict=True):
            keys, values = (torch.cat([x[:, :, :end], mine], 2) for x, mine in ((k, keys), (v, values)))
            found.append(attention(asks, keys, values, mask, sinks))
        return torch.cat(found, 2)


class Shift(nn.Module):
    """h_k <- W [h_k; h_{k-1}] within a block; slot 0 is its own predecessor."""

    def __init__(self, hidden: int):
        super().__init__()
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(torch.eye(hidden, 2 * hidden))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K, H]."""
        return self.proj(torch.cat([x, torch.cat([x[..., :1, :], x[..., :-1, :]], -2)], -1))


def rollout_mask(text_mask: Tensor, at: Tensor, taken: Sequence[int], slots: int) -> Tensor:
    """Attention mask of the rows of block len(taken) + 1 over all blocks so far, [B, A * K, (P + len(taken) * A) * K]
    bool.

    Rows attend to whole first blocks of earlier pairs, to the taken slots of their own pair's earlier blocks, and to
    their own block up to themselves.  text_mask [B, P, P] is the mask of pairs; at [B, A], in the first block every
    pair.
    """
    order = torch.arange(slots, device=at.device)
    own = [*((order < count).expand(slots, -1) for count in taken), order[:, None] >= order]
    is_own = torch.arange(text_mask.shape[-1], device=at.device) == at[..., None]
    before = text_mask.gather(1, at[..., None].expand(-1, -1, text_mask.shape[-1]))
    # [B, A, K, P, K]
    first = torch.where(is_own[:, :, None, :, None], own[0][:, None], before[:, :, None, :, None])
    same = torch.eye(at.shape[1], dtype=torch.bool, device=at.device)[:, None, :, None]
    later = [(same & own_mask[:, None]).expand(len(at), -1, -1, -1, -1) for own_mask in own[1:]]
    return torch.cat([block.flatten(3).flatten(1, 2) for block in (first, *later)], -1)
