"""SpecBlock's tree: where a block branches, how wide, and which nodes of all paths stay.  (arXiv 2605.07243.)

K slots of a block, W blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

WIDTHS = (1, 4, 10, 0)
"""Number of tokens that continue into another block, by the rank class of their slot."""
Path = list[tuple[int, float]]
"""Tokens from the anchor down, each with its log probability after the one before."""


def doubt(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The slot where a draft branches, the first whose class is not 0 or else the last, and the number of tokens that
    continue there.

    ranks [..., K].
    """
    unsure = ranks != 0
    slot = torch.where(unsure.any(-1), unsure.long().argmax(-1), ranks.shape[-1] - 1)
    return slot, torch.tensor(WIDTHS, device=ranks.device)[ranks.gather(-1, slot[..., None])[..., 0]]


def likeliest(paths: Sequence[Path], most: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the likeliest nodes of these paths, descending.  Equal siblings are one, with the higher
    probability.

    A parent is never less likely than its child, so every prefix is a tree.  A token of probability 0 ends its path.
    """
    totals: dict[tuple[int, ...], float] = {}
    for path in paths:
        tokens = tuple(token for token, _ in path)
        for n, total in enumerate(accumulate(score for _, score in path), 1):
            if total == -torch.inf:
                break
            totals[tokens[:n]] = max(total, totals.get(tokens[:n], -torch.inf))
    # stable: of equals the first stays first, so parents come before their children
    nodes = sorted(totals, key=lambda node: -totals[node])[:most]
    place = {(): -1} | {node: n for n, node in enumerate(nodes)}
    return [node[-1] for node in nodes], [place[node[:-1]] for node in nodes]


# ── several blocks ────────────────────────────────────────────────────────────────────────────────────────────────────


class Leaf(NamedTuple):
    """A token after which a draft continues with another block."""

    block: int
    slot: int
    path: Path
    """From the anchor down to the token in that slot."""

    @property
    def total(self) -> float:
        return sum(score for _, score in self.path)


class Offers:
    """Candidates of blocks: their likeliest tokens and their unsure slots.  Stems are the paths before the blocks, by
    slot of the batch."""

    def __init__(self, slot: Tensor, width: Tensor, tokens: Tensor, scores: Tensor):
        """slot, width [B, W] as `doubt` gives them; tokens and log probabilities [B, W, K, n], the best first."""
        # one tensor, so that the device is synchronised once
        bits = scores.float().view(torch.int32).flatten(2)
        read = torch.cat([slot[..., None], width[..., None], tokens.flatten(2), bits], -1).cpu()
        end = read.shape[-1] - bits.shape[-1]
        self.slot, self.width = read[..., 0].tolist(), read[..., 1].tolist()
        self.tokens = read[..., 2:end].reshape(tokens.shape).tolist()
        self.scores = read[..., end:].int().view(torch.float32).reshape(scores.shape).tolist()

    def chains(self, stems: Sequence[Sequence[Path]]) -> list[list[Path]]:
        """Each stem with its block's likeliest tokens."""
        return [
            [[*stem, *self._chain(b, w)] for w, stem in enumerate(slot_stems)] for b, slot_stems in enumerate(stems)
        ]

    def leaves(self, stems: Sequence[Sequence[Path]]) -> list[list[Leaf]]:
        """The best tokens of each block's unsure slot; of all blocks the likeliest, at most as many as of one."""
        leaves = []
        for b, slot_stems in enumerate(stems):
            of_slot = [leaf for w, stem in enumerate(slot_stems) for leaf in self._of(b, w, stem)]
            leaves.append(sorted(of_slot, key=lambda leaf: -leaf.total)[: max(WIDTHS)])
        return leaves

    def _chain(self, b: int, w: int) -> Path:
        return [(ids[0], values[0]) for ids, values in zip(self.tokens[b][w], self.scores[b][w], strict=True)]

    def _of(self, b: int, w: int, stem: Path) -> list[Leaf]:
        slot, width = self.slot[b][w], self.width[b][w]
        offered = list(zip(self.tokens[b][w][slot], self.scores[b][w][slot], strict=True))[:width]
        leaves = [Leaf(w, slot, [*stem, *self._chain(b, w)[:slot], offer]) for offer in offered]
        return [leaf for leaf in leaves if leaf.total > -torch.inf]


def positions(leaves: Sequence[Sequence[Leaf]]) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, slots and tokens of leaves, each [B, C]; padded with zeros."""
    width = max(map(len, leaves))
    rows = [
        [
            *((leaf.block, leaf.slot, leaf.path[-1][0]) for leaf in slot_leaves),
            *[(0, 0, 0)] * (width - len(slot_leaves)),
        ]
        for slot_leaves in leaves
    ]
    block, slot, token = torch.tensor(rows).unbind(-1)
    return block, slot, token
