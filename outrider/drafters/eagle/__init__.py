"""EAGLE: predict the target's next feature from its features so far, and apply the target's head.  (arXiv 2401.15077.)

The feature is the state that the target's head reads.  fc fuses [embedding of token i + 1; feature i].  One decoder
layer without an input norm predicts feature i + 1 from that, and the target's own head gives its logits.  The next step
reads the prediction as its feature.  The paper's loss: 1.0 smooth-L1 of the feature + 0.1 cross entropy against the
target's distribution (KL up to a constant), on true features with uniform noise in place of prediction errors.  Trees
(`width` above 1) are EAGLE-2's (arXiv 2406.16858).

Assumes that features are easier to extrapolate than tokens.

Differs from the paper: the feature is taken after the target's final norm, where the head reads it, in every family;
new noise is drawn in every step; `ttt` above 1 unrolls further steps.

Use it if only the target's last state can be read.  On the demo target it learnt more than EAGLE-3 in the same time,
but less in the same number of steps.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from outrider.method import Method
from outrider.nn.blocks import Attend, ContextLayer
from outrider.nn.draft_model import Batch
from outrider.nn.drafting.recurrent import RecurrentConfig, RecurrentModel, UnrolledRows
from outrider.nn.shape import resolved
from outrider.targets.protocol import Target

METHOD = Method(
    cost="each", tokens=3, chain={"width": 1},
    engines={
        "vllm": {"name": "eagle", "formats": ("eagle",), "varies": True},
        "sglang": {"name": "EAGLE", "formats": ("eagle",), "varies": True, "trees": True},
    },
    instead={
        "trtllm": "only its old engine has EAGLE-1 and -2; train an EAGLE-3",
    },
    read_only=("eagle",),
)  # fmt: skip


class Config(RecurrentConfig):
    kind: Literal["eagle"] = "eagle"
    ttt: PositiveInt = 1
    """Steps unrolled in training; 1 trains on true features only, as in the paper."""
    noise: NonNegativeFloat = 0.1
    """Uniform noise in [-noise, noise] that is added to true features in training."""
    bias: bool = True
    """fc has a bias, as in the paper; some released heads have none."""


class Model(RecurrentModel):
    """fc over embedding and feature, one layer; the head is the target's."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config, self.shape = resolved(config, target.spec)
        self.target = target
        hidden = target.spec.hidden
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.bias)
        self.layers = nn.ModuleList([ContextLayer(hidden, self.shape, qk_norm=False, input_norm=False)])

    def step(self, module: int, words: Tensor, features: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        return self.layers[0](self.fc(torch.cat([words.to(features.dtype), features], -1)), angle, attend)

    def predict(self, batch: Batch) -> UnrolledRows:
        features = self.features(self.target_states(batch))
        if self.config.noise:
            # on the CPU, whose random state a checkpoint stores; also drawn in evaluation, so that later draws are
            # equal
            noise = batch.random(functools.partial(torch.rand, dtype=torch.float32), *features.shape[1:])
            noise = noise.to(features.device, features.dtype)
            features = features + self.config.noise * (2 * noise - 1) * self.training
        return UnrolledRows(self, batch, features)

    def terms(self, rows: UnrolledRows, part: slice, draft: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"feature": distance(rows.leaf(part), rows.hidden(part))}


def distance(states: Tensor, hidden: Tensor) -> Tensor:
    """Smooth-L1 of predicted and true features [m, H], the mean over H: [m]."""
    return F.smooth_l1_loss(states.float(), hidden.float(), reduction="none").mean(-1)


build = Model.build
