"""Training and held-out answers, split by conversation: those that begin alike are on one side.

A log of requests has a talk of five turns five times, each time with one more turn.
"""

import numpy as np


class Openings:
    """How each conversation begins, by the hash of its prompt; 16 bytes each."""

    def __init__(self, hashes: np.ndarray, openings: np.ndarray):
        """hashes, openings [n] uint64: of each conversation's prompt, and of how it begins."""
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._openings = hashes[order], openings[order]

    def of(self, prompt_hashes: np.ndarray) -> np.ndarray:
        """[n] uint64 to [n] uint64: the opening of each prompt; its own hash where it is unknown."""
        if not len(self._hashes):
            return prompt_hashes
        at = np.minimum(np.searchsorted(self._hashes, prompt_hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == prompt_hashes, self._openings[at], prompt_hashes)


def held_out(hashes: np.ndarray, openings: np.ndarray, most: int) -> np.ndarray:
    """[n] bool: up to `most` conversations, none of which begins as one that is not held out.

    hashes, openings [n] uint64.  Which ones depends on the hashes alone: most of them stay the same when more come.
    """
    _, groups, sizes = np.unique(openings, return_inverse=True, return_counts=True)
    first = np.full(len(sizes), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(first, groups, hashes)
    order = np.argsort(first, kind="stable")
    order = order[sizes[order] <= most]
    return np.isin(groups, order[np.cumsum(sizes[order]) <= most])
