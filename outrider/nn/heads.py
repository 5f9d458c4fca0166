"""Small heads on drafted states: corrections by earlier tokens, confidences, reduced vocabularies, ranks.

K slots of a block, H hidden size, r rank, V vocabulary, D tokens that can be drafted.  Parameter names follow the
released checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.nn.draft_model import DraftModel
from outrider.nn.draft_vocabulary import check_size, most_frequent
from outrider.sampling.distribution import log_probs
from outrider.targets.protocol import Target

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """A low-rank bias on slot k's logits from the token in slot k - 1 (for slot 0, the anchor).  (DSpark, arXiv
    2607.05147.)

    vanilla: W2 W1[x].  gated: W2 (g * W1[x]) with g = sigmoid(A [h; W1[x]]).  rnn: a gated recurrent state along the
    block.
    """

    def __init__(self, kind: MarkovKind, vocabulary: int, hidden: int, rank: int, drafted: int | None = None):
        """drafted: number of tokens that can be drafted; by default all."""
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted or vocabulary, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    @torch.no_grad()
    def begin(self, words: Tensor) -> None:
        """Initialise W1 as a random projection of the target's embedding [V, H], so that similar tokens are similar."""
        if self.markov_w1.weight.is_meta:  # only its shapes are compared with those of a file
            return
        words = words.float() - words.float().mean(0)
        projected = words @ nn.init.orthogonal_(torch.empty(words.shape[1], self.rank)).to(words.device)
        self.markov_w1.weight.copy_(projected / projected.std().clamp(min=1e-9))

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
        """Biases [..., K, V] of whole blocks whose tokens are given: previous [..., K], hidden [..., K, H]."""
        if self.kind != "rnn":
            return self(previous, hidden, hidden)[0]
        state, biases = self.start(hidden[..., 0, :]), []
        for k in range(hidden.shape[-2]):
            bias, state = self(previous[..., k], hidden[..., k, :], state)
            biases.append(bias)
        return torch.stack(biases, -2)


class ConfidenceHead(nn.Module):
    """Probability that slot k is accepted given that the slots before it are: sigmoid((w [h; W1[x]] + b + shift_k) /
    T_k).

    It does not depend on slot k's token.  Shifts and temperatures are calibrated after training; see
    `outrider.training.fitting.calibrate`.
    """

    defaults = ("shifts", "temperatures")
    """Saved buffers that older checkpoints may lack; they keep their initial values."""
    temperatures: Tensor
    """[K], 1 until calibrated; training does not read them."""
    shifts: Tensor
    """[K], 0 until calibrated."""

    def __init__(self, features: int, slots: int):
        super().__init__()
        self.proj = nn.Linear(features, 1)
        self.register_buffer("temperatures", torch.ones(slots))
        self.register_buffer("shifts", torch.zeros(slots))

    def forward(self, features: Tensor) -> Tensor:
        """Uncalibrated logits [...], as in training, from features [..., F]."""
        return self.proj(features)[..., 0]

    def served(self, logits: Tensor) -> Tensor:
        """Calibrated confidences [..., K], float32, of a whole block's logits [..., K]."""
        # float32: near 1, bf16 has steps of 0.004, which add up in products over slots
        return ((logits.float() + self.shifts.float()) / self.temperatures.float()).sigmoid()


class ReducedHead(nn.Module):
    """A trained head over the D most frequent tokens; the others can't be drafted.  (EAGLE-3, arXiv 2503.01840.)"""

    d2t: Tensor
    """[D] int64: draft id i is the target's i + d2t[i]."""
    t2d: Tensor
    """[V] bool, True for tokens of the target that can be drafted."""

    def __init__(self, target: Target, size: int):
        super().__init__()
        check_size(target, size)
        self.target = target
        self.lm_head = nn.Linear(target.spec.hidden, size, bias=False)
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(target.spec.vocabulary, dtype=torch.bool))
        self.begin(torch.zeros(target.spec.vocabulary))

    @torch.no_grad()
    def begin(self, counts: Tensor) -> None:
        """Choose the most frequent tokens (the lower id on a tie) and copy the target's rows for them.  counts [V]."""
        ids = most_frequent(counts, len(self.d2t)).to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.fill_(False)[ids] = True
        self.lm_head.weight.copy_(self.target.head_rows(ids.to(self.target.device)))

    @property
    def ids(self) -> Tensor:
        """[D] the target's ids of the tokens that can be drafted, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def content_hash(self) -> str:
        """Hash of the ids, 16 hex digits: heads with equal hashes draft the same tokens."""
        return hashlib.sha256(str(self.ids.tolist()).encode()).hexdigest()[:16]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden [..., H]; -inf for tokens that can't be drafted."""
        reduced = self.lm_head(hidden)
        whole = reduced.new_full((*reduced.shape[:-1], len(self.t2d)), -torch.inf)
        return whole.index_copy(-1, self.ids, reduced)


class VocabularyModel(DraftModel):
    """A draft model with the target's head, or with its own head over fewer tokens."""

    head: ReducedHead | None

    def begin(self, counts: Tensor) -> None:
        if self.head is not None:
            self.head.begin(counts)

    def facts(self) -> Mapping[str, Any]:
        return {} if self.head is None else {"draft_vocabulary": self.head.content_hash}

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H]; -inf for tokens outside a reduced vocabulary."""
        return super().logits(states) if self.head is None else self.head(states)


class PrefixGRU(nn.Module):
    """A state of a block's tokens so far: one layer of torch's GRU without biases, with the same parameter names.  g:
    state size."""

    def __init__(self, size: int, state: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state, size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state, state))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(state**-0.5), state**-0.5)

    def start(self, words: Tensor) -> Tensor:
        """State before the first token, [..., g], for words [..., size]."""
        return words.new_zeros(*words.shape[:-1], self.weight_hh_l0.shape[1])

    def forward(self, words: Tensor, state: Tensor) -> Tensor:
        """The next state [..., g] after one token, with embedding words [..., size], from state [..., g]."""
        return self._next(F.linear(words, self.weight_ih_l0), state)

    def along(self, words: Tensor) -> Tensor:
        """States [..., K, g] after every token of whole blocks, words [..., K, size]."""
        states, state = [], self.start(words[..., 0, :])
        for inputs in F.linear(words, self.weight_ih_l0).unbind(-2):
            state = self._next(inputs, state)
            states.append(state)
        return torch.stack(states, -2)

    def _next(self, inputs: Tensor, state: Tensor) -> Tensor:
        reset, update, candidate = inputs.chunk(3, -1)
        before = F.linear(state.to(inputs.dtype), self.weight_hh_l0).chunk(3, -1)
        update = torch.sigmoid(update + before[1])
        candidate = torch.tanh(candidate + torch.sigmoid(reset + before[0]) * before[2])
        return (1 - update) * candidate + update * state


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), initially x.  (Medusa, arXiv 2401.10774.)

    With `num_words` words it reads y = [x; words]: R y + SiLU(W y + b), where R initially selects x from y.
    (Hydra, arXiv 2402.05109.)
    """

    def __init__(self, hidden: int, num_words: int = 0):
        super().__init__()
        self.linear = nn.Linear(hidden * (1 + num_words), hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = nn.Linear(hidden * (1 + num_words), hidden, bias=False) if num_words else None
        if self.res_connection is not None:
            nn.init.eye_(self.res_connection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., (1 + num_words) * H]; returns [..., H]."""
        residual = x if self.res_connection is None else self.res_connection(x)
        return residual + nn.functional.silu(self.linear(x))


# ── the rank of the target's choice in a draft's distribution (SpecBlock, arXiv 2605.07243) ───────────────────────────

RANKS = (1, 4, 10)
"""Upper ranks of the classes: the target's choice is in class 0 at rank 1, 1 up to rank 4, 2 up to rank 10, otherwise
3.
"""
CLASSES = len(RANKS) + 1


class RankHead(nn.Module):
    """Predicts the class of the rank of the target's choice from a slot's state and the top of its distribution."""

    def __init__(self, hidden: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(hidden + 15, hidden), nn.SiLU(), nn.Linear(hidden, CLASSES))

    def forward(self, states: Tensor, logits: Tensor) -> Tensor:
        """states [..., H], logits [..., V]; returns logits [..., 4]."""
        # at least -20: a reduced vocabulary has -inf
        best = log_probs(logits).topk(min(20, logits.shape[-1]), -1).values.clamp(min=-20.0)
        best = F.pad(best, (0, 20 - best.shape[-1]), value=-20.0)
        entropy = -(best.exp() * best).sum(-1, keepdim=True)
        gaps = best[..., :1] - best[..., [1, 2, 4]]
        features = torch.cat([best[..., :10], gaps, best[..., :1].exp(), entropy], -1)
        return self.mlp(torch.cat([states, features.to(states.dtype)], -1))


def rank_class(draft: Tensor, tokens: Tensor) -> Tensor:
    """Class of the rank of tokens [m] in draft logits [m, V]; tied logits rank after the token."""
    rank = (draft > draft.gather(-1, tokens[:, None])).sum(-1)
    return torch.bucketize(rank, torch.tensor(RANKS, device=draft.device), right=True)


def ordinal_targets(classes: int = CLASSES) -> Tensor:
    """[4, 4], row t is the label distribution if class t is true: 1 / (1 + |c - t| + max(t - c, 0))^2, normalised.

    A rank predicted too low costs twice as much as one predicted too high.
    """
    c = torch.arange(classes)
    off = c - c[:, None]
    near = 1.0 / (1 + off.abs() + (-off).clamp(min=0)) ** 2
    return near / near.sum(-1, keepdim=True)


def rank_loss(logits: Tensor, true: Tensor) -> Tensor:
    """[m] cross entropy against the ordinal targets minus their entropy, times 1 + |t - p| + max(t - p, 0) for the
    predicted class p.

    The entropy has no gradient; subtracting it gives a perfect head a loss of 0.
    """
    soft = ordinal_targets(logits.shape[-1]).to(logits)[true]
    off = true - logits.detach().argmax(-1)
    return (soft * (soft.log() - logits.log_softmax(-1))).sum(-1) * (1 + off.abs() + off.clamp(min=0))


def class_weights(ranks: Tensor) -> Tensor:
    """[4] weights in proportion to min(1, 10 / count of the class), with a mean of 1 over these rows [m]."""
    counts = torch.bincount(ranks, minlength=CLASSES)
    weights = (10.0 / counts.clamp(min=1)).clamp(max=1)
    # from the counts: a mean over rows would depend on their order
    return weights * (len(ranks) / (weights * counts).sum()) if len(ranks) else weights
