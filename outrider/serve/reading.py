"""How much of new prompts is read between two steps of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outrider.decoding.generate import PREFILL_CHUNK

READ_WITH_STEPS = 128
"""Most prompt tokens read between two steps of other slots; more where many prompts wait for few such slots."""


def most_read(reading: int, live: int) -> int:
    """Prompt tokens that are read before the next step, where so many slots read prompts and so many take part in
    steps."""
    wanted = max(READ_WITH_STEPS, 4 * READ_WITH_STEPS * (reading - 1) // live) if live else PREFILL_CHUNK
    return min(wanted, PREFILL_CHUNK)


def pieces(unread: Iterable[tuple[int, int]], most: int, is_shared: Callable[[int, int], bool]) -> dict[int, int]:
    """By slot, how many of its prompt's tokens are read now, `most` of all together.

    unread: slots, the eldest first, with how many tokens each has left.  is_shared: whether two slots' prompts begin
    alike; the later one takes over in the next round what the first has read.
    """
    counts: dict[int, int] = {}
    for row, left in unread:
        if any(is_shared(row, other) for other in counts):
            continue
        count = min(left, most)
        width = max(count, *counts.values(), 0)
        if counts and (len(counts) + 1) * width > most:  # one pass is as wide as the longest piece
            break
        if count > 0:
            counts[row] = count
    return counts
