"""Batches of texts and the target's states of them, padded or packed, whichever way the states come."""

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from outrider.data.feature_shards import Stored
from outrider.data.packing import Rows, side_by_side
from outrider.data.texts import Texts
from outrider.nn.draft_model import Batch
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.protocol import Target


class OfTexts(ABC):
    """What all features have of their texts, and how these become batches."""

    order: Texts
    target: Target
    taps: tuple[int, ...]

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`: tokens, taps and hidden states of its texts."""
        return self._joined([[i] for i in self.order.chosen(step)])

    def packed(self, steps: range) -> Iterator[Batch]:
        """The texts of these steps in batches of at most as many tokens as the budget, several texts to a row."""
        for rows in self.order.packed(steps):
            yield self._joined(rows)

    def _joined(self, rows: Rows) -> Batch:
        """The batch of these texts."""
        device = self.target.device
        tokens, loss_mask, documents = (part.to(device) for part in self.order.tensors(rows))
        states = self._states([i for row in rows for i in row])
        laid = lambda values: side_by_side([[values(states[i]) for i in row] for row in rows])
        top = None
        if states[rows[0][0]].top is not None:
            top = TopLogprobs(*(laid(operator.attrgetter(f"top.{name}")) for name in ("ids", "logprobs", "rest")))
        taps, hidden = laid(operator.attrgetter("taps")), laid(operator.attrgetter("hidden"))
        return Batch(tokens, loss_mask, documents, taps, hidden, top, per_row=max(map(len, rows)))

    @abstractmethod
    def _states(self, texts: Sequence[int]) -> dict[int, Stored]:
        """The target's states of these texts, by number."""

    @functools.cached_property
    def counts(self) -> Tensor:
        """[V] int64, how often each token is one to learn."""
        return self.order.counts(self.target.spec.vocabulary)

    @property
    def steps_per_pass(self) -> int:
        return self.order.steps_per_pass
