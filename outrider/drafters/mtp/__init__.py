"""MTP: modules that each predict one token further, shipped with the target or trained.  (arXiv 2412.19437.)

Module m reads a token and the output of module m - 1 for the token before it; module 0 reads the target's final hidden
state: eh_proj [enorm(embedding); hnorm(state)], one decoder layer, a norm.  The target's own head reads the output.
Step k of a draft uses module min(k, modules - 1), so the last one continues with its own output (FastMTP: one module
for all steps). Training weighs step k by 0.6 ** k, which the trainer normalises; FastMTP's loss is cross entropy of the
text's own tokens.

`native` takes DeepSeek-V3's, GLM's, Qwen3-Next's, MiMo-V2's and others' modules from the target's own checkpoint, as
transformers builds them, and may tune them.  Other modules begin at random, with a dense layer, and their weights have
DeepSeek-V3's names: layers.m.{enorm, hnorm, eh_proj, input_layernorm, self_attn, post_attention_layernorm, mlp,
shared_head.norm}, counted from 0; native ones have transformers' names, layers.m.{enorm, hnorm, eh_proj, mtp_block,
post_norm}.

Assumes that the state which predicts one token also holds something of the next ones.

Differs from the paper: [embedding; state] is the order of the released weights, not the paper's; the next module reads
the state after the norm, as in transformers; the target is frozen.  A draft may be a tree.

Take it first where the target ships its modules: nothing is trained then.  Of what was trained on the demo target most
is accepted of it.
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
    """Use the modules shipped with the target; unless given, yes where it has any."""
    modules: PositiveInt = 1
    """Modules with weights of their own; the target decides for native ones."""
    qk_norm: bool = False
    """Normalise queries and keys, as Qwen3's layers do and DeepSeek's do not."""
    ttt: PositiveInt = 3
    """Steps unrolled in training."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of a step in training relative to the step before: step s weighs decay ** s."""


class Module(DecoderLayer):
    """One module of our own, its weights named as in DeepSeek-V3's checkpoints."""

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
        """words, states [B, n, H]; returns [B, n, H], which the head reads."""
        x = self.eh_proj(torch.cat([self.enorm(words), self.hnorm(states)], -1))
        x = x + self.self_attn(self.input_layernorm(x), angle, attend, number)
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


class Model(RecurrentModel):
    """The modules; embedding and head are the target's."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        wanted = config.native is True
        self.shipped = None if config.native is False else native_modules(target, wanted, _causal)
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
        """A pair has its token's position, one after the target's state; native modules rotate by themselves."""
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
    because = "on modules shipped with the target; set native to no for modules of your own"
    serving.warn_idle("mtp", config, is_usual, because)


build = Model.build
