"""`Replay` for captured steps: known texts, one tree for all steps, occasional wrong tokens, all in tensors.

B slots, N nodes of the tree, D its depth, T tokens of the longest text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.replay import Replay
from outrider.decoding.draft import node_depths
from outrider.decoding.state import DecodeState, Scores
from outrider.fast.static.step import Committed, Proposed, StaticDrafter, StaticRule, StaticSlots, sizes_of

LEAF = 0.3
"""Share of steps in which a node without children is the true token."""


class StaticReplay(Replay):
    """A replay whose wrong tokens depend only on the position in the text, and whose tree is the same in every step."""

    def __init__(self, texts: Sequence[list[int]], vocabulary: int, **options: Any):
        super().__init__(texts, vocabulary, **options)
        tokens, self.parents = self._tree(list(range(self.depth)))
        self.limit = len(tokens)
        self.depths = node_depths(self.parents)
        goes_on = set(self.parents) if self.width > 1 else range(self.limit)
        self.chances = [self.right if node in goes_on else LEAF for node in range(self.limit)]

    def allocate(self, like: Any) -> Tensor:
        """[B, T], the coming text of each slot."""
        longest = max(map(len, self.texts)) + self.depth + 1
        return torch.zeros(like.slots, longest, dtype=torch.int64, device=like.device)

    def static(self, memory: Tensor, is_greedy: bool) -> StaticTexts:
        return StaticTexts(self, memory)


class StaticTexts(StaticDrafter):
    """The replay's part of a step."""

    def __init__(self, replay: StaticReplay, texts: Tensor):
        """texts [B, T]: the coming text of each slot."""
        self.replay, self.parents, self.texts = replay, replay.parents, texts
        there = functools.partial(torch.tensor, device=texts.device)
        self.depths, self.chances = there(replay.depths), there(replay.chances)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.texts]

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        for row in rows:
            text = state.tokens[row]
            known = next((known for known in self.replay.texts if known[: len(text)] == text), text)
            known = known[: self.texts.shape[1]]
            self.texts[row] = 0
            self.texts[row, : len(known)] = torch.tensor(known)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        """A node is the true next token if a number derived from its position says so, otherwise the next id."""
        at = (slots.length[:, None] + 1 + self.depths).clamp(max=self.texts.shape[1] - 1)
        order = torch.arange(len(self.depths), device=at.device)
        is_right = (at * 7919 + order * 104729) % 1009 < 1009 * self.chances
        coming = self.texts.gather(1, at)
        tokens = torch.where(is_right, coming, (coming + 1 + order) % self.replay.vocabulary)
        return Proposed(tokens, sizes_of(slots, len(self.parents)))

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        pass
