"""Batches of texts with the target's states, padded or packed, wherever the states come from."""

import dataclasses
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.data.features.prefetch import BatchKey
from outrider.data.features.shards import TextStates
from outrider.data.packing import Rows, side_by_side
from outrider.data.texts import Texts
from outrider.errors import DataError
from outrider.nn.draft_model import Batch, Share
from outrider.nn.sequence import Stripe
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.protocol import Target


class TextFeatures(ABC):
    """Base of all feature sources: the order of the texts, and how texts and states become batches."""

    order: Texts
    target: Target
    reading_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that the target has spent reading texts and will still spend, if each text is read once."""
    taps: tuple[int, ...]
    _process: tuple[int, int] | None = None
    """Rank of this process and number of processes, if several share the rows of a batch."""
    _stripe: Stripe | None = None
    """This process's positions of each row, if several processes share a row."""

    def share(self, rank: int, count: int, stripe: Stripe | None = None) -> None:
        """From now on, return every `count`-th row of a batch, starting at row `rank`, with the taps of these
        positions.

        Raises DataError if a packed batch may have fewer rows than there are processes.
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
        """The texts of these steps in batches within the token budget, several texts per row."""
        for rows in self.order.packed(steps):
            yield self._joined(rows)

    def made(self, key: BatchKey) -> Batch:
        """The batch of a key."""
        steps, number = key
        if number is not None:
            return self._joined(self.order.packed(steps)[number])
        return self._joined([[i] for i in self.order.chosen(steps.start)])

    def own_rows(self, count: int) -> slice:
        """The rows of a batch that belong to this process."""
        if self._process is None:
            return slice(None)
        rank, processes = self._process
        return slice(rank, None, processes) if rank < count else slice(0, 1)

    def _joined(self, rows: Rows) -> Batch:
        """The batch of these texts, or this process's rows of it."""
        tokens, loss_mask, documents = (part.to(self.target.device) for part in self.order.tensors(rows))
        no_states = torch.empty(*tokens.shape, 0, device=tokens.device)
        per_row = max(map(len, rows))
        whole = Batch(tokens, loss_mask, documents, no_states[..., None], no_states, per_row=per_row)
        if self._process is None:
            return self._with_states(whole, rows)
        at = self.own_rows(len(rows))
        share = Share(whole, at, counts=self._process[0] < len(rows))
        part = Batch(tokens[at], loss_mask[at], documents[at], no_states, no_states, per_row=per_row, share=share)
        return self._with_states(part, rows[at])

    def _with_states(self, batch: Batch, rows: Rows) -> Batch:
        """The batch of these texts with their states."""
        states = self.states([i for row in rows for i in row])
        laid = lambda values: _as_wide(side_by_side([[values(states[i]) for i in row] for row in rows]), batch.tokens)
        top = None
        if states[rows[0][0]].top is not None:
            top = TopLogprobs(*(laid(operator.attrgetter(f"top.{name}")) for name in ("ids", "logprobs", "rest")))
        taps, hidden = laid(operator.attrgetter("taps")), laid(operator.attrgetter("hidden"))
        if self._stripe is not None:
            taps = self._stripe.own(taps)
        return dataclasses.replace(batch, taps=taps, hidden=hidden, top=top, stripe=self._stripe)

    @abstractmethod
    def states(self, texts: Sequence[int]) -> dict[int, TextStates]:
        """The target's states of these texts, by the number of the text."""

    @functools.cached_property
    def counts(self) -> Tensor:
        """[V] int64, how often each token is trained on."""
        return self.order.counts(self.target.spec.vocabulary)

    @property
    def steps_per_pass(self) -> int:
        return self.order.steps_per_pass


def _as_wide(values: Tensor, tokens: Tensor) -> Tensor:
    """values [B, n, ...] zero-padded to the width of tokens [B, S]; the longest row may be another process's."""
    missing = tokens.shape[1] - values.shape[1]
    return values if not missing else F.pad(values, (*[0, 0] * (values.dim() - 2), 0, missing))
