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
from outrider.data.texts import MIN_LEARNT, OfTexts, Texts
from outrider.nn.draft_model import Batch, Manifest
from outrider.targets.protocol import Target

__all__ = ["CACHE_BYTES", "MIN_LEARNT", "LiveFeatures"]

CACHE_BYTES = 2**30
"""Features of all texts are cached where they take no more than this."""


class LiveFeatures(OfTexts):
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
        self.target, self.taps, self.size, self.dtype = target, taps, batch, dtype
        self.order = Texts(answers, batch=batch, length=min(length, target.spec.context), seed=seed)
        self.texts, self.left_out = self.order.answers, self.order.left_out
        tokens = self.order.tokens
        self.manifest = Manifest(target.spec, taps, dtype, template, len(self.texts), tokens)
        self._cache_dtype = getattr(torch, "bfloat16" if dtype == "bfloat16" else target.spec.dtype)
        self.bytes = tokens * (len(taps) + 1) * target.spec.hidden * self._cache_dtype.itemsize
        """What the features of all texts take."""
        self.is_cached = self.bytes <= cache_bytes
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    @functools.cached_property
    def _group(self) -> dict[int, list[int]]:
        """A text is always read in one batch with the same others, so that its states don't depend on the step."""
        return {i: group for group in self.order.by_length for i in group}

    @property
    def place(self) -> str:
        """Where the features come from."""
        return "live"

    disk_bytes = 0
    """What they take there."""

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`: tokens, taps and hidden states of its texts."""
        chosen = self.order.chosen(step)
        tokens, loss_mask, documents = self.order.tensors(chosen)
        taps, hidden = self._from_cache(chosen) if self.is_cached else self._read(tokens)
        device = self.target.device
        return Batch(tokens.to(device), loss_mask.to(device), documents.to(device), taps, hidden)

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Taps [B, S, T, H] and hidden states [B, S, H] from a pass of the target."""
        return states_of(self.target, tokens, self.taps, self.dtype)

    def _from_cache(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same from the cache; a text that is not cached is read with its group."""
        for i in chosen:
            if i not in self._cache:
                self._fill_cache(self._group[i])
        taps, hidden = zip(*(self._cache[i] for i in chosen), strict=True)
        return pad_sequence(list(taps), batch_first=True), pad_sequence(list(hidden), batch_first=True)

    def _fill_cache(self, group: Sequence[int]) -> None:
        """Read these texts together and cache their states without padding."""
        taps, hidden = (states.to(self._cache_dtype) for states in self._read(self.order.tensors(group)[0]))
        for b, i in enumerate(group):
            length = len(self.texts[i].tokens)
            self._cache[i] = taps[b, :length].clone(), hidden[b, :length].clone()


def states_of(target: Target, tokens: Tensor, taps: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor]:
    """Taps [B, S, T, H] and hidden states [B, S, H] of right-padded texts [B, S], from a pass in this number type."""
    device = target.device
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        hidden, tapped = target.read(tokens.to(device), taps)
    return hidden[:, :, None][:, :, :0] if tapped is None else tapped, hidden
