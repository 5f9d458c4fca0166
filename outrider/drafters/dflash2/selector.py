"""DFlash 2's scores of pairs: how well a candidate follows a token, by what the row's state says of both.

B slots, K rows, k candidates of a row, H hidden size, r rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.nn.drafting.lattice import Candidates, Lattice


class PairSelector(nn.Module):
    """score(a, b) = logit(b) + sum_j A[a, j] (W z)[j] C[b, j]; parameter names follow the released drafts.

    C begins at zero: then a score is the row's own logit.
    """

    defaults = ("share",)
    """Saved buffers that other checkpoints lack; they then keep their initial values."""
    share: Tensor
    """What the pairs count when it drafts: 1, or 0 where held-out answers were drafted better without; training does
    not read it."""

    def __init__(self, vocabulary: int, hidden: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        self.register_buffer("share", torch.ones(()))

    @torch.no_grad()
    def begin(self, words: Tensor) -> None:
        """Let A begin as a random projection of the target's embedding [V, H], so that similar words stay similar."""
        words = words.float() - words.float().mean(0)
        size = self.predecessor_codebook.shape[1]
        directions = torch.linalg.qr(torch.randn(words.shape[1], size))[0] if size <= words.shape[1] else None
        if directions is None:  # more directions than there are
            directions = torch.randn(words.shape[1], size)
        projected = words @ directions.to(words.device)
        self.predecessor_codebook.copy_(projected / projected.std().clamp(min=1e-9))

    def taught(self, states: Tensor, previous: Tensor, best: Candidates) -> Tensor:
        """Scores [m, k] of candidates [m, k] after known tokens, as trained: states [m, H], previous [m]."""
        given = self.predecessor_codebook[previous] * self.hidden_projection(states)
        return best.logits + (self.successor_codebook[best.ids] @ given[..., None])[..., 0]

    def lattice(self, states: Tensor, anchors: Tensor, best: Candidates) -> Lattice:
        """All pairs of neighbouring rows at once, as they count: states [B, K, H], anchors [B]; best [B, K, k], its ids
        the target's tokens."""
        own = self.hidden_projection(states) * self.share
        after = self.successor_codebook[best.ids].transpose(-1, -2)
        first = (self.predecessor_codebook[anchors] * own[:, 0])[:, None] @ after[:, 0]
        pairs = (self.predecessor_codebook[best.ids[:, :-1]] * own[:, 1:, None]) @ after[:, 1:]
        return Lattice(best.ids, best.logits[:, 0] + first[:, 0], best.logits[:, 1:, None] + pairs, best.rest)
