"""Features from the live target: states are computed when they are needed, and nothing is stored on disk.

If the features of all texts fit into a share of the machine's memory, they are computed once and cached there.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from outrider import launcher, machine
from outrider.data.answers.store import Answer
from outrider.data.batches import TextFeatures
from outrider.data.features.shards import TextStates
from outrider.data.overlap.hash_files import HashFile
from outrider.data.texts import MIN_LEARNT, Texts
from outrider.nn.draft_model import Manifest
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.protocol import Target

__all__ = ["MIN_LEARNT", "LiveFeatures"]

CACHE_BYTES, CACHE_SHARE = 2**30, 1 / 6
"""Features of all texts are cached in memory up to this size or, on a CPU, up to this share of its total memory.

Not of its free memory, since a resumed training run must make the same choice."""
LOG_OF_OTHERS = -30.0
"""Log-probability of all tokens other than the next one; log 0 would be infinite."""


class LiveFeatures(TextFeatures):
    """Batches whose order depends only on seed and step; texts of similar length share a batch."""

    def __init__(
        self, target: Target, answers: Sequence[Answer], taps: tuple[int, ...], *, batch: int, length: int,
        seed: int = 0,
        dtype: Literal["auto", "float32", "bfloat16"] = "float32", template: str | None = None,
        cache_bytes: int | None = None,
        ngram_hashes: HashFile | None = None, budget: int | None = None,
    ):  # fmt: skip
        """cache_bytes: maximum size of features cached in memory; see `CACHE_BYTES` for the default."""
        dtype = machine.training_dtype(target.device) if dtype == "auto" else dtype
        self.ngram_hashes = ngram_hashes
        """Hashes of the texts, stored with a checkpoint; None if there are none."""
        self.target, self.taps, self.size, self.dtype = target, taps, batch, dtype
        context = min(length, target.spec.context)
        self.order = Texts(answers, batch=batch, length=context, seed=seed, budget=budget)
        self.texts, self.left_out = self.order.answers, self.order.left_out
        tokens = self.order.tokens
        self.manifest = Manifest(target.spec, taps, dtype, template, len(self.texts), tokens)
        self.states_dtype: torch.dtype = getattr(torch, "bfloat16" if dtype == "bfloat16" else target.spec.dtype)
        """Number type of states that are cached or sent to another process."""
        self.bytes = tokens * (len(taps) + 1) * target.spec.hidden * self.states_dtype.itemsize
        """Size of the features of all texts."""
        self.is_cached = self.bytes <= (most_cached(target.device) if cache_bytes is None else cache_bytes)
        self._cache: dict[int, TextStates] = {}

    @functools.cached_property
    def _group(self) -> dict[int, list[int]]:
        """Each text is always read in the same group of texts, so that its states don't depend on the step."""
        return {i: group for group in self.order.by_length for i in group}

    @property
    def place(self) -> str:
        """Where the features come from."""
        return "live"

    disk_bytes = 0

    def states(self, texts: Sequence[int]) -> dict[int, TextStates]:
        if not self.is_cached:
            return {i: states for group in self.order.in_groups(texts) for i, states in self._read(group)}
        for i in texts:
            if i not in self._cache:  # read together with its group
                began = time.perf_counter()
                for member, (taps, hidden, _) in self._read(self._group[i]):
                    taps, hidden = (part.to(self.states_dtype, copy=True) for part in (taps, hidden))
                    self._cache[member] = TextStates(taps, hidden, None)
                spent = self.reading_s[0] + time.perf_counter() - began
                self.reading_s = spent, spent * (len(self.texts) / len(self._cache) - 1)
        return {i: self._cache[i] for i in texts}

    def _read(self, group: Sequence[int]) -> Iterator[tuple[int, TextStates]]:
        """The states of these texts from one pass of the target, without padding."""
        taps, hidden = states_of(self.target, self.order.tensors([[i] for i in group])[0], self.taps, self.dtype)
        for b, i in enumerate(group):
            length = int(self.texts.lengths[i])
            yield i, TextStates(taps[b, :length], hidden[b, :length], None)


class TextAlone(LiveFeatures):
    """No pass of the target: its distribution after each token is taken to be the next token of the text."""

    place = "text"

    def states(self, texts: Sequence[int]) -> dict[int, TextStates]:
        by_text = dict[int, TextStates]()
        for i in texts:
            follows = self.order.tensors([[i]])[0][0].roll(-1).to(self.target.device)
            none, certain = follows.new_empty(len(follows), 0, dtype=torch.float), torch.zeros_like(follows).float()
            top = TopLogprobs(follows[:, None], certain[:, None], certain + LOG_OF_OTHERS)
            by_text[i] = TextStates(none[..., None], none, top)
        return by_text


def most_cached(device: torch.device) -> int:
    """Maximum bytes of cached features on a device, per process of this machine."""
    if device.type != "cpu":
        return CACHE_BYTES
    return max(CACHE_BYTES, int(CACHE_SHARE * machine.memory()) // launcher.local()[1])


def states_of(target: Target, tokens: Tensor, taps: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor]:
    """Taps [B, S, T, H] and hidden states [B, S, H] of right-padded texts [B, S], from a pass in this number type."""
    device = target.device
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        hidden, tapped = target.read(tokens.to(device), taps)
    return hidden[:, :, None][:, :, :0] if tapped is None else tapped, hidden
