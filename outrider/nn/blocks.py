"""Attention in which every layer also looks at injected context, rotary positions, norm and MLP; masks of drafted blocks.

B sequences, C context rows, Q query rows, H hidden size, h heads, d head size.  Parameter names follow the released DFlash and
DSpark checkpoints.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import DrafterError
from outrider.nn.shape import LayerConfig, resolved
from outrider.targets.protocol import LayerSizes, Target
from outrider.targets.sizes import frequencies


class KeyValues(Protocol):
    """Where a layer's keys and values are kept between passes."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]: ...


class RMSNorm(nn.RMSNorm):
    """torch's, with its weight in the input's dtype: under autocast they differ, and torch would leave its fused kernel."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def check_heads(shape: LayerSizes) -> None:
    """Raises DrafterError for heads that don't fit together."""
    if shape.heads % shape.kv_heads:
        raise DrafterError(f"heads {shape.heads} is no multiple of kv_heads {shape.kv_heads}")
    turning = int(shape.head_dim * shape.partial_rotary_factor)
    if turning % 2 or not turning:
        raise DrafterError(
            f"head_dim {shape.head_dim}, of which {turning} numbers turn, is {'odd' if turning else 'too small'}; rotary "
            "positions turn pairs, choose an even one"
        )


class Attention(nn.Module):
    """Queries from the block alone; keys and values from context and block, in that order."""

    def __init__(self, hidden: int, shape: LayerSizes, width: int | None = None):
        """width: size of the rows it reads, where they are not of the hidden size that it writes.

        Raises DrafterError for heads that don't fit together.
        """
        super().__init__()
        check_heads(shape)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        width = hidden if width is None else width
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        q_angles: Tensor,
        k_angles: Tensor,
        mask: Tensor | None,
        kept: KeyValues | None,
        layer: int,
    ) -> Tensor:
        """x [B, Q, H]; rows [B, C + Q, H] give keys and values, x unless given; mask [B or 1, 1, Q, all] additive or bool."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))).transpose(1, 2), q_angles)
        k, v = self.keys_values(x if rows is None else rows, k_angles)
        if kept is not None:
            k, v = kept.update(k, v, layer)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def keys_values(self, rows: Tensor, k_angles: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, h, n, d] of rows [B, n, H]."""
        k = self.k_norm(self.k_proj(rows).unflatten(-1, (self.kv_heads, self.head_dim))).transpose(1, 2)
        v = self.v_proj(rows).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return rotate(k, k_angles), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ContextLayer(nn.Module):
    """One decoder layer of a draft model.  The context enters as keys and values only, without this layer's input norm."""

    def __init__(self, hidden: int, shape: LayerSizes):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.self_attn = Attention(hidden, shape)
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mlp = MLP(hidden, shape.intermediate)

    def forward(
        self, x: Tensor, context: Tensor | None, q_angles: Tensor, k_angles: Tensor, mask: Tensor | None,
        kept: KeyValues | None = None, layer: int = 0,
    ) -> Tensor:  # fmt: skip
        """x [B, Q, H], context [B, C, H] or none; returns [B, Q, H]."""
        normed = self.input_layernorm(x)
        rows = None if context is None else torch.cat([context, normed], 1)
        x = x + self.self_attn(normed, rows, q_angles, k_angles, mask, kept, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class PairLayer(nn.Module):
    """The first layer of EAGLE-3 (arXiv 2503.01840): its attention reads embedding and feature side by side, each with a norm
    of its own; the residual is the feature's."""

    def __init__(self, hidden: int, shape: LayerSizes, self_attn: nn.Module, norm_before_residual: bool = False):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mlp = MLP(hidden, shape.intermediate)

    def forward(self, words: Tensor, features: Tensor, *seen: Any) -> Tensor:
        """words, features [B, n, H]; seen: what its attention is told besides the pairs [B, n, 2 H]; returns [B, n, H]."""
        normed = self.hidden_norm(features)
        pairs = torch.cat([self.input_layernorm(words), normed], -1)
        x = (normed if self.norm_before_residual else features) + self.self_attn(pairs, *seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class FusedTaps(nn.Module):
    """What a draft model that looks at a few of the target's layers begins with: fc makes one feature of them."""

    config: Any

    def __init__(self, config: LayerConfig, target: Target, taps: tuple[int, ...]):
        super().__init__()
        self.config, self.shape = resolved(config, target.spec)
        self.target, self.taps = target, taps
        self.fc = nn.Linear(target.spec.hidden * len(taps), target.spec.hidden, bias=False)

    def fused(self, taps: Tensor) -> Tensor:
        """Features [B, n, H] of taps [B, n, T, H]."""
        return self.fc(taps.flatten(2).to(self.fc.weight.dtype))


def angles(positions: Tensor, shape: LayerSizes) -> Tensor:
    """cos and sin of the rotary angles, float32: [2, B, 1, n, pairs of a head that turn] for positions [B, n]."""
    each, scale = frequencies(shape, positions.device)
    turn = positions[:, None, :, None].float() * each
    found = torch.stack([turn.cos(), turn.sin()])
    return found if scale == 1.0 else found * scale


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn each half-pair of x [B, h, n, d] by its angle; what is behind the last pair stays."""
    cos, sin = angle.to(x.dtype)
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(turned if 2 * pairs == x.shape[-1] else [*turned, x[..., 2 * pairs :]], -1)


def block_mask(anchors: Tensor, length: int, block: int, documents: Tensor, live: Tensor) -> Tensor:
    """What drafted blocks may see in training: [B, 1, A * block, length + A * block] bool.

    A block whose anchor stands at position a sees context strictly before a, of a's own text, and all of itself; blocks never
    see each other.  anchors [B, A] positions, documents [B, length], live [B, A] bool; a dead block sees itself alone.
    block: its input slots.
    """
    before = torch.arange(length, device=anchors.device) < anchors[..., None]
    own = documents.gather(1, anchors)[..., None] == documents[:, None]
    itself = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).repeat_interleave(block, 1)
    sees = torch.cat([before & own & live[..., None], itself.expand(len(anchors), -1, -1)], -1)
    return sees.repeat_interleave(block, 1)[:, None]
