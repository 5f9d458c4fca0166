"""LiLiCorr's scores of a lattice: a small transformer over all candidates of a block at once.  (arXiv 2608.20530.)

n blocks, K rows, k candidates of a row, H hidden size of the target, h of the scorer, f size of a factor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.nn.blocks import RMSNorm

FEATURES = 5


class Scorer(nn.Module):
    """Scores between neighbouring candidates, as cosines times a fixed scale.  Parameter names follow the released
    drafts."""

    def __init__(
        self, size: int, hidden: int, rows: int, candidates: int, layers: int, heads: int, mlp_ratio: float,
        factor: int, scale: float, eps: float, norm_eps: float,
    ):  # fmt: skip
        """size: H; hidden: h; rows: most rows of a block; factor: f; eps: of the factors' norms."""
        super().__init__()
        self.scale, self.eps, self.candidates = scale, eps, candidates
        self.token_proj = nn.Identity() if size == hidden else nn.Linear(size, hidden)
        self.pass_hidden_proj, self.context_proj = nn.Linear(size, hidden), nn.Linear(size, hidden)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )
        self.slot_embedding = nn.Parameter(0.02 * torch.randn(1, 1, rows, 1, hidden))
        self.rank_embedding = nn.Parameter(0.02 * torch.randn(1, 1, 1, candidates, hidden))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * rows + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(Layer(hidden, heads, mlp_ratio, norm_eps) for _ in range(layers))
        self.output_norm, self.anchor_norm = RMSNorm(hidden, norm_eps), RMSNorm(hidden, norm_eps)
        self.factor_input_proj = nn.Linear(3 * hidden, hidden)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(hidden, factor) for _ in range(3))

    def forward(self, words: Tensor, log_q: Tensor, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [n, k] of row 0's candidates, and [n, K - 1, k, k] of each row's (last) after those of the row before.

        words [n, K, k, H], the target's embedding of the candidates; log_q [n, K, k], their log-probabilities by their
        row alone; states [n, K, H]; before [n, H], the context of the token before the anchor, zeros if there is none.
        """
        rows = log_q.shape[1]
        x = self.token_proj(words) + self.pass_hidden_proj(states)[:, :, None]
        x = x + self.feature_mlp(self.features(log_q).to(x))
        x = (x + self.slot_embedding[0, :, :rows] + self.rank_embedding[0]).flatten(1, 2)
        bias = self.bias(rows).to(x)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (rows, -1))
        anchor = self.anchor_norm(self.context_proj(before) * before.any(-1, keepdim=True))
        row = anchor[:, None, None].expand_as(x)
        factors = F.silu(self.factor_input_proj(torch.cat([x, row, x * row], -1)))
        unit = lambda factor: F.normalize(factor, dim=-1, eps=self.eps)
        out, into = unit(self.out_head(factors)), unit(self.in_head(factors))
        first = (unit(self.anchor_out_head(anchor))[:, None] * into[:, 0]).sum(-1)
        return self.scale * first, self.scale * (out[:, :-1] @ into[:, 1:].transpose(-1, -2))

    def features(self, log_q: Tensor) -> Tensor:
        """[n, K, k, 5]: log q, q, the distance from the best, the rank as a share, and whether it is the first."""
        order = torch.arange(self.candidates, device=log_q.device)
        rank, is_first = order / max(1, self.candidates - 1), (order == 0).to(log_q)
        gap = log_q - log_q.amax(-1, keepdim=True)
        return torch.stack([log_q, log_q.exp(), gap, rank.to(log_q).expand_as(gap), is_first.expand_as(gap)], -1)

    def bias(self, rows: int) -> Tensor:
        """[heads, K k, K k], added to the attention by the distance of the candidates' rows."""
        row = torch.arange(rows, device=self.same_slot_bias.device).repeat_interleave(self.candidates)
        away = row[:, None] - row
        middle = self.relative_slot_bias.shape[1] // 2
        return self.relative_slot_bias[:, away + middle] + (away == 0) * self.same_slot_bias[:, None, None]


class Layer(nn.Module):
    """Attention over all candidates, in both directions, and an MLP."""

    def __init__(self, hidden: int, heads: int, mlp_ratio: float, norm_eps: float):
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(hidden, norm_eps), RMSNorm(hidden, norm_eps)
        self.attn = Attention(hidden, heads)
        inner = int(hidden * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(hidden, inner), nn.SiLU(), nn.Linear(inner, hidden))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(nn.Module):
    """Attention with one matrix for queries, keys and values, and a bias per head."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [n, m, h]; bias [heads, m, m]."""
        each = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = each.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, bias.expand(len(x), -1, -1, -1))
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out
