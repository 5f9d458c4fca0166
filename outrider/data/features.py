"""Features from the live target: tapped states are computed when they are needed, so training takes no disk.

Where the features of all texts fit into `CACHE_BYTES`, each is computed once and cached.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider import machine
from outrider.data.answers import Answer
from outrider.data.hash_files import Named
from outrider.decoding.draft import padded
from outrider.errors import DataError
from outrider.nn.draft_model import Batch, Manifest
from outrider.targets.protocol import Target

MIN_LEARNT = 4
"""Texts with fewer tokens to learn are left out and counted."""
CACHE_BYTES = 2**30
"""Features of all texts are cached where they take no more than this."""


class LiveFeatures:
    """Batches whose order depends on seed and step alone; texts of similar length share a batch."""

    def __init__(
        self, target: Target, answers: Sequence[Answer], taps: tuple[int, ...], *, batch: int, length: int,
        seed: int = 0,
        dtype: Literal["auto", "float32", "bfloat16"] = "float32", template: str | None = None,
        cache_bytes: int = CACHE_BYTES,
        ngram_hashes: Named | None = None,
    ):  # fmt: skip
        dtype = machine.training_dtype(target.device) if dtype == "auto" else dtype
        self.ngram_hashes = ngram_hashes
        """Hashes of the texts, stored with a checkpoint; None where there are none."""
        self.target, self.taps, self.size, self.seed, self.dtype = target, taps, batch, seed, dtype
        cut = [_cut(answer, min(length, target.spec.context)) for answer in answers]
        self.texts = [answer for answer in cut if sum(end - start for start, end in answer.learn) >= MIN_LEARNT]
        self._order: dict[int, list[int]] = {}
        """Of the last pass over the texts."""
        self.left_out = len(answers) - len(self.texts)
        if not self.texts:
            wanted = f"{MIN_LEARNT} tokens to learn within {length} tokens"
            raise DataError(f"none of the {len(answers)} answers has {wanted}; prepare longer answers")
        tokens = sum(len(answer.tokens) for answer in self.texts)
        self.manifest = Manifest(target.spec, taps, dtype, template, len(self.texts), tokens)
        self._cache_dtype = getattr(torch, "bfloat16" if dtype == "bfloat16" else target.spec.dtype)
        self.bytes = tokens * (len(taps) + 1) * target.spec.hidden * self._cache_dtype.itemsize
        """What the features of all texts take."""
        self.is_cached = self.bytes <= cache_bytes
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        by_length = sorted(range(len(self.texts)), key=lambda i: len(self.texts[i].tokens))
        groups = [by_length[i : i + batch] for i in range(0, len(by_length), batch)]
        # a text is always read in one batch with the same others, so that its states don't depend on the step
        self._group = {i: group for group in groups for i in group}

    @functools.cached_property
    def counts(self) -> Tensor:
        """[V] int64, how often each token is one to learn."""
        learnt = [token for text in self.texts for start, end in text.learn for token in text.tokens[start:end]]
        return torch.bincount(torch.tensor(learnt, dtype=torch.int64), minlength=self.target.spec.vocabulary)

    @property
    def steps_per_pass(self) -> int:
        return -(-len(self.texts) // self.size)

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`: tokens, taps and hidden states of its texts."""
        epoch, place = divmod(step, self.steps_per_pass)
        if epoch not in self._order:
            self._order = {epoch: self._shuffled(epoch)}
        chosen = self._order[epoch][place * self.size : (place + 1) * self.size]
        tokens, loss_mask, documents = self._tokens(chosen)
        taps, hidden = self._from_cache(chosen) if self.is_cached else self._read(tokens)
        device = self.target.device
        return Batch(tokens.to(device), loss_mask.to(device), documents.to(device), taps, hidden)

    def _tokens(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Right-padded tokens, loss mask, and 1 where there is text: [B, S] each."""
        texts = [self.texts[i] for i in chosen]
        tokens = padded([text.tokens for text in texts], 0)
        loss_mask = torch.zeros_like(tokens, dtype=torch.bool)
        for b, text in enumerate(texts):
            for start, end in text.learn:
                loss_mask[b, start:end] = True
        lengths = torch.tensor([len(text.tokens) for text in texts])
        return tokens, loss_mask, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Taps [B, S, T, H] and hidden states [B, S, H] from a pass of the target."""
        device = self.target.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            hidden, taps = self.target.read(tokens.to(device), self.taps)
        return hidden[:, :, None][:, :, :0] if taps is None else taps, hidden

    def _from_cache(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same from the cache; a text that is not cached is read with its group."""
        for i in chosen:
            if i not in self._cache:
                self._fill_cache(self._group[i])
        taps, hidden = zip(*(self._cache[i] for i in chosen), strict=True)
        return pad_sequence(list(taps), batch_first=True), pad_sequence(list(hidden), batch_first=True)

    def _fill_cache(self, group: Sequence[int]) -> None:
        """Read these texts together and cache their states without padding."""
        taps, hidden = (states.to(self._cache_dtype) for states in self._read(self._tokens(group)[0]))
        for b, i in enumerate(group):
            length = len(self.texts[i].tokens)
            self._cache[i] = taps[b, :length].clone(), hidden[b, :length].clone()

    def _shuffled(self, epoch: int) -> list[int]:
        """The texts of one pass: shuffled, sorted by length within groups of 16 batches, the batches shuffled again."""
        noise = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.texts), generator=noise).tolist()
        groups = [order[start : start + 16 * self.size] for start in range(0, len(order), 16 * self.size)]
        near = [i for group in groups for i in sorted(group, key=lambda i: len(self.texts[i].tokens))]
        full = len(near) // self.size
        # an incomplete batch comes last
        batches = [*torch.randperm(full, generator=noise).tolist(), full]
        return [i for batch in batches for i in near[batch * self.size : (batch + 1) * self.size]]


def _cut(answer: Answer, length: int) -> Answer:
    learn = [(start, min(end, length)) for start, end in answer.learn if start < length]
    return Answer(answer.id, answer.tokens[:length], learn, answer.finish_reason)
