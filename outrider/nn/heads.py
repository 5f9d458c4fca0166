"""Small heads on a block of drafted states: a Markov correction from the token before, and a confidence.

DSpark: semi-autoregressive drafting (arXiv 2607.05147).  K slots of a block, H hidden size, r rank, V vocabulary.
Parameter names follow the released checkpoints.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """A low-rank bias on slot k's logits from the token in slot k - 1 (slot 0: the anchor).

    vanilla: W2 W1[x].  gated: W2 (g * W1[x]) with g = sigmoid(A [h; W1[x]]).  rnn: a gated state runs along the block.
    """

    def __init__(self, kind: MarkovKind, vocabulary: int, hidden: int, rank: int):
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    @torch.no_grad()
    def begin(self, words: Tensor) -> None:
        """Let W1 begin as a random projection of the target's embedding [V, H], so that words alike there are alike here."""
        words = words.float() - words.float().mean(0)
        turned = words @ nn.init.orthogonal_(torch.empty(words.shape[1], self.rank)).to(words.device)
        self.markov_w1.weight.copy_(turned / turned.std().clamp(min=1e-9))

    def start(self, hidden: Tensor) -> Tensor:
        """State before slot 0, [..., r], for hidden [..., H]."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: previous [...] ids, hidden [..., H], state [..., r].  Returns (bias [..., V], next state)."""
        word = self.markov_w1(previous)
        if self.kind == "gated":
            word = torch.sigmoid(self.gate_proj(torch.cat([hidden, word], -1))) * word
        elif self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, word, hidden], -1))
            gate, candidate, output = joint.chunk(3, -1)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            word = torch.tanh(output)
        return self.markov_w2(word), state

    def along(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Whole blocks with known tokens: previous [..., K], hidden [..., K, H].  Returns [..., K, V]."""
        if self.kind != "rnn":
            return self(previous, hidden, hidden)[0]
        state, biases = self.start(hidden[..., 0, :]), []
        for k in range(hidden.shape[-2]):
            bias, state = self(previous[..., k], hidden[..., k, :], state)
            biases.append(bias)
        return torch.stack(biases, -2)


class ConfidenceHead(nn.Module):
    """How likely slot k is accepted once slots before it were: sigmoid(w [h; W1[x]] + b), known before slot k is drawn."""

    def __init__(self, features: int):
        super().__init__()
        self.proj = nn.Linear(features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """features [..., F]; returns logits [...]."""
        return self.proj(features)[..., 0]
