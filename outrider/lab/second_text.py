"""A second text per slot, which the same target reads in a separate cache, for its distributions there.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft, padded
from outrider.decoding.scheduler import max_prefill_chunk
from outrider.lab.swap import Swap, SwappedText

CATCH_UP = 32
"""Most tokens of a second text that are read together with a draft; more are read before it."""


@dataclass
class Reading:
    """One slot's second text."""

    text: SwappedText
    cached: int = 0
    """Number of cached tokens, including the preamble; they don't change any more."""


class SecondTexts:
    """The texts of all slots with words swapped, after a preamble, and the target's cache of them."""

    def __init__(
        self, target: Any, cache: Any, swap: Swap, preamble: Sequence[int] = (), beginning: Sequence[int] = ()
    ):  # fmt: skip
        """cache: the batch's, which says how many slots there are, and how long.  beginning: ids that stand before
        every text, and once where there is a preamble."""
        self._target, self._swap, self._preamble, self._beginning = target, swap, list(preamble), list(beginning)
        # every slot is as wide as the widest one
        room = math.ceil(cache.length * swap.growth) + len(self._preamble) + CATCH_UP + 2 * swap.longest + 2
        self._cache = target.allocate(cache.slots, room)
        self._texts: dict[int, Reading] = {}

    def free(self, row: int) -> None:
        if self._texts.pop(row, None) is not None:
            self._cache.free([row])

    def read(self, rows: Sequence[int], texts: Sequence[Sequence[int]], draft: Draft) -> Tensor:
        """Logits [B, N+1, V] after each second text and after each node of the draft that follows it."""
        ends = [self._follow(row, text) for row, text in zip(rows, texts, strict=True)]
        self._prefill(rows)
        unread = [[*self._whole(row)[self._texts[row].cached :], *end] for row, end in zip(rows, ends, strict=True)]
        anchors = torch.tensor([tokens[0] for tokens in unread], device=draft.tokens.device)
        context = [tokens[1:] for tokens in unread]
        scores = self._target.verify(self._cache, rows, anchors, _after(context, draft), ())
        self._keep(rows, unread)
        first = torch.tensor([len(tokens) for tokens in context], device=scores.logits.device)
        columns = first[:, None] + torch.arange(draft.tokens.shape[1] + 1, device=first.device)
        columns = columns.clamp(max=scores.logits.shape[1] - 1)  # padding of slots with fewer nodes
        logits: Tensor = scores.logits[torch.arange(len(first), device=first.device)[:, None], columns]
        return logits

    def _whole(self, row: int) -> list[int]:
        return self._texts[row].text.tokens

    def _follow(self, row: int, text: Sequence[int]) -> list[int]:
        """Read on in a slot's own text; returns the end of the second one that may still change."""
        if row not in self._texts:
            first = len(self._beginning)
            is_twice = bool(first and self._preamble) and [*text[:first]] == self._beginning
            self._texts[row] = Reading(SwappedText(self._swap, list(self._preamble), first if is_twice else 0))
        reading = self._texts[row]
        end = reading.text.follow(text)
        if reading.cached >= len(reading.text.tokens):  # the anchor of a pass must not change any more
            self._cache.free([row])
            reading.cached = 0
        return end

    def _prefill(self, rows: Sequence[int]) -> None:
        """Read texts with many uncached tokens up to their last token."""
        for row in rows:
            reading = self._texts[row]
            while self._is_long(reading):
                tokens = reading.text.tokens[reading.cached : -1][: max_prefill_chunk(self._target.device)]
                chunk = padded([tokens], 0, self._target.device)
                self._target.prefill(self._cache, [row], chunk, [len(tokens)], ())
                reading.cached += len(tokens)

    @staticmethod
    def _is_long(reading: Reading) -> bool:
        """Whether to read it in a separate pass, as at the beginning of a text."""
        left = len(reading.text.tokens) - 1 - reading.cached
        return left > CATCH_UP or (left > 0 and not reading.cached)

    def _keep(self, rows: Sequence[int], unread: Sequence[Sequence[int]]) -> None:
        """Keep the tokens that won't change in the cache.  Some of them are read again each time, since a pass must
        start with an uncached token, and there may be no new one while a word is incomplete."""
        paths = []
        for row in rows:
            reading = self._texts[row]
            count = max(1, len(reading.text.tokens) - self._swap.longest - 1 - reading.cached)
            paths.append(range(count - 1))
            reading.cached += count
        self._cache.keep(paths)


def _after(context: Sequence[Sequence[int]], draft: Draft) -> Draft:
    """The draft after more tokens of each slot's text, as one tree."""
    nodes, parents = [], []
    for b, tokens in enumerate(context):
        size, first = draft.live[b], len(tokens)
        nodes.append([*tokens, *draft.ids[b][:size]])
        parents.append([*range(-1, first - 1), *(first + parent for parent in draft.tree[b][:size])])
    sizes = torch.tensor([len(tokens) for tokens in nodes])
    device = draft.tokens.device
    chain = Draft.chain(padded(nodes, 0, device), sizes)
    return replace(chain, parents=padded(parents, -1, device), branches=True) if draft.branches else chain
