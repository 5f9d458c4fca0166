"""Each token with the target's likeliest successors, as of its last occurrence.  (Luo et al. 2408.08696.)

V vocabulary, M successors, R rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

CHANCES = (0.6, 0.11, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)
"""How often the next token is the successor of rank 0, 1, ...; in greedy code rank 0 had 0.72, in sampled text less."""


class Successors:
    """A table token to successors, [V, M] int32 on the CPU; the last write wins.  32 bytes a token at M = 8."""

    def __init__(self, vocabulary: int, width: int):
        self.width = min(width, vocabulary)
        self.table = torch.full((vocabulary, self.width), -1, dtype=torch.int32)

    def learn(self, tokens: Sequence[int], successors: Tensor) -> None:
        """successors [R, >= M], likeliest first, of these R tokens; of equal tokens the last is stored."""
        last = {token: n for n, token in enumerate(tokens) if 0 <= token < len(self.table)}
        if last:
            self.table[list(last)] = successors[list(last.values()), : self.width].to(torch.int32)

    def grow(self, root: int, most: int, depth: int) -> tuple[list[int], list[int]]:
        """A tree under `root`: tokens and parents of at most `most` nodes, the likeliest first, by the ranks along
        their path.

        Where all successors are known, the tree always has the same shape.
        """
        tokens: list[int] = []
        parents: list[int] = []
        first = self._of(root)
        # minus the node's probability, its order, its parent, the successors it is one of, its rank, its depth
        candidates = [(-CHANCES[0], 0, -1, first, 0, 1)] if first and most > 0 else []
        while candidates and len(tokens) < most:
            chance, _, parent, row, rank, deep = heapq.heappop(candidates)
            here = len(tokens)
            tokens.append(row[rank])
            parents.append(parent)
            if rank + 1 < len(row):
                younger = chance * _chance(rank + 1) / _chance(rank)
                heapq.heappush(candidates, (younger, 2 * here + 1, parent, row, rank + 1, deep))
            below = self._of(row[rank]) if deep < depth else []
            if below:
                heapq.heappush(candidates, (chance * CHANCES[0], 2 * here + 2, here, below, 0, deep + 1))
        return tokens, parents

    def _of(self, token: int) -> list[int]:
        row: list[int] = self.table[token].tolist() if 0 <= token < len(self.table) else []
        return row if row and row[0] >= 0 else []


def _chance(rank: int) -> float:
    return CHANCES[min(rank, len(CHANCES) - 1)]
