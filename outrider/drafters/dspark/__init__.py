"""DSpark: a block drafted in parallel, then corrected left to right by a small head.  (arXiv 2607.05147.)

A DFlash backbone gives logits for every slot at once.  A low-rank Markov head corrects each slot given the token
drafted before it, and a confidence head predicts how likely each slot is to be accepted.  The paper's loss: 0.1 CE +
0.9 L1 (twice TV) + binary cross-entropy of the confidence against the expected acceptance.

Differs from the paper: the last token of a prompt is an anchor too, since serving drafts from it; W1 is initialised
as a projection of the target's embedding.  Its load-aware scheduler is a policy, not part of the drafter.

Use it first: it is the fastest of the methods trained on the demo target, and its confidences let a policy end a draft
early.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor

from outrider.decoding.accept import overlap
from outrider.method import Method
from outrider.nn.drafting.block_model import BackboneConfig, BlockModel, Decoded, Pick
from outrider.nn.drafting.block_rows import BlockRows
from outrider.nn.heads import ConfidenceHead, MarkovHead, MarkovKind
from outrider.targets.protocol import Target

METHOD = Method(
    cost="once", usual=5, tokens=7, length="block", chain={"siblings": ()},
    engines={
        "vllm": {
            "name": "dspark",
            "formats": ("speculators", "deepspec"),
            "needs": (("markov", "markov_head_type", "vanilla"),),
            "notes": ("dspark needs a GPU with Triton (model runner V2)",),
            "bad": (
                {
                    "versions": ".*",
                    "platform": "cpu",
                    "what": "DSpark needs vLLM's second model runner, which has no CPU build",
                },
            ),
        },
        "sglang": {"name": "DSPARK", "flag": "speculative-dspark-block-size", "formats": ("sglang",)},
        "trtllm": {"name": "DSpark", "formats": ("deepspec",)},
        "llamacpp": {"name": "draft-dspark", "formats": ("gguf",), "cuts": True},
    },
    layers={
        "speculators": ("aux_hidden_state_layer_ids", 1),
        "sglang": ("dflash_config.target_layer_ids", 0),
        "deepspec": ("target_layer_ids", 0),
        "gguf": ("dflash.target_layers", 1),
    },
    in_anchor={
        "": ("", True), "speculators": ("sample_from_anchor", True), "gguf": ("dflash.sample_from_anchor", True),
    },
)  # fmt: skip


class Config(BackboneConfig):
    kind: Literal["dspark"] = "dspark"
    markov: MarkovKind = "vanilla"
    """Kind of the head that corrects each slot by the previous token."""
    rank: PositiveInt = 256
    """Rank of that low-rank correction."""
    confidence: bool = True
    """Train a head that predicts each slot's acceptance."""


class Model(BlockModel):
    """Backbone, Markov head, confidence head."""

    def __init__(self, config: Config, target: Target):
        super().__init__(config, target)
        self.has_confidence = config.confidence
        self.markov_head = MarkovHead(
            config.markov, target.spec.vocabulary, target.spec.hidden, config.rank, config.vocabulary
        )  # fmt: skip
        self.markov_head.begin(target.embed(torch.arange(target.spec.vocabulary, device=target.device)))
        self.confidence_head = (
            ConfidenceHead(target.spec.hidden + config.rank, config.block) if config.confidence else None
        )

    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None) -> Decoded:
        base, state = self.logits(states), self.markov_head.start(states[:, 0])
        tokens, corrected = [anchors], []
        for k in range(base.shape[1]):
            bias, state = self.markov_head(tokens[-1], states[:, k], state)
            corrected.append(base[:, k] + bias)
            tokens.append(self.picked(corrected[-1], k, pick))
        drafted, logits = torch.stack(tokens, 1), torch.stack(corrected, 1)
        if self.confidence_head is None:
            return drafted[:, 1:], logits, None
        return drafted[:, 1:], logits, self.confidence_head.served(self.confidence(states, drafted[:, :-1]))

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Uncalibrated logits [...] of acceptance, from a slot's state [..., H] and the token before it [...]."""
        assert self.confidence_head is not None
        return self.confidence_head(torch.cat([states, self.markov_head.markov_w1(previous)], -1))

    def taught(self, states: Tensor, previous: Tensor) -> Tensor:
        return self.logits(states) + self.markov_head.along(previous, states)

    def terms(self, rows: BlockRows, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        if self.confidence_head is None:
            return {}
        with torch.no_grad():
            acceptance = overlap(target.float().softmax(-1), draft.float().softmax(-1)).clamp(0, 1)
        confidence = self.confidence(rows.leaf(part), rows.previous[part]).float()
        return {"confidence": F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")}


build = Model.build
