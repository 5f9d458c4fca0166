"""Passes of families whose rotary factors go by the length of the whole text: each token has those that `generate` gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding.state import Scores
from outrider.targets.cache import SlotCache
from outrider.targets.rotary import deciding

if TYPE_CHECKING:
    from outrider.targets.transformers import TransformersTarget


@contextmanager
def reading_prompt(target: TransformersTarget, cache: SlotCache, tokens: Tensor, lengths: Sequence[int]) -> Iterator[None]:
    """A pass over part of a prompt: as far as is known, the text ends with one token behind it."""
    if target.family.rotary is None:
        yield
        return
    cache.reads(tokens)
    ends = [cache.lengths[row] + length + 1 for row, length in zip(cache.rows, lengths, strict=True)]
    for row, end in zip(cache.rows, ends, strict=True):
        cache.prompts[row] = -1 if cache.lengths[row] else end
        cache.long[row] = end > target.family.rotary.original
    with deciding(torch.tensor(ends, device=target.device)[:, None].expand(-1, tokens.shape[1])):
        yield


def verify(
    target: TransformersTarget, cache: SlotCache, rows: list[int], tokens: Tensor, visible: Tensor | None,
    depths: Tensor | None, taps: tuple[int, ...],
) -> Scores:  # fmt: skip
    """As `verify`: each token has the factors that `generate` gives it."""
    rotary = target.family.rotary
    assert rotary is not None
    for row in rows:
        length = cache.lengths[row] + 1
        is_prompt_in_parts = cache.prompts[row] not in (0, length) and length > rotary.original
        if is_prompt_in_parts or (rotary.rereads and length > rotary.original and not cache.long[row]):
            _reread(target, cache, row, length if is_prompt_in_parts else rotary.original + 1)
        cache.prompts[row] = 0
    cache.open(rows, tokens.shape[1])
    cache.reads(tokens)
    ends = cache.positions(depths).expand_as(tokens) + 1
    with deciding(ends):
        scores: Scores = target._each(tokens, cache, target._scores, visible, depths, taps)
    if rotary.rereads:
        for b, row in enumerate(rows):
            if not cache.long[row] and int(ends[b].max()) > rotary.original:
                seen, deep = (None if values is None else values[b : b + 1] for values in (visible, depths))
                found = _as_long(target, cache.texts[row][: cache.lengths[row]], tokens[b : b + 1], seen, deep, taps)
                for values, others in zip(scores, found, strict=True):
                    if values is not None and others is not None:
                        values[b, ends[b] > rotary.original] = others[0, ends[b] > rotary.original]
    return scores


def _reread(target: TransformersTarget, cache: SlotCache, row: int, length: int) -> None:
    """Read a slot's text again, as part of a text so long."""
    text = torch.tensor([cache.texts[row][: cache.lengths[row]]], device=target.device)
    cache.lengths[row], cache.long[row] = 0, True
    cache.open([row], text.shape[1])
    cache.reads(text)
    with deciding(torch.full_like(text, length)):
        target._states(text, cache, ())
    cache.append([text.shape[1]])


def _as_long(
    target: TransformersTarget, text: list[int], tokens: Tensor, visible: Tensor | None, depths: Tensor | None,
    taps: tuple[int, ...],
) -> Scores:  # fmt: skip
    """Scores of tokens [1, n] behind a text that is read again as part of a longer one."""
    again = target.allocate(1, len(text) + tokens.shape[1] + 1)
    again.lengths, again.texts = [len(text)], [text]
    if text:
        _reread(target, again, 0, len(text) + 1 + tokens.shape[1])
    again.open([0], tokens.shape[1])
    with deciding(again.positions(depths).expand_as(tokens) + 1):
        return target._scores(tokens, again, visible, depths, taps)
