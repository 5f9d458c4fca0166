"""DFlash 2: DFlash plus convolutions that make a block coherent, and a choice among candidates.  (Inco AI, August
2026.)

Short convolutions with input-dependent coefficients surround every sublayer of DFlash's backbone.  The `candidates`
likeliest tokens of every row are scored in pairs with those of the previous row.  The draft is a path: at each row the
best candidate given the previous choice, or a sample from their softmax, which is q.  With `nodes` it is the tree of
the likeliest paths, each branch conditioned on its ancestors.

Differs from the published method: it supports trees; the pairs are trained on the target's distribution over the
candidates plus one class for all other tokens, without a gradient to the backbone unless `selector_gradient` is set;
the codebook of predecessors is initialised as a projection of the target's embedding; a draft's confidences are the
path's probabilities before each token is drawn.

Use it in place of `dflash` if your engine supports it, or if trees can be verified.  Its pairs need many training
answers to help, and are off until they do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor

from outrider.drafters.dflash2 import convolution, selector
from outrider.drafters.dflash2.convolution import DynamicConvolution
from outrider.drafters.dflash2.selector import PairSelector
from outrider.errors import DrafterError
from outrider.method import Method
from outrider.nn.blocks import ContextLayer
from outrider.nn.draft_model import Batch
from outrider.nn.drafting import lattice as lattices
from outrider.nn.drafting import lattice_model
from outrider.nn.drafting.block_model import BackboneConfig, BlockModel
from outrider.nn.drafting.block_rows import BlockRows
from outrider.nn.drafting.lattice import Candidates, Lattice
from outrider.nn.drafting.lattice_model import LatticeModel
from outrider.sampling.distribution import log_probs, wide
from outrider.targets.protocol import Target

METHOD = Method(
    cost="once", tokens=7, length="block", chain={"nodes": 0}, free=("nodes", "block"),
    engines={
        "vllm": {
            "name": "dflash",
            "formats": ("speculators", "sglang", "zlab"),
            "varies": True,
            "notes": ("dflash2 needs a GPU with Triton (model runner V2), and the target's head unquantised",),
            "bad": (
                {
                    "versions": ".*",
                    "platform": "cpu",
                    "what": "DFlash 2 needs vLLM's second model runner, which has no CPU build",
                },
            ),
        },
        "sglang": {"name": "DFLASH", "flag": "speculative-dflash-block-size", "formats": ("sglang", "zlab")},
        "llamacpp": {"name": "draft-dflash", "formats": ("gguf",), "cuts": True},
    },
    instead={
        "trtllm": "vllm, sglang and llamacpp run it; or train a DFlash",
    },
    layers={
        "speculators": ("aux_hidden_state_layer_ids", 1),
        "sglang": ("dflash_config.target_layer_ids", 0),
        "zlab": ("dflash_config.target_layer_ids", 0),
        "gguf": ("dflash.target_layers", 1),
    },
)  # fmt: skip


class Config(BackboneConfig):
    kind: Literal["dflash2"] = "dflash2"
    anchor_predicts: bool = False
    """The anchor's slot predicts the first token and masks predict the next ones; no: each mask predicts its own
    position, as in the released drafts."""
    candidates: PositiveInt = 16
    """Candidates per row, the likeliest tokens.  For k of them, llama.cpp needs a hidden size of at least k (k + 1)."""
    rank: PositiveInt = 256
    """Rank of the pair scores."""
    conv_taps: PositiveInt = 2
    """Number of rows that a convolution mixes: a row and those just before it."""
    conv_group: PositiveInt = 16
    """Channels per group that shares input-dependent coefficients of a convolution; it must divide the hidden size."""
    window: PositiveInt | None = None
    """Positions that each slot attends to, itself and those just before it; by default all.  The released drafts have
    2048."""
    nodes: NonNegativeInt = 0
    """Nodes of a draft tree: the likeliest paths at temperature 0, else drawn siblings.  0 drafts one path."""
    selector_loss: Literal["kl", "ce"] = "kl"
    """Labels of the pairs: the target's distribution over the candidates, or the actual next token."""
    selector_start: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of training, 0 to 1, after which the pairs are trained."""
    selector_gradient: bool = False
    """Whether the loss of the pairs also trains the backbone."""

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.siblings:
            raise ValueError(f"siblings {self.siblings} is a setting of dflash; set nodes for a tree from the pairs")
        if self.window is not None and self.window <= self.block:
            raise ValueError(f"window {self.window} must be above block {self.block}: a block attends to all of itself")
        return self


class Model(LatticeModel):
    """Backbone with convolutions, and the selector."""

    code = (selector, convolution, lattices, lattice_model)

    def __init__(self, config: Config, target: Target):
        size = config.vocabulary or target.spec.vocabulary
        if config.candidates > size:
            raise DrafterError(
                f"candidates must be at most the {size} tokens that it can draft, got {config.candidates}"
            )
        width = config.block + (not config.anchor_predicts)
        around = functools.partial(
            DynamicConvolution, target.spec.hidden, config.conv_taps, config.conv_group, width
        )  # fmt: skip
        super().__init__(config, target, functools.partial(ContextLayer, convolution=around), config.window)
        self.candidate_selector = PairSelector(target.spec.vocabulary, target.spec.hidden, config.rank)
        self.candidate_selector.begin(target.embed(torch.arange(target.spec.vocabulary, device=target.device)))

    def over_all_tokens(self) -> BlockModel:
        """Also applies the pairs' weight: a selector that is off gets a codebook of zeros."""
        whole = super().over_all_tokens()
        share = self.candidate_selector.share
        if float(share) == 1.0:
            return whole
        model = whole if whole is not self else copy.deepcopy(self, {id(self.target): self.target})
        with torch.no_grad():
            selector = model.candidate_selector
            assert isinstance(selector, PairSelector)
            selector.successor_codebook.mul_(share.to(selector.successor_codebook.device))
            selector.share.fill_(1.0)
        return model

    def scored(self, states: Tensor, anchors: Tensor, best: Candidates, before: Tensor | None) -> Lattice:
        return self.candidate_selector.lattice(states, anchors, best)

    def scored_after(self, states: Tensor, previous: Tensor, best: Candidates, before: Tensor | None) -> Tensor:
        scores = self.candidate_selector.taught(states, previous, best)
        return torch.where(self.candidate_selector.share > 0, scores, best.logits)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def terms(self, rows: BlockRows, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        if self.progress < self.config.selector_start:
            return {"selector": draft.new_zeros(len(draft), dtype=torch.float32)}
        states, logits = rows.leaf(part), self.own_columns(draft)
        if not self.config.selector_gradient:
            states, logits = states.detach(), logits.detach()
        best, columns = self.candidates(logits)
        scores = self.candidate_selector.taught(states, rows.previous[part], best)
        p = shares(target, columns) if self.config.selector_loss == "kl" else hits(rows.labels[part], columns)
        return {"selector": selector_loss(scores, best.rest, p)}

    def settled(self, held_out: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Turn the pairs on if the path they choose is accepted further than the rows' own first choices."""
        helps = held_out.get("tokens_walk", 0.0) > held_out.get("tokens_unary", 0.0)
        return {"candidate_selector.share": torch.tensor(float(helps))}

    def predict(self, batch: Batch) -> BlockRows:
        if self.training:
            self.candidate_selector.share.fill_(1.0)
        return super().predict(batch)


def selector_loss(scores: Tensor, rest: Tensor, p: Tensor) -> Tensor:
    """[m] forward KL over the candidates plus one class for all other tokens.

    scores [m, k] and rest [m] as in `Lattice`; p [m, k], target probabilities of the candidates.
    """
    q = torch.cat([wide(scores), wide(rest)[:, None]], -1).log_softmax(-1)
    p = torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp(min=0)], -1).to(q)
    # where p is 0, log q may be -inf
    return (torch.special.xlogy(p, p) - torch.where(p > 0, p * q, 0.0)).sum(-1)


def shares(target: Tensor, columns: Tensor) -> Tensor:
    """The target's probabilities [m, k] of the tokens in these columns of its logits [m, V]."""
    return log_probs(target).gather(-1, columns).exp()


def hits(labels: Tensor, columns: Tensor) -> Tensor:
    """[m, k], 1 for the actual next token and 0 for others; all 0 if it is not a candidate."""
    return (columns == labels[:, None]).float()


build = Model.build
