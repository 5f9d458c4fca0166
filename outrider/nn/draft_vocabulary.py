"""The tokens that a draft may hold, where they are fewer than the target's.

D of the target's V tokens can be drafted; m rows of a chunk, H hidden size.
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
    """The tokens that a draft may hold, the most frequent ones, and the target's own head over them alone.

    The head is borrowed and frozen: nothing but the ids is saved.  In training all other tokens are one last column,
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
        """Take the most frequent tokens, the lower id of equals.  counts [V]."""
        self.ids.copy_(most_frequent(counts, len(self.ids)))
        self._heads.clear()

    def forward(self, states: Tensor) -> Tensor:
        """Logits [..., D] of states [..., H]."""
        found: Tensor = self.head(multiplied_in(states))(states)
        return found

    def head(self, dtype: torch.dtype) -> nn.Module:
        """The target's head over these tokens, its weights of this type."""
        key = dtype, self.target.spec.weights_hash
        if key not in self._heads:
            self._heads[key] = self.target.head_over(self.ids.to(self.target.device), dtype)
        return self._heads[key]

    def whole(self, values: Tensor, others: float = -torch.inf) -> Tensor:
        """Values [..., V] of values [..., D], and `others` where no draft goes."""
        everywhere = values.new_full((*values.shape[:-1], self.target.spec.vocabulary), others)
        return everywhere.index_copy(-1, self.ids, values)

    def labels(self, tokens: Tensor) -> Tensor:
        """The columns of these tokens of the target; D where they can't be drafted."""
        at = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[at] == tokens, at, len(self.ids))

    def with_others(self, logits: Tensor) -> Tensor:
        """A draft's logits [m, D + 1]."""
        return F.pad(logits, (0, 1), value=-torch.inf)

    def reduced(self, logits: Tensor) -> Tensor:
        """The target's logits [m, D + 1] of its logits [m, V]: the others' column has their whole mass."""
        logits = logits.float()
        own = logits[:, self.ids]
        everything, inside = logits.logsumexp(-1), own.logsumexp(-1)
        others = everything + torch.log1p(-(inside - everything).exp().clamp(max=1 - 1e-7))
        return torch.cat([own, others[:, None]], -1)

    def reduced_top(self, top: TopLogprobs, rows: Tensor) -> Tensor:
        """The same of these rows of the target's likeliest tokens."""
        at, logprobs = self.labels(top.ids[rows]), top.logprobs[rows].float()
        size, count, is_other = len(self.ids), self.target.spec.vocabulary, at == len(self.ids)
        even = top.rest[rows].float() - math.log(max(count - at.shape[1], 1))
        evenly = even + (count - size - is_other.sum(-1)).log()  # of the others that are not among the likeliest
        others = torch.cat([logprobs.masked_fill(~is_other, -torch.inf), evenly[:, None]], -1).logsumexp(-1)
        columns = even[:, None].repeat(1, size + 1).scatter_(1, at, logprobs)
        columns[:, size] = others
        return columns


def check_size(target: Target, size: int) -> None:
    if not 0 < size <= target.spec.vocabulary:
        raise DrafterError(
            f"a draft vocabulary of {size} does not fit {target.spec.name}, which has {target.spec.vocabulary} tokens; "
            f"choose 1 to {target.spec.vocabulary}"
        )


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """[size] ids, ascending, of the highest counts [V]; the lower id of equals."""
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def multiplied_in(states: Tensor) -> torch.dtype:
    """The type in which states are multiplied by weights here."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
