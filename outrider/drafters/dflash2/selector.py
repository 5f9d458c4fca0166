"""DFlash 2's scores of pairs: how well a candidate follows a token, given the row's state.

B slots, K rows, k candidates of a row, H hidden size, r rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.nn.drafting.lattice import Candidates, Lattice


class PairSelector(nn.Module):
    """score(a, b) = logit(b) + sum_j A[a, j] (W z)[j] C[b, j]; parameter names follow the released drafts.

    C starts at zero, so that a score is the row's own logit.
    """

    defaults = ("share",)
    """Saved buffers that other checkpoints may lack; they keep their initial values."""
    share: Tensor
    """Weight of the pairs in serving: 1, or 0 if drafts on held-out answers were better without them; unused in
    training."""

    def __init__(self, vocabulary: int, hidden: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        self.register_buffer("share", torch.ones(()))

    @torch.no_grad()
    def begin(self, words: Tensor) -> None:
        """Initialise A as a random projection of the target's embedding [V, H], so that similar tokens are similar."""
        if self.predecessor_codebook.is_meta:  # only its shapes are compared with those of a file
            return
        words = words.float() - words.float().mean(0)
        size = self.predecessor_codebook.shape[1]
        directions = torch.linalg.qr(torch.randn(words.shape[1], size))[0] if size <= words.shape[1] else None
        if directions is None:  # rank above H
            directions = torch.randn(words.shape[1], size)
        projected = words @ directions.to(words.device)
        self.predecessor_codebook.copy_(projected / projected.std().clamp(min=1e-9))

    def taught(self, states: Tensor, previous: Tensor, best: Candidates) -> Tensor:
        """Teacher-forced scores [m, k] of candidates [m, k], without `share`: states [m, H], tokens before, previous
        [m]."""
        context = self.predecessor_codebook[previous] * self.hidden_projection(states)
        return best.logits + (self.successor_codebook[best.ids] @ context[..., None])[..., 0]

    def lattice(self, states: Tensor, anchors: Tensor, best: Candidates) -> Lattice:
        """Scores of all pairs in neighbouring rows, weighted by `share`: states [B, K, H], anchors [B]; best [B, K, k]
        with the target's ids."""
        projected = self.hidden_projection(states) * self.share
        after = self.successor_codebook[best.ids].transpose(-1, -2)
        first = (self.predecessor_codebook[anchors] * projected[:, 0])[:, None] @ after[:, 0]
        pairs = (self.predecessor_codebook[best.ids[:, :-1]] * projected[:, 1:, None]) @ after[:, 1:]
        return Lattice(best.ids, best.logits[:, 0] + first[:, 0], best.logits[:, 1:, None] + pairs, best.rest)
