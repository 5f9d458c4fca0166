"""A chunk of several slots' prompts as one pass, or as several if padding to one length is slow or not allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.decoding.state import Scores

FULL = 128
"""Above this many tokens, the time of a pass on a CPU grows with their number, so padding costs time."""


def shares(lengths: Sequence[int], most: int) -> list[slice]:
    """Which adjacent rows share a pass: as many as have at most `most` tokens with padding, and at least one."""
    slices, first = [], 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - first) * max(lengths[first : end + 1]) > most:
            slices.append(slice(first, end))
            first = end
    return slices


def joined(parts: Sequence[Scores]) -> Scores:
    """Chunks of unequal length, right-padded into one."""
    logits, hidden, taps, *_ = zip(*parts, strict=True)
    whole = [
        None if each[0] is None else pad_sequence([row for part in each for row in part], batch_first=True)
        for each in (hidden, taps)
    ]
    return Scores(torch.cat(logits), *whole)  # type: ignore[arg-type]
