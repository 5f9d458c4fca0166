"""EAGLE-3: one decoder layer on fused states of a few target layers, trained on its own output.  (arXiv 2503.01840.)

States of low, middle and high layers become one feature g = fc([low; mid; high]).  A layer reads [norm(embedding of
token i + 1); norm(g_i)] and adds to g_i; its output goes to the head and is the next step's g.  Training unrolls `ttt`
such steps, so that drafting sees the same inputs as training.  The paper's loss: cross entropy against the target's
distribution (KL up to a constant), with step s weighted by 0.8 ** s.  Trees are EAGLE-2's (arXiv 2406.16858).

Assumes that the target's layers fuse linearly and that one layer is enough for a few tokens.

Options from later work: `fc_norm` and `norm_output` (EAGLE-3.1); `gated` attention as in Baichuan-M3 (arXiv
2602.06570), whose formula is not public: ours scales the attention's output by sigmoid(W x + b) before o_proj;
`aggregate: metaquery` (Hyper-Bagel, arXiv 2509.18824): learned queries attend to a token's taps, added to fc, initially
zero.

Differs from the paper: the head is the target's own, over all tokens, unless `vocabulary` is set.  The target's
distribution
is not renormalised over a reduced vocabulary, so tokens outside it count as rejected.  Rollouts end with their text or
mask and do not continue over padding.

Use it if your engine has no block drafter, or if a released head exists for your target.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from outrider.method import Method
from outrider.nn.blocks import Attend, FusedTaps, PairLayer, RMSNorm
from outrider.nn.drafting.recurrent import RecurrentConfig, RecurrentModel
from outrider.nn.heads import ReducedHead, VocabularyModel
from outrider.nn.shape import resolve_taps
from outrider.targets.protocol import LayerSizes, Target
from outrider.targets.quantised import dtype_of

METHOD = Method(
    cost="each", usual=3, tokens=3, chain={"width": 1},
    engines={
        "vllm": {
            "name": "eagle3",
            "formats": ("speculators", "eagle"),
            "varies": True,
            "notes": (
                (
                    "on a target with recurrent layers it loses a block of cached prefix per turn of a "
                    "conversation; see disable_eagle_block_drop"
                ),
            ),
        },
        "sglang": {"name": "EAGLE3", "formats": ("sglang", "eagle"), "varies": True, "trees": True},
        "trtllm": {
            "name": "Eagle3",
            "facts": ("eagle3_layers_to_capture",),
            "formats": ("trtllm", "sglang", "eagle"),
            "varies": True,
            "trees": True,
        },
        "llamacpp": {"name": "draft-eagle3", "formats": ("gguf",), "cuts": True},
    },
    layers={
        "speculators": ("eagle_aux_hidden_state_layer_ids", 1),
        "sglang": ("eagle_config.eagle_aux_hidden_state_layer_ids", 0),
        "trtllm": ("eagle_config.eagle_aux_hidden_state_layer_ids", 0),
        "deepspec": ("target_layer_ids", 0),
        "gguf": ("eagle3.target_layers", 1),
        "eagle": ("eagle_aux_hidden_state_layer_ids", 1),
    },
    read_only=("eagle",),
    guessed=("eagle",),
)  # fmt: skip


class Config(RecurrentConfig):
    kind: Literal["eagle3"] = "eagle3"
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; by default three: the second, the one before the middle, the fourth
    last."""
    vocabulary: PositiveInt | None = None
    """Number of tokens it can draft (the most frequent ones), with a trained head; by default all tokens, with the
    target's head."""
    qk_norm: bool = False
    """Normalise queries and keys, as in Qwen3's layers but not in Llama's."""
    fc_norm: bool = False
    """Normalise each tap before the fusion (EAGLE-3.1)."""
    norm_output: bool = False
    """Feed back the final norm's output, not its input (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """The residual is the normalised feature, not the feature itself, as in some released heads."""
    gated: bool = False
    """Gate the attention's output by the layer's input."""
    aggregate: Literal["fc", "metaquery"] = "fc"
    """How taps are fused: by a linear layer; with metaquery, also by learned queries."""
    queries: PositiveInt = 4
    """Number of learned queries of `metaquery`."""


class MetaQuery(nn.Module):
    """Learned queries attend to the taps of one token; their concatenated output is projected.  Zero at first."""

    def __init__(self, hidden: int, taps: int, queries: int, shape: LayerSizes):
        super().__init__()
        width = shape.heads * shape.head_dim
        self.heads = shape.heads
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.level = nn.Parameter(torch.randn(taps, hidden) * 0.02)
        """[T, H], an embedding of each tap."""
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.o_proj = nn.Linear(queries * width, hidden, bias=False)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, taps: Tensor) -> Tensor:
        """taps [B, n, T, H]; returns [B, n, H]."""
        x = self.norm(taps).flatten(0, 1) + self.level.to(taps.dtype)
        k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        q = self.queries.to(k.dtype).unflatten(-1, (self.heads, -1)).transpose(0, 1).expand(len(x), -1, -1, -1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(attended.transpose(1, 2).flatten(1)).unflatten(0, taps.shape[:2])


class Model(VocabularyModel, RecurrentModel, FusedTaps):
    """fc over the taps, one layer, a norm, a head."""

    def __init__(self, config: Config, target: Target):
        taps = three(target.spec.layers) if config.taps is None else config.taps
        super().__init__(config, target, resolve_taps(taps, target.spec))
        hidden, shape = target.spec.hidden, self.shape
        self.fc_norm = nn.ModuleList(RMSNorm(hidden, shape.rms_norm_eps) for _ in self.taps) if config.fc_norm else None
        self.metaquery = (
            MetaQuery(hidden, len(self.taps), config.queries, shape) if config.aggregate == "metaquery" else None
        )
        layer = PairLayer(hidden, shape, config.norm_before_residual, config.qk_norm, config.gated)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.head = None if config.vocabulary is None else ReducedHead(target, config.vocabulary)

    def features(self, taps: Tensor) -> Tensor:
        taps = taps.to(dtype_of(self.fc))
        if self.fc_norm is not None:
            taps = torch.stack([norm(taps[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        fused = self.fused(taps)
        return fused if self.metaquery is None else fused + self.metaquery(taps)

    def step(self, module: int, words: Tensor, features: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        output = self.layers[0](words.to(features.dtype), features, angle, attend)
        return self.norm(output) if self.config.norm_output else output

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden if self.config.norm_output else self.norm(hidden))


def three(layers: int) -> tuple[int, ...]:
    """Low, middle and high of a target's layers, without repetition."""
    return tuple(sorted({min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)}))


build = Model.build
