"""Batches of texts and the target's states of them, padded or packed, whichever way the states come."""

import dataclasses
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.data.features.ahead import Key
from outrider.data.features.shards import Stored
from outrider.data.packing import Rows, side_by_side
from outrider.data.texts import Texts
from outrider.errors import DataError
from outrider.nn.draft_model import Batch, Share
from outrider.nn.sequence import Stripe
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.protocol import Target


class OfTexts(ABC):
    """What all features have of their texts, and how these become batches."""

    order: Texts
    target: Target
    reading_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that the target has read texts for their states so far, and will, if they are read once."""
    taps: tuple[int, ...]
    _process: tuple[int, int] | None = None
    """Rank of this process and number of processes, where several share the rows of a batch."""
    _stripe: Stripe | None = None
    """This process's positions of each row, where several share these."""

    def share(self, rank: int, count: int, stripe: Stripe | None = None) -> None:
        """From now on give every `count`-th row of a batch, from row `rank` on, with the taps of these positions.

        Raises DataError where a packed batch may have fewer rows than there are processes.
        """
        budget, longest = self.order.budget, int(self.order.answers.lengths.max())
        if budget is not None and budget < count * longest:
            raise DataError(
                f"train.tokens {budget} holds {budget // longest} texts as long as the longest, {longest} tokens, but "
                f"{count} processes share the rows of a batch; set at least {count * longest}, or start fewer processes"
            )
        self._process, self._stripe = (rank, count), stripe

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`: tokens, taps and hidden states of its texts."""
        return self.made((range(step, step + 1), None))

    def packed(self, steps: range) -> Iterator[Batch]:
        """The texts of these steps in batches of at most as many tokens as the budget, several texts to a row."""
        for rows in self.order.packed(steps):
            yield self._joined(rows)

    def made(self, key: Key) -> Batch:
        """One of these batches, by its steps and its number."""
        steps, number = key
        if number is not None:
            return self._joined(self.order.packed(steps)[number])
        return self._joined([[i] for i in self.order.chosen(steps.start)])

    def own_rows(self, count: int) -> slice:
        """Which of a batch's rows this process has."""
        if self._process is None:
            return slice(None)
        rank, processes = self._process
        return slice(rank, None, processes) if rank < count else slice(0, 1)

    def _joined(self, rows: Rows) -> Batch:
        """The batch of these texts, or this process's rows of it."""
        tokens, loss_mask, documents = (part.to(self.target.device) for part in self.order.tensors(rows))
        none, per_row = torch.empty(*tokens.shape, 0, device=tokens.device), max(map(len, rows))
        whole = Batch(tokens, loss_mask, documents, none[..., None], none, per_row=per_row)
        if self._process is None:
            return self._with_states(whole, rows)
        there = self.own_rows(len(rows))
        share = Share(whole, there, counts=self._process[0] < len(rows))
        own = Batch(tokens[there], loss_mask[there], documents[there], none, none, per_row=per_row, share=share)
        return self._with_states(own, rows[there])

    def _with_states(self, batch: Batch, rows: Rows) -> Batch:
        """The batch of these texts with their states."""
        states = self._states([i for row in rows for i in row])
        laid = lambda values: _as_wide(side_by_side([[values(states[i]) for i in row] for row in rows]), batch.tokens)
        top = None
        if states[rows[0][0]].top is not None:
            top = TopLogprobs(*(laid(operator.attrgetter(f"top.{name}")) for name in ("ids", "logprobs", "rest")))
        taps, hidden = laid(operator.attrgetter("taps")), laid(operator.attrgetter("hidden"))
        if self._stripe is not None:
            taps = self._stripe.own(taps)
        return dataclasses.replace(batch, taps=taps, hidden=hidden, top=top, stripe=self._stripe)

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


def _as_wide(values: Tensor, tokens: Tensor) -> Tensor:
    """values [B, n, ...] padded with zeros to the width of tokens [B, S], which another process's row may give."""
    missing = tokens.shape[1] - values.shape[1]
    return values if not missing else F.pad(values, (*[0, 0] * (values.dim() - 2), 0, missing))
