"""LiLiCorr: DFlash, and a small transformer that scores the candidates of a whole block in pairs.  (arXiv 2608.20530.)

The `candidates` likeliest tokens of every row attend to each other, in both directions, and to nothing else; each knows
its embedding, its row's state, and how likely its row finds it.  Two factors of each, and the target's state before the
anchor, give the scores of neighbours.  The draft is a walk, or with `nodes` the tree of the likeliest paths, as in
DFlash 2; q is the softmax of a row's scores.  The row's own logits enter the scores only as said above.

In training a row counts while the text's tokens are among the candidates: cross-entropy, a margin over the best other
candidate, and a penalty of candidates that the target finds less likely, by their share.

Differs from the paper: trees; no gradient reaches the fused taps through the anchor's state; no convolutions.

Use it to compare a scorer of whole blocks with DFlash 2's pairs.  It needs more training than they do, and has no
engine here that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from outrider.errors import DrafterError
from outrider.lab.drafters.lilicorr import scorer
from outrider.lab.drafters.lilicorr.scorer import Scorer
from outrider.method import Method
from outrider.nn.draft_model import Batch
from outrider.nn.drafting import lattice as lattices
from outrider.nn.drafting import lattice_model
from outrider.nn.drafting.block_model import BackboneConfig
from outrider.nn.drafting.block_rows import BlockRows
from outrider.nn.drafting.lattice import Candidates, Lattice, log_shares
from outrider.nn.drafting.lattice_model import LatticeModel
from outrider.targets.protocol import Target

METHOD = Method(
    cost="once", tokens=7, length="block", chain={"nodes": 0}, free=("nodes",),
    instead={"vllm": "train a DFlash 2", "sglang": "train a DFlash 2", "llamacpp": "train a DFlash 2"},
    layers={"sglang": ("dflash_config.target_layer_ids", 0)},
)  # fmt: skip


class Config(BackboneConfig):
    kind: Literal["lilicorr"] = "lilicorr"
    anchor_predicts: bool = False
    """The anchor's slot predicts the first token, and masks the next ones; no: each mask predicts its own position, as
    the released drafts do."""
    candidates: PositiveInt = 16
    """Candidates per row, the likeliest tokens.  Engines take powers of two up to 16."""
    nodes: NonNegativeInt = 0
    """Nodes of a draft tree: the likeliest paths at temperature 0, else drawn siblings.  0 drafts one path."""
    scorer_hidden: PositiveInt | None = None
    """Hidden size of the scorer; by default the target's."""
    scorer_layers: PositiveInt = 2
    """Layers of the scorer."""
    scorer_heads: PositiveInt = 4
    """Attention heads of the scorer; their number must divide its hidden size."""
    scorer_ratio: PositiveFloat = 2.0
    """Size of the scorer's MLP, in hidden sizes."""
    factor: PositiveInt = 64
    """Size of a candidate's factors."""
    scale: PositiveFloat = 10.0
    """Number that the scores are multiplied by, which are cosines."""
    factor_eps: PositiveFloat = 1e-6
    """Smallest norm of a factor."""
    ce: NonNegativeFloat = 0.25
    """Weight of the cross-entropy."""
    margin: NonNegativeFloat = 0.0
    """Weight of the margin of 2 over the best other candidate."""
    penalty: NonNegativeFloat = 0.25
    """Weight of candidates that the target finds less likely."""

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.siblings:
            raise ValueError(
                f"siblings {self.siblings} are a setting of dflash; set nodes for a tree of the candidates"
            )
        return self


MARGIN = 2.0


class Model(LatticeModel):
    """Backbone and scorer."""

    code = (scorer, lattices, lattice_model)
    splits_texts = False

    def __init__(self, config: Config, target: Target):
        size, hidden = target.spec.hidden, config.scorer_hidden or target.spec.hidden
        most = config.vocabulary or target.spec.vocabulary
        if config.candidates > most:
            raise DrafterError(
                f"candidates must be at most the {most} tokens that it can draft, got {config.candidates}"
            )
        if hidden % config.scorer_heads:
            raise DrafterError(f"scorer_heads {config.scorer_heads} do not divide the scorer's hidden size of {hidden}")
        super().__init__(config, target)
        self.lilicorr = Scorer(
            size, hidden, config.block, config.candidates, config.scorer_layers, config.scorer_heads,
            config.scorer_ratio, config.factor, config.scale, config.factor_eps, self.backbone.shape.rms_norm_eps,
        )  # fmt: skip

    def before(self, taps: Tensor, taps_at: Tensor, anchors_at: Tensor) -> Tensor:
        if not taps.shape[1]:  # nothing is new, as at the start
            return torch.zeros(len(taps), taps.shape[-1], dtype=self.dtype, device=taps.device)
        index = anchors_at - 1 - taps_at[:, 0]
        last = taps[torch.arange(len(taps), device=taps.device), index.clamp(0, taps.shape[1] - 1)]
        return self.context(last) * ((index >= 0) & (anchors_at > 0))[:, None]

    def context(self, taps: Tensor) -> Tensor:
        """[n, H] of taps [n, T, H]."""
        return self.backbone.hidden_norm(self.backbone.fused(taps[:, None]))[:, 0]

    def scored(self, states: Tensor, anchors: Tensor, best: Candidates, before: Tensor | None) -> Lattice:
        words = self.target.embed(best.ids).detach().to(states)
        if before is None:
            before = torch.zeros_like(states[:, 0])
        first, pairs = self.lilicorr(words, log_shares(best.logits, best.rest), states, before)
        # its scores are no logits, so the other tokens have no weight beside them
        return Lattice(best.ids, first, pairs, torch.full_like(best.rest, -torch.inf))

    def scored_after(self, states: Tensor, previous: Tensor, best: Candidates, before: Tensor | None) -> Tensor:
        lattice = self.scored(states, previous[:, 0], best, before)
        # after a token that is no candidate, the scores after the likeliest one
        chosen = (best.ids[:, :-1] == previous[:, 1:, None]).long().argmax(-1)
        after = lattice.pairs.gather(2, chosen[..., None, None].expand(-1, -1, 1, best.ids.shape[2]))[:, :, 0]
        return torch.cat([lattice.first[:, None], after], 1)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def predict(self, batch: Batch) -> BlockRows:
        rows = super().predict(batch)
        assert batch.taps is not None
        with torch.no_grad():
            before = self.context(batch.taps.flatten(0, 1)[(rows.anchors_at - 1).clamp(min=0)])
            rows.before = before * (batch.positions.flatten()[rows.anchors_at] > 0)[:, None]
        return rows

    def terms(self, rows: BlockRows, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        states, previous = rows.whole(rows.leaf(part), part)
        best, columns = self.candidates(self.own_columns(draft).unflatten(0, (-1, rows.slots)))
        scores = self.scored_after(states, previous, best, rows.before_of(part))
        gold = columns == rows.labels[part].view(-1, rows.slots, 1)
        target_logits = target.unflatten(0, (-1, rows.slots)).gather(-1, columns)
        return {"lattice": self.lattice_loss(scores, gold, target_logits).flatten()}

    def lattice_loss(self, scores: Tensor, gold: Tensor, target_logits: Tensor) -> Tensor:
        """[n, K] loss of scores [n, K, k]; gold marks the text's token, 0 from the first row without one.

        target_logits [n, K, k] of the candidates.
        """
        config, counts = self.config, gold.any(-1).long().cumprod(-1)
        mark = gold.long().argmax(-1, keepdim=True)
        log_q, score, truth = (each.gather(-1, mark) for each in (scores.log_softmax(-1), scores, target_logits))
        others = scores.masked_fill(gold, -torch.inf).amax(-1)
        margin = F.relu(MARGIN - (score[..., 0] - others)) if scores.shape[-1] > 1 else torch.zeros_like(others)
        penalty = (scores.softmax(-1) * F.relu(truth - target_logits)).sum(-1)
        return counts * (config.ce * -log_q[..., 0] + config.margin * margin + config.penalty * penalty)


build = Model.build
