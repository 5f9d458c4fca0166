"""The texts of a training run and the order of its batches, which depends only on seed and step."""

import functools
from array import array
from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from outrider.data import packing
from outrider.data.answers.store import Answer
from outrider.decoding.draft import padded
from outrider.errors import DataError

MIN_LEARNT = 4
"""Texts with fewer tokens to train on are left out and counted."""
BUFFER = 8
"""Number of shards whose texts are shuffled together."""


class Texts:
    """Answers cut to a length, and the batches of every step; texts of similar length share a batch."""

    def __init__(
        self, answers: Sequence[Answer], *, batch: int, length: int, seed: int = 0, budget: int | None = None
    ):  # fmt: skip
        """length: maximum tokens per text.  budget: maximum tokens per packed batch.

        Raises DataError if no text has enough tokens to train on, or one is longer than the budget.
        """
        self.answers, self.size, self._seed, self.budget = CutAnswers(answers, length), batch, seed, budget
        self.left_out = len(answers) - len(self.answers)
        if not self.answers:
            raise DataError(
                f"none of the {len(answers)} answers has {MIN_LEARNT} tokens to learn within {length} tokens; prepare "
                "longer answers"
            )
        self.tokens = int(self.answers.lengths.sum(dtype=np.int64))
        longest = int(self.answers.lengths.max())
        if budget is not None and longest > budget:
            raise DataError(
                f"train.tokens {budget} is less than the longest text, {longest} tokens; set at least that many, or a "
                "lower prepare.length"
            )
        self._shards: list[list[int]] = [list(range(len(self.answers)))]
        self._order: dict[int, list[int]] = {}
        """Order of the texts in the last pass, by pass."""
        self._packed: dict[range, list[packing.Rows]] = {}
        """Packed batches of the last two ranges of steps."""

    def in_shards(self, shards: Sequence[Sequence[int]]) -> None:
        """Shuffle shards, and texts within `BUFFER` shards, instead of all texts.  shards: the texts of each."""
        if len(shards) > BUFFER:
            self._shards = [list(shard) for shard in shards]

    @property
    def steps_per_pass(self) -> int:
        return -(-len(self.answers) // self.size)

    def counts(self, vocabulary: int) -> Tensor:
        """[V] int64, how often each token is trained on."""
        counts, learnt = torch.zeros(vocabulary, dtype=torch.int64), list[int]()
        for number, text in enumerate(self.answers, 1):
            for start, end in text.learn:
                learnt += text.tokens[start:end]
            if len(learnt) >= 1 << 20 or number == len(self.answers):
                counts += torch.bincount(torch.tensor(learnt, dtype=torch.int64), minlength=vocabulary)
                learnt = []
        return counts

    def chosen(self, step: int) -> list[int]:
        """The texts of optimiser step `step`."""
        epoch, place = divmod(step, self.steps_per_pass)
        order = self._order.get(epoch)
        if order is None:  # no lock: two threads may be here, but never for the same pass
            order = self._shuffled(epoch)
            self._order = {epoch: order}
        return order[place * self.size : (place + 1) * self.size]

    def packed(self, steps: range) -> list[packing.Rows]:
        """The texts of these steps in batches of at most `budget` tokens; see `packing.packed`."""
        assert self.budget is not None
        batches = self._packed.get(steps)
        if batches is None:
            texts = [i for step in steps for i in self.chosen(step)]
            batches = packing.packed(texts, [int(self.answers.lengths[i]) for i in texts], self.budget)
            self._packed = {**dict(list(self._packed.items())[-1:]), steps: batches}
        return batches

    def tensors(self, rows: packing.Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Right-padded tokens, loss mask, and the number of each token's text within its row, from 1: [B, S] each."""
        texts = [[self.answers[i] for i in row] for row in rows]
        tokens = padded([[token for text in row for token in text.tokens] for row in texts], 0)
        loss_mask, documents = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
        for b, row in enumerate(texts):
            begin = 0
            for number, text in enumerate(row, 1):
                for start, end in text.learn:
                    loss_mask[b, begin + start : begin + end] = True
                documents[b, begin : begin + len(text.tokens)] = number
                begin += len(text.tokens)
        return tokens, loss_mask, documents

    @functools.cached_property
    def by_length(self) -> list[list[int]]:
        """All texts in groups of a batch, each of similar lengths."""
        return self.in_groups(range(len(self.answers)))

    def in_groups(self, texts: Sequence[int]) -> list[list[int]]:
        """These texts in groups of a batch, each of similar lengths, whose padded tokens stay within the budget."""
        order, lengths = sorted(texts, key=self.answers.lengths.__getitem__), self.answers.lengths
        if self.budget is None:
            return [order[i : i + self.size] for i in range(0, len(order), self.size)]
        groups: list[list[int]] = []
        for i in order:
            if not groups or len(groups[-1]) == self.size or (len(groups[-1]) + 1) * int(lengths[i]) > self.budget:
                groups.append([])
            groups[-1].append(i)
        return groups

    def _shuffled(self, epoch: int) -> list[int]:
        """The texts of one pass: shuffled, sorted by length within groups of 16 batches, the batches shuffled again.

        Many shards are handled a few at a time, so that few are open at once.
        """
        noise = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        shards, lengths = self._shards, self.answers.lengths
        shuffled, rest = list[int](), list[int]()
        if len(shards) > 1:
            shards = [shards[i] for i in torch.randperm(len(shards), generator=noise).tolist()]
        for first in range(0, len(shards), BUFFER):
            pool = rest + [i for shard in shards[first : first + BUFFER] for i in shard]
            order = [pool[i] for i in torch.randperm(len(pool), generator=noise).tolist()]
            groups = [order[start : start + 16 * self.size] for start in range(0, len(order), 16 * self.size)]
            near = [i for group in groups for i in sorted(group, key=lengths.__getitem__)]
            full = len(near) // self.size
            batches = torch.randperm(full, generator=noise).tolist()
            shuffled += [i for batch in batches for i in near[batch * self.size : (batch + 1) * self.size]]
            rest = near[full * self.size :]
        # an incomplete batch comes last
        return shuffled + rest


class CutAnswers(Sequence[Answer]):
    """Answers cut to a length on access, without those that have too few tokens to train on.

    Takes 12 bytes per answer, so the answers may stay in their file (`StoredAnswers`).
    """

    def __init__(self, answers: Sequence[Answer], length: int):
        self._answers, self._length = answers, length
        at, lengths = array("q"), array("i")
        for number, answer in enumerate(answers):
            cut = cut_to(answer, length)
            if sum(end - start for start, end in cut.learn) >= MIN_LEARNT:
                at.append(number)
                lengths.append(len(cut.tokens))
        self._at = np.array(at, np.int64)
        self.lengths = np.array(lengths, np.int32)
        """[n], number of tokens of each."""

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answer]: ...

    def __getitem__(self, index: int | slice) -> Answer | list[Answer]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return cut_to(self._answers[int(self._at[index])], self._length)


def cut_to(answer: Answer, length: int) -> Answer:
    """The answer's first `length` tokens."""
    learn = [(start, min(end, length)) for start, end in answer.learn if start < length]
    return Answer(answer.id, answer.tokens[:length], learn, answer.finish_reason)
