"""MTP: modules that each predict one token further ahead, shipped with the target or trained.  (arXiv 2412.19437.)

Module m reads a token and the output of module m - 1 for the token before it; module 0 reads the target's final hidden
state: eh_proj [enorm(embedding); hnorm(state)], one decoder layer, a norm.  The target's own head reads the output.
Step k of a draft uses module min(k, modules - 1), so the last one continues with its own output (FastMTP: one module
for all steps).  Training weights step k by 0.6 ** k, normalised by the trainer; FastMTP's loss is cross entropy of the
text's tokens.

`native` loads the modules of DeepSeek-V3, GLM, Qwen3-Next, MiMo-V2 and others from the target's checkpoint, as
transformers builds them, and can train them further.  Other modules start at random with a dense layer; their weights
have DeepSeek-V3's names: layers.m.{enorm, hnorm, eh_proj, input_layernorm, self_attn, post_attention_layernorm, mlp,
shared_head.norm}, counted from 0; native ones have transformers' names, layers.m.{enorm, hnorm, eh_proj, mtp_block,
post_norm}.

Assumes that the state that predicts one token also contains information about the following ones.

Differs from the paper: [embedding; state] is the order of the released weights, not the paper's; the next module reads
the state after the norm, as in transformers; the target is frozen.  A draft may be a tree.

Use it first if the target ships with such modules, since they need no training.  It had the highest acceptance of the
methods trained on the demo target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from outrider.drafters.mtp.heads import native_modules
from outrider.method import Method
from outrider.nn.blocks import MLP, Attend, Attention, DecoderLayer, RMSNorm, recomputable, rotary
from outrider.nn.drafting import serving
from outrider.nn.drafting.recurrent import RecurrentConfig, RecurrentModel, Unrolled
from outrider.nn.shape import FORMER, LayerConfig, resolved
from outrider.targets.cache.attention_mask import AttentionLimit
from outrider.targets.protocol import LayerSizes, Target

METHOD = Method(
    cost="each", is_untrained=True, tokens=1, chain={"width": 1},
    engines={
        "vllm": {"name": "mtp", "varies": True},
        "sglang": {"name": "NEXTN"},
        "trtllm": {"name": "MTP", "varies": True},
        "llamacpp": {"name": "draft-mtp", "formats": ("gguf",), "cuts": True, "in_target": True},
        "transformers": {"name": "use_mtp", "since": (5, 23), "more": {"use_mtp": True}},
    },
)  # fmt: skip


class Config(RecurrentConfig):
    kind: Literal["mtp"] = "mtp"
    length: PositiveInt = 3
    """Tokens drafted per step; levels of a tree."""
    native: bool | None = None
    """Use the modules shipped with the target; by default yes if it has any."""
    modules: int = Field(1, ge=1, le=64)
    """Number of modules; for native ones, the target's."""
    qk_norm: bool = False
    """Normalise queries and keys, as in Qwen3's layers but not in DeepSeek's."""
    ttt: PositiveInt = 3
    """Steps unrolled in training."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of a step in training relative to the previous step: step s has weight decay ** s."""


class Module(DecoderLayer):
    """One of Outrider's modules, with weights named as in DeepSeek-V3's checkpoints."""

    def __init__(self, hidden: int, shape: LayerSizes, qk_norm: bool):
        super().__init__()
        self.enorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.self_attn = Attention(hidden, shape, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mlp = MLP(hidden, shape.intermediate)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, shape.rms_norm_eps)})

    @recomputable
    def forward(self, words: Tensor, states: Tensor, angle: Tensor, attend: Attend, number: int) -> Tensor:
        """words, states [B, n, H]; returns [B, n, H], the input of the head."""
        x = self.eh_proj(torch.cat([self.enorm(words), self.hnorm(states)], -1))
        x = x + self.self_attn(self.input_layernorm(x), angle, attend, number)
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


class Model(RecurrentModel):
    """The modules; embedding and head are the target's."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        is_required = config.native is True
        self.shipped = None if config.native is False else native_modules(target, is_required, _causal)
        self.native = self.shipped is not None
        self.config, self.target = config.model_copy(update={"native": self.native}), target
        if self.shipped is None:
            self.config, self.shape = resolved(self.config, target.spec)
            self.layers = nn.ModuleList(
                Module(target.spec.hidden, self.shape, config.qk_norm) for _ in range(config.modules)
            )
            self.limits = (None,) * config.modules
        else:
            _warn_of_idle(config)
            self.layers, self.shared_post_norm = self.shipped.layers, self.shipped.shared_post_norm
            self.limits = self.shipped.limits
        self.num_modules = len(self.layers)

    def cos_sin(self, positions: Tensor) -> Tensor:
        """A pair has its token's position, one after that of the target's state; native modules take positions, not
        angles."""
        return rotary(positions + 1, self.shape) if self.shipped is None else positions + 1

    def step(self, module: int, words: Tensor, features: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        words = words.to(features.dtype)
        if self.shipped is None:
            return self.layers[module](words, features, angle, attend, module)
        return self.shipped.step(module, words, features, angle, attend)

    def facts(self) -> Mapping[str, Any]:
        return {"native": self.native}


def _causal(positions: Tensor, limits: Sequence[AttentionLimit | None]) -> Attend:
    return Unrolled(torch.ones_like(positions), positions, positions, limits).step(0)


def _warn_of_idle(config: Config) -> None:
    names = ("modules", "qk_norm", *(name for name in LayerConfig.model_fields if name != "device"))
    is_usual = {name: getattr(config, name) == FORMER.get(name) for name in names}
    because = "on modules shipped with the target; set native to no to use modules of Outrider"
    serving.warn_idle("mtp", config, is_usual, because)


build = Model.build
