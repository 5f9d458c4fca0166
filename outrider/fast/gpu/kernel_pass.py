"""The pass of a step on a GPU with our kernels, for decoders with the architecture of Llama, Mistral and Qwen.

They are recognised by the names and sizes of their weights, and compared with the model's own modules before they are
used (`CompiledStep.cuda_graphs`).  Other models, other dtypes and prompts run in transformers' code.

R rows of a pass, n tokens a row, M = R * n, K inner and N outer size of a product, T taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from outrider.decoding.state import likeliest
from outrider.kernels import gpu
from outrider.kernels.gpu import Heads, Tiles
from outrider.targets.cache.attention_mask import PassLayout, additive
from outrider.targets.hf import gpu_attention

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]

MOST = 1024
"""Maximum number of rows of a pass; larger passes read prompts."""
TILES = {
    "project": Tiles(64, 256, 4, 4, 1), "out": Tiles(32, 512, 4, 4, 2), "gate": Tiles(128, 128, 8, 4, 2),
    "down": Tiles(32, 256, 4, 6, 0), "head": Tiles(128, 128, 8, 4, 2),
}  # fmt: skip
"""How each product is divided, as measured on an H200 (benchmarks/pages/on-a-gpu.md)."""
NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
PROJECTIONS = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
HEAD_NORMS = {f"self_attn.{name}_norm.weight" for name in "qk"}
BIASES = {f"self_attn.{name}_proj.bias" for name in "qkv"}
TYPES = (torch.bfloat16, torch.float32) if gpu.IS_INTERPRETED else (torch.bfloat16,)


class GpuPass(nn.Module):
    """Replaces `TracedPass` in captured passes; returns the logits of every token, whatever `logit_indices` are."""

    def __init__(self, target: Any, written: nn.Module):
        """written: the pass in transformers' code.  Raises TypeError or AttributeError for another kind of model."""
        super().__init__()
        if not gpu.IS_INTERPRETED and torch.cuda.get_device_capability(target.device)[0] < gpu.CAPABILITY:
            raise TypeError(f"the kernels are for compute capability {gpu.CAPABILITY} and later")
        self.target, self.written = target, written
        self.trunk, self.head = target.model.model, target.model.lm_head
        for layer in self.trunk.layers:
            more = {name for name, _ in layer.named_parameters()} - NORMS - PROJECTIONS - MLP
            if more not in (set(), HEAD_NORMS, BIASES) or type(layer.mlp.act_fn) not in (nn.SiLU, SiLUActivation):
                raise TypeError(f"{type(layer).__name__} has parts that the kernels do not support")
        attention, config = self.trunk.layers[0].self_attn, target.model.config
        size, sides = attention.head_dim, [len(each.weight) for each in (attention.q_proj, attention.k_proj)]
        self.heads = Heads(sides[0] // size, sides[1] // size, size, hasattr(attention, "q_norm"))
        self.eps = self.trunk.norm.variance_epsilon
        inner = config.hidden_size, config.intermediate_size, sides[0]
        is_odd = self.head.bias is not None or size not in (64, 128) or any(each % 64 for each in inner)
        if is_odd or len(self.head.weight) % 16 or any(target.family.limits.values()):
            raise TypeError(f"{target.spec.name} has sizes or limits that the kernels do not support")
        for name, weight in target.model.named_parameters():
            if weight.dtype not in TYPES or weight.device != target.device or not weight.is_contiguous():
                raise TypeError(f"the kernels do not support {name}, {weight.dtype} on {weight.device}")

    def forward(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, starts: Tensor, columns: Tensor, taps: Tensor,
        logit_indices: Tensor, buffers: Sequence[Tensor],
    ) -> Sequence[Tensor]:  # fmt: skip
        """As `TracedPass.forward`."""
        shape = tokens.shape
        if tokens.numel() > MOST:
            outputs: Sequence[Tensor] = self.written(
                tokens, depths, tree_mask, starts, columns, taps, logit_indices, buffers
            )
            return outputs
        words = self.target.embed(tokens).flatten(0, 1)
        layout = PassLayout(starts, columns, shape[1])
        positions = layout.positions(depths).clamp(max=self.target.spec.context - 1)
        cos_sin = [each.flatten(0, 1).contiguous() for each in self.trunk.rotary_emb(words, positions)]
        attend = self._attention(words, layout, tree_mask)
        states = words.new_empty(len(self.trunk.layers) + 1, *words.shape)
        states[0] = words
        for i, layer in enumerate(self.trunk.layers):
            self._layer(layer, states[i], states[i + 1], cos_sin, layout, attend, buffers[2 * i : 2 * i + 2])
        hidden = gpu.normed(states[-1], self.trunk.norm.weight, self.eps)
        logits = self._product(hidden, self.head, None, words.new_empty(len(words), len(self.head.weight)), "head")
        logits, hidden = logits.view(*shape, -1), hidden.view(*shape, -1)
        tapped = states[1:].index_select(0, taps).unflatten(1, shape).permute(1, 2, 0, 3)
        return logits, hidden, likeliest(logits), tapped

    def _layer(
        self, layer: Any, before: Tensor, after: Tensor, cos_sin: Sequence[Tensor], layout: PassLayout, attend: Attend,
        cache: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """From the residual stream `before` [M, H] to `after`; writes keys and values to this layer's cache."""
        attention, heads = layer.self_attn, self.heads
        # without norms, any tensors, since they are not read
        norms = (attention.q_norm.weight, attention.k_norm.weight) if heads.are_normed else cos_sin
        keys, values = cache
        projected = self._projected(before, layer.input_layernorm.weight, attention)
        query = gpu.rotated(projected, norms, cos_sin, layout.starts, keys, values, layout.width, self.eps, heads)
        attended = attend(query, keys, values, attention)
        middle = self._product(attended, attention.o_proj, before, torch.empty_like(before), "out")
        gated = self._gated(middle, layer.post_attention_layernorm.weight, layer.mlp)
        self._product(gated, layer.mlp.down_proj, middle, after, "down")

    def _attention(self, like: Tensor, layout: PassLayout, tree_mask: Tensor) -> Attend:
        """A function from queries [M, h, d], the cache's keys and values, and a layer's module to [M, h d]."""
        end, shape = len(layout.columns), tree_mask.shape[:2]
        if len(like) <= gpu.FEW:
            attention = gpu.CachedAttention(like, layout.starts, tree_mask, end, self.heads)
            return lambda query, keys, values, module: attention.attend(query, keys, values, module.scaling)
        mask = additive(layout.mask(tree_mask), like.dtype)

        def attend(query: Tensor, keys: Tensor, values: Tensor, module: Any) -> Tensor:
            rows, held = query.unflatten(0, shape).transpose(1, 2), (keys[:, :, :end], values[:, :, :end])
            return gpu_attention.attend(module, rows, *held, mask, scaling=module.scaling)[0].flatten(0, 1).flatten(1)

        return attend

    def _projected(self, x: Tensor, norm: Tensor, attention: Any) -> Tensor:
        """Queries, keys and values of normalised x, [M, h d + 2 H d]."""
        layers = attention.q_proj, attention.k_proj, attention.v_proj
        if len(x) > gpu.FEW:
            normed = gpu.normed(x, norm, self.eps)
            return torch.cat([F.linear(normed, each.weight, each.bias) for each in layers], 1)
        biases = None if attention.q_proj.bias is None else [each.bias for each in layers]
        return gpu.project(x, norm, [each.weight for each in layers], biases, self.eps, TILES["project"])

    def _gated(self, x: Tensor, norm: Tensor, mlp: Any) -> Tensor:
        """silu(gate) * up of normalised x, [M, intermediate size]."""
        if len(x) > gpu.FEW:
            normed = gpu.normed(x, norm, self.eps)
            return F.silu(F.linear(normed, mlp.gate_proj.weight)).mul_(F.linear(normed, mlp.up_proj.weight))
        return gpu.gate(x, norm, mlp.gate_proj.weight, mlp.up_proj.weight, self.eps, TILES["gate"])

    def _product(self, x: Tensor, layer: Any, before: Tensor | None, out: Tensor, name: str) -> Tensor:
        """The product of x, plus `before` if given, into out [M, N]."""
        if len(x) <= gpu.FEW:
            gpu.multiply(x, layer.weight, before, out, TILES[name])
            return out
        if before is None:
            return torch.mm(x, layer.weight.T, out=out)
        return torch.addmm(before, x, layer.weight.T, out=out)
