"""DFlash: draft a whole block in one pass, from the target's own hidden states.  (arXiv 2602.06036.)

Fused states of a few target layers provide extra keys and values in every layer of a small transformer.  A block
consists of the anchor and mask tokens; they attend to each other in both directions and to all context before the
anchor.  Every slot of the block predicts independently.

There are two layouts with the same weights.  DSpark's is the default: the anchor's slot predicts the first token, so K
inputs give K drafts.  The paper's is `anchor_predicts: no`: every mask predicts the token at its own position and the
anchor's slot predicts nothing, so K drafts take K masks.

Differs from the paper in the default layout, and in that training samples new anchors for every batch.

Use it if a draft must cost exactly one pass, however long it is.  Its later slots do not see the earlier ones, which
`dspark` and `domino` fix at a small cost.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from outrider.method import Method
from outrider.nn.drafting.block_model import BackboneConfig, Block, BlockModel, Decay, Decoded, Pick

METHOD = Method(
    cost="once", usual=4, tokens=15, length="block", chain={"siblings": ()},
    engines={
        "vllm": {
            "name": "dflash",
            "formats": ("speculators", "sglang", "zlab"),
            "varies": True,
            "bad": (
                {
                    "versions": "0\\.32\\.0",
                    "platform": "cpu",
                    "what": (
                        "vLLM 0.32.0 for CPUs norms DFlash's context keys of every layer by the first layer's "
                        "k_norm: fewer tokens are accepted than could be (measured here; not measured on GPUs)"
                    ),
                },
                {
                    "versions": "0\\.25\\.1",
                    "what": "DFlash accepts nothing on the new model runner of 0.25.1 (vllm-project/vllm#49559)",
                },
            ),
        },
        "sglang": {"name": "DFLASH", "flag": "speculative-dflash-block-size", "formats": ("sglang", "zlab")},
        "trtllm": {
            "name": "DFlash",
            "facts": ("mask_token_id", "target_layer_ids"),
            "formats": ("trtllm", "sglang", "zlab"),
        },
        "llamacpp": {
            "name": "draft-dflash", "formats": ("gguf",), "cuts": True,
            # its draft-dflash does not read the anchor's slot; such a file has a Markov head of zeros
            "in_anchor": "draft-dspark",
        },
    },
    layers={
        "speculators": ("aux_hidden_state_layer_ids", 1),
        "sglang": ("dflash_config.target_layer_ids", 0),
        "zlab": ("dflash_config.target_layer_ids", 0),
        "trtllm": ("dflash_config.target_layer_ids", 0),
        "deepspec": ("target_layer_ids", 0),
        "gguf": ("dflash.target_layers", 1),
    },
    read_only=("zlab",),
    in_anchor={
        "speculators": ("sample_from_anchor", False), "gguf": ("dflash.sample_from_anchor", False),
        "deepspec": ("", True),
    },
)  # fmt: skip


class Config(BackboneConfig):
    kind: Literal["dflash"] = "dflash"
    block: Block = 16
    decay: Decay = 7.0


class Model(BlockModel):
    """The backbone with the target's head on every slot."""

    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None) -> Decoded:
        logits = self.logits(states)
        if pick is None:
            return self.named(logits.argmax(-1)), logits, None
        return torch.stack([self.picked(logits[:, k], k, pick) for k in range(logits.shape[1])], 1), logits, None


build = Model.build
