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
from outrider.targets.quantised import dtype_of
from outrider.targets.sizes import frequencies

BLOCK_ROWS = {"cpu": 128}
"""Rows of drafted blocks per attention call in training, by device type; 1024 on others."""


class Attend(Protocol):
    """Attention as a layer calls it; the caller of the layer provides the mask and the cache."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """The attention's output [B, h, n, d] for q [B, h, n, d], k and v [B, kv heads, n, d], which may be stored.

        layer: counted over all modules of a model.  sinks as in `attention`.
        """


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention; each kv head serves a group of query heads.

    mask [B or 1, 1, n, all] additive or bool.  sinks [h]: logits of one more key per head, with value 0 (gpt-oss,
    MiMo-V2).
    """
    if sinks is not None:
        mask = q.new_zeros(1, 1, 1, k.shape[2]) if mask is None else mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        mask = mask.expand(len(q), q.shape[1], q.shape[2], -1)
        mask = torch.cat([mask, sinks.to(mask.dtype).view(1, -1, 1, 1).expand_as(mask[..., :1])], -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    group = q.shape[1] // k.shape[1]
    if group > 1 and mask is not None and stores_scores(q):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def stores_scores(q: Tensor) -> bool:
    """Whether torch would keep all scores for the backward pass if heads share keys.

    With a mask, only cuDNN supports shared keys on a GPU, and it is off (`targets.hf.gpu_attention`); copying the keys
    to each head costs far less.
    """
    return q.is_cuda and torch.is_grad_enabled()


def attending(mask: Tensor | None, cache: Any = None) -> Attend:
    """Attention under this mask over the new keys, and those in `cache` if there is one."""
    before: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        if layer in before:  # the layer is recomputed, and the cache has grown in the meantime
            k, v = (torch.cat([old, new_rows], 2) for old, new_rows in zip(before[layer], (k, v), strict=True))
        elif cache is not None:
            new = k.shape[2]
            k, v = cache.update(k, v, layer)
            if torch.is_grad_enabled():
                before[layer] = k[:, :, :-new], v[:, :, :-new]
        return attention(q, k, v, mask, sinks)

    return attend


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with the weight cast to the input's dtype: under autocast they differ, in which case torch would
    not use its fused kernel."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def check_heads(shape: LayerSizes) -> None:
    """Raises DrafterError for inconsistent numbers or sizes of heads."""
    if shape.heads % shape.kv_heads:
        raise DrafterError(f"heads {shape.heads} is not a multiple of kv_heads {shape.kv_heads}; choose one that is")
    rotated = int(shape.head_dim * shape.partial_rotary_factor)
    if rotated % 2 or not rotated:
        raise DrafterError(
            f"head_dim {shape.head_dim} times partial_rotary_factor {shape.partial_rotary_factor} is {rotated}; rotary "
            "positions need an even number above 0"
        )


class Attention(nn.Module):
    """Self-attention with rotary positions; the caller provides the mask and the cache.

    gated: the output is multiplied by sigmoid(W x + b) before o_proj, where x is the layer's input.
    """

    def __init__(
        self, hidden: int, shape: LayerSizes, width: int | None = None, qk_norm: bool = True, gated: bool = False
    ):
        """width: size of its input rows; the hidden size by default.

        Raises DrafterError for inconsistent numbers or sizes of heads.
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
        """x [B, n, width]; keys and values are of rows [B, m, width], by default of x; returns [B, n, H]."""
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
    """Recompute activations in the backward pass; only the layer's inputs are kept."""


L = TypeVar("L", bound=DecoderLayer)
P = ParamSpec("P")


def recomputable(forward: Callable[Concatenate[L, P], Tensor]) -> Callable[Concatenate[L, P], Tensor]:
    """A layer's forward that is recomputed in the backward pass if `is_recomputed`.

    The `Attend` may then be called twice per pass, and must return the same both times.
    """

    # a layer uses no random numbers
    twice: Callable[..., Tensor] = functools.partial(
        checkpoint, forward, use_reentrant=False, preserve_rng_state=False
    )  # fmt: skip

    @functools.wraps(forward)
    def either(layer: L, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        is_recomputed = layer.is_recomputed and layer.training and torch.is_grad_enabled()
        return (twice if is_recomputed else forward)(layer, *args, **kwargs)

    return either


def recompute(model: nn.Module, is_recomputed: bool) -> int:
    """Set `is_recomputed` of all layers of a model.  Returns their number."""
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    for layer in layers:
        layer.is_recomputed = is_recomputed
    return len(layers)


class ContextLayer(DecoderLayer):
    """A decoder layer whose context enters as keys and values only, without the layer's input norm."""

    def __init__(
        self, hidden: int, shape: LayerSizes, qk_norm: bool = True, input_norm: bool = True,
        convolution: Callable[[], nn.Module] | None = None,
    ):  # fmt: skip
        """convolution: makes a module around each sublayer, such as a `DynamicConvolution`; none by default."""
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
        """x [B, Q, H]; context [B, C, H] or None, with rows_cos_sin of context and x; returns [B, Q, H]."""

        def attended(normed: Tensor) -> Tensor:
            rows = None if context is None else torch.cat([context, normed], 1)
            return self.self_attn(normed, cos_sin, attend, layer, rows, rows_cos_sin)

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
    """The input of a draft model that reads several target layers: fc fuses them into one feature."""

    config: Any

    def __init__(self, config: LayerConfig, target: Target, taps: tuple[int, ...]):
        super().__init__()
        self.config, self.shape = resolved(config, target.spec)
        self.target, self.taps = target, taps
        self.fc = nn.Linear(target.spec.hidden * len(taps), target.spec.hidden, bias=False)

    def fused(self, taps: Tensor) -> Tensor:
        """Features [B, n, H] of taps [B, n, T, H]."""
        return self.fc(taps.flatten(2).to(dtype_of(self.fc)))


def rotary(positions: Tensor, shape: LayerSizes) -> Tensor:
    """cos and sin of the rotary angles, float32: [2, B, 1, n, rotated / 2] for positions [B, n]."""
    each, scale = frequencies(shape, positions.device)
    phase = positions[:, None, :, None].float() * each
    cos_sin = torch.stack([phase.cos(), phase.sin()])
    return cos_sin if scale == 1.0 else cos_sin * scale


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply rotary positions to x [B, h, n, d]: numbers i and i + rotated / 2 are rotated together; the rest is
    unchanged."""
    cos, sin = cos_sin.to(x.dtype)
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated if 2 * half == x.shape[-1] else [*rotated, x[..., 2 * half :]], -1)


def block_mask(
    anchors: Tensor, length: int, block: int, documents: Tensor, live: Tensor, window: int | None = None
) -> Tensor:
    """Attention mask of drafted blocks in training: [B, 1, A * block, length + A * block] bool.

    A block with its anchor at position a attends to itself and to context of the same text strictly before a, never to
    another block.  anchors [B, A] positions; documents [B, S], of which the first `length` are context; live [B, A]
    bool, others attend only to themselves.  block: its input slots.  window: positions that each slot attends to,
    itself and those just before it, at least a block; None for all.
    """
    before = torch.arange(length, device=anchors.device) < anchors[..., None]
    is_same_text = documents.gather(1, anchors)[..., None] == documents[:, None, :length]
    itself = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).repeat_interleave(block, 1)
    mask = torch.cat([before & is_same_text & live[..., None], itself.expand(len(anchors), -1, -1)], -1)
    mask = mask.repeat_interleave(block, 1)
    if window is not None:
        slots = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
        mask[..., :length] &= torch.arange(length, device=anchors.device) > slots[..., None] - window
    return mask[:, None]


class BlockAttention:
    """Attention of drafted blocks in training, equal to that under `block_mask` but a few blocks at a time.

    Blocks do not attend to each other, so one mask over all would hide most scores; here a group of blocks sees only
    its own keys and the context up to its last anchor.
    """

    def __init__(self, anchors: Tensor, block: int, documents: Tensor, live: Tensor, window: int | None = None):
        """Like `block_mask`; anchors ascending."""
        self._length, self._width = documents.shape[1], block
        self._blocks = max(1, BLOCK_ROWS.get(anchors.device.type, 1024) // block)
        groups = anchors.split(self._blocks, 1)
        # on a GPU it would synchronise
        is_cpu = anchors.device.type == "cpu"
        self._ends = [int(at.max()) if is_cpu else self._length for at in groups]
        parts = zip(groups, live.split(self._blocks, 1), self._ends, strict=True)
        self._masks = [block_mask(at, end, block, documents, there, window) for at, there, end in parts]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        # once for all layers; otherwise each would keep a copy for the backward pass
        if self._masks[0].dtype != q.dtype:
            self._masks = [torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf) for mask in self._masks]
        rows, outputs = self._blocks * self._width, []
        block_parts = (x[:, :, self._length :].split(rows, 2) for x in (k, v))
        for queries, keys, values, end, mask in zip(
            q.split(rows, 2), *block_parts, self._ends, self._masks, strict=True
        ):
            keys, values = (torch.cat([x[:, :, :end], block_part], 2) for x, block_part in ((k, keys), (v, values)))
            outputs.append(attention(queries, keys, values, mask, sinks))
        return torch.cat(outputs, 2)


class Shift(nn.Module):
    """h_k <- W [h_k; h_{k-1}] within a block; h_0 takes itself as predecessor."""

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

    Rows attend to the whole first blocks of earlier pairs, to the `taken` slots of their pair's earlier blocks, and to
    their own block up to themselves.  text_mask [B, P, P] is the mask of pairs; at [B, A] pairs, all of them in the
    first block.
    """
    order = torch.arange(slots, device=at.device)
    own_masks = [*((order < count).expand(slots, -1) for count in taken), order[:, None] >= order]
    is_own = torch.arange(text_mask.shape[-1], device=at.device) == at[..., None]
    before = text_mask.gather(1, at[..., None].expand(-1, -1, text_mask.shape[-1]))
    # [B, A, K, P, K]
    first = torch.where(is_own[:, :, None, :, None], own_masks[0][:, None], before[:, :, None, :, None])
    same = torch.eye(at.shape[1], dtype=torch.bool, device=at.device)[:, None, :, None]
    later = [(same & own_mask[:, None]).expand(len(at), -1, -1, -1, -1) for own_mask in own_masks[1:]]
    return torch.cat([block.flatten(3).flatten(1, 2) for block in (first, *later)], -1)
