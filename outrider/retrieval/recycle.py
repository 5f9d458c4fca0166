"""Token recycling: maps each token to the target's most likely successors at its last occurrence.  (Luo et al.
2408.08696.)

V vocabulary, M successors, R rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

CHANCES = (0.6, 0.11, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)
"""Probability that the next token is the successor of rank 0, 1, ...; rank 0 has 0.72 in greedy code, but less in
sampled text."""


class Successors:
    """A table that maps a token to its successors, [V, M] int32 on the CPU; the last write wins.  32 bytes per token at
    M = 8."""

    def __init__(self, vocabulary: int, width: int):
        self.width = min(width, vocabulary)
        self.table = torch.full((vocabulary, self.width), -1, dtype=torch.int32)

    def learn(self, tokens: Sequence[int], successors: Tensor) -> None:
        """successors [R, >= M] of these R tokens, most likely first; if a token occurs more than once, the last
        occurrence counts."""
        last = {token: n for n, token in enumerate(tokens) if 0 <= token < len(self.table)}
        if last:
            self.table[list(last)] = successors[list(last.values()), : self.width].to(torch.int32)

    def grow(self, root: int, most: int, depth: int) -> tuple[list[int], list[int]]:
        """A tree under `root`: tokens and parents of at most `most` nodes, most likely first according to the ranks
        along their paths.

        If all successors are known, the tree always has the same shape.
        """
        tokens: list[int] = []
        parents: list[int] = []
        first = self._of(root)
        # (-probability, order, parent, its siblings' row, rank, depth)
        candidates = [(-CHANCES[0], 0, -1, first, 0, 1)] if first and most > 0 else []
        while candidates and len(tokens) < most:
            chance, _, parent, row, rank, level = heapq.heappop(candidates)
            n = len(tokens)
            tokens.append(row[rank])
            parents.append(parent)
            if rank + 1 < len(row):
                next_chance = chance * _chance(rank + 1) / _chance(rank)
                heapq.heappush(candidates, (next_chance, 2 * n + 1, parent, row, rank + 1, level))
            successors = self._of(row[rank]) if level < depth else []
            if successors:
                heapq.heappush(candidates, (chance * CHANCES[0], 2 * n + 2, n, successors, 0, level + 1))
        return tokens, parents

    def _of(self, token: int) -> list[int]:
        row: list[int] = self.table[token].tolist() if 0 <= token < len(self.table) else []
        return row if row and row[0] >= 0 else []


def _chance(rank: int) -> float:
    return CHANCES[min(rank, len(CHANCES) - 1)]
