"""Reduced vocabularies: drafts from the D most frequent of the target's V tokens.

m rows of a chunk, H hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import DrafterError
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.protocol import Target


class DraftVocabulary(nn.Module):
    """The tokens that can be drafted, the most frequent ones, and the target's head over them.

    The head is borrowed and frozen; only the ids are saved.  In training all other tokens form one last column, to
    which the draft gives no probability: their mass counts as rejected.
    """

    ids: Tensor
    """[D] int64, ascending."""

    def __init__(self, target: Target, size: int):
        super().__init__()
        check_size(target, size)
        self.target = target
        self.register_buffer("ids", torch.arange(size, device=target.device))
        self._heads: dict[tuple[torch.dtype, str], nn.Module] = {}
        self.register_load_state_dict_post_hook(lambda *_: self._heads.clear())

    def begin(self, counts: Tensor) -> None:
        """Choose the most frequent tokens, the lower id on a tie.  counts [V]."""
        self.ids.copy_(most_frequent(counts, len(self.ids)))
        self._heads.clear()

    def forward(self, states: Tensor) -> Tensor:
        """Logits [..., D] of states [..., H]."""
        logits: Tensor = self.head(multiplied_in(states))(states)
        return logits

    def head(self, dtype: torch.dtype) -> nn.Module:
        """The target's head over these tokens, in this dtype."""
        key = dtype, self.target.spec.weights_hash
        if key not in self._heads:
            self._heads[key] = self.target.head_over(self.ids.to(self.target.device), dtype)
        return self._heads[key]

    def whole(self, values: Tensor, others: float = -torch.inf) -> Tensor:
        """Values [..., V] from values [..., D], `others` for tokens that can't be drafted."""
        everywhere = values.new_full((*values.shape[:-1], self.target.spec.vocabulary), others)
        return everywhere.index_copy(-1, self.ids, values)

    def labels(self, tokens: Tensor) -> Tensor:
        """The columns of the target's tokens; D for those that can't be drafted."""
        at = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[at] == tokens, at, len(self.ids))

    def with_others(self, logits: Tensor) -> Tensor:
        """Draft logits [m, D + 1], -inf for the column of the others."""
        return F.pad(logits, (0, 1), value=-torch.inf)

    def reduced(self, logits: Tensor) -> Tensor:
        """The target's logits [m, D + 1] from its logits [m, V]; the last column has the mass of all others."""
        logits = logits.float()
        draftable = logits[:, self.ids]
        total, mass = logits.logsumexp(-1), draftable.logsumexp(-1)
        others = total + torch.log1p(-(mass - total).exp().clamp(max=1 - 1e-7))
        return torch.cat([draftable, others[:, None]], -1)

    def reduced_top(self, top: TopLogprobs, rows: Tensor) -> Tensor:
        """Like `reduced`, for these rows of the target's likeliest tokens."""
        at, logprobs = self.labels(top.ids[rows]), top.logprobs[rows].float()
        size, count, is_other = len(self.ids), self.target.spec.vocabulary, at == len(self.ids)
        even = top.rest[rows].float() - math.log(max(count - at.shape[1], 1))
        evenly = even + (count - size - is_other.sum(-1)).log()  # other tokens that are not among the likeliest
        others = torch.cat([logprobs.masked_fill(~is_other, -torch.inf), evenly[:, None]], -1).logsumexp(-1)
        columns = even[:, None].repeat(1, size + 1).scatter_(1, at, logprobs)
        columns[:, size] = others
        return columns


def check_size(target: Target, size: int) -> None:
    """Raises DrafterError unless the target has that many tokens."""
    if not 0 < size <= target.spec.vocabulary:
        raise DrafterError(
            f"a draft vocabulary of {size} does not fit {target.spec.name}, which has {target.spec.vocabulary} tokens; "
            f"choose 1 to {target.spec.vocabulary}"
        )


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """[size] ids, ascending, of the highest counts [V]; the lower id on a tie."""
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def multiplied_in(states: Tensor) -> torch.dtype:
    """The dtype in which states are multiplied by weights, under autocast or not."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
