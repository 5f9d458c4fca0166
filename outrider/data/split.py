"""Splits answers into training and held-out ones; conversations with the same opening stay together.

A request log contains a five-turn conversation five times, each time with one more turn.
"""

import numpy as np


class Openings:
    """The opening of each conversation, by the hash of its prompt; 16 bytes each."""

    def __init__(self, hashes: np.ndarray, openings: np.ndarray):
        """hashes, openings [n] uint64: hashes of each conversation's prompt and of its opening."""
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._openings = hashes[order], openings[order]

    def of(self, prompt_hashes: np.ndarray) -> np.ndarray:
        """[n] uint64 to [n] uint64: the opening of each prompt; the prompt's hash if it is unknown."""
        if not len(self._hashes):
            return prompt_hashes
        at = np.minimum(np.searchsorted(self._hashes, prompt_hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == prompt_hashes, self._openings[at], prompt_hashes)


def held_out(hashes: np.ndarray, openings: np.ndarray, most: int) -> np.ndarray:
    """[n] bool: up to `most` conversations to hold out, whose openings no other conversation has.

    hashes, openings [n] uint64.  The choice depends only on the hashes: most of it stays the same when more are added.
    """
    _, groups, sizes = np.unique(openings, return_inverse=True, return_counts=True)
    first = np.full(len(sizes), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(first, groups, hashes)
    order = np.argsort(first, kind="stable")
    order = order[sizes[order] <= most]
    return np.isin(groups, order[np.cumsum(sizes[order]) <= most])
