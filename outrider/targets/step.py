"""The target's step as one compiled graph: the same modules, the same hooks, traced once and frozen.

Sizes stay open: tokens a row, columns that are read, the cache's length; and slots, but that one slot has a graph of its own.
A pass of one token is padded to two: reading the weights costs the same, and no size is special.

R rows of a pass, n tokens a row, h heads, L cache length.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

from outrider import compiled
from outrider.compiled import Graph, Graphs, NotCompiled, dense
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Scores
from outrider.targets import cache, family
from outrider.targets.cache import Buffers, Columns, SlotCache

EXAMPLE = {False: (1, 8, 300), True: (4, 8, 300)}
"""Rows, tokens a row, and columns that stand before them, in the passes that are traced."""


class CompiledStep(Graphs):
    """Verify passes of a target."""

    def __init__(self, target: Any):
        super().__init__()
        self.target = target

    def model(self) -> nn.Module:
        family = self.target.family
        if family.masks == "none" or family.is_recurrent:
            raise NotCompiled(
                f"{self.target.spec.name}'s family takes no masks or keeps a recurrent state; its steps stay plain"
            )
        model: nn.Module = self.target.model
        return model

    def settings(self) -> Sequence[object]:
        model = self.target.model
        own = (transformers.__version__, type(model).__name__, model.config.to_json_string(), self.target.family)
        return [own, *compiled.code(compiled, family, cache, sys.modules[__name__])]

    def run(
        self, tokens: Tensor, cache: SlotCache, visible: Tensor | None, depths: Tensor | None, taps: tuple[int, ...]
    ) -> Scores:
        """The open pass over tokens [R, n], n at least 2."""
        return self._run(self.graphs[len(tokens) > 1], tokens, cache, visible, depths, taps)

    def _run(
        self, graph: Any, tokens: Tensor, cache: SlotCache, visible: Tensor | None, depths: Tensor | None, taps: tuple[int, ...]
    ) -> Scores:
        given, columns, buffers = self._arguments(tokens, cache, visible, depths)
        logits, hidden, layers = graph(tokens.contiguous(), given, columns, buffers)
        return Scores(logits, hidden, torch.stack([layers[tap] for tap in taps], 2) if taps else None)

    def example(self, several: bool) -> tuple[nn.Module, tuple[Any, ...], Any]:
        kept, tokens = self._pass(several)
        given, columns, buffers = self._arguments(tokens, kept, None, None)
        r = {0: Dim("rows", min=2, max=1024)} if several else {}
        width, end, length = Dim("width", min=2, max=1024), Dim("end", min=3, max=2**20), Dim("length", min=4, max=2**20)
        of_rows = {**r, 1: width}
        dims: dict[str, Any] = {"masks": {kind: {**r, 2: width, 3: end} for kind in given["masks"]}}
        if "positions" in given:
            dims["positions"] = of_rows
        of_buffers = [({**r, 2: length},) * 2 for _ in buffers]
        traced = _Traced(self.target, kept.layers)
        return traced, (tokens, given, columns, buffers), (of_rows, dims, of_rows, of_buffers)

    def _pass(self, several: bool) -> tuple[SlotCache, Tensor]:
        """An open pass behind some text in slots of unequal length, and its tokens."""
        rows, width, before = EXAMPLE[several]
        before = min(before, self.target.spec.context // 2)
        noise = torch.Generator().manual_seed(5)
        text = torch.randint(self.target.spec.vocabulary, (rows, before + width), generator=noise).to(self.target.device)
        cache = self.target.allocate(rows, before + width + 8)
        self.target.prefill(cache, list(range(rows)), text[:, :before], [before - row for row in range(rows)])
        cache.open(range(rows), width)
        return cache, text[:, before:]

    @torch.inference_mode()
    def apart(self, graph: Graph, several: bool) -> tuple[float, float]:
        """Over a chain, a tree and one token, where the mode has trees."""
        kept, text = self._pass(several)
        rows, worst = list(range(len(text))), 0.0
        drafts = [_chain(text[:, 1:]), _chain(text[:, 1:2])]
        if self.target.spec.mode == "tree":
            drafts.append(_tree(text[:, 1:7]))
        for draft in drafts:
            plain = self.target.verify(kept, rows, text[:, 0], draft).logits
            tokens, visible, depths = passed(text[:, 0], draft, self.target.spec.vocabulary)
            fast = self._run(graph, tokens, kept, visible, depths, ()).logits
            worst = max(worst, float((plain - fast).abs().max()))
        return worst, self.target.selftest.allowed

    def _arguments(
        self, tokens: Tensor, cache: SlotCache, visible: Tensor | None, depths: Tensor | None
    ) -> tuple[dict[str, Any], Tensor, Buffers]:
        (rows, width), dtype = tokens.shape, self.target.model.dtype
        masks, positions = self.target.family.seen(cache, visible, depths, dtype, self.target.spec.context)
        given: dict[str, Any] = {"masks": {kind: dense(mask, rows, 1, width, mask.shape[-1]) for kind, mask in masks.items()}}
        if positions is not None:
            given["positions"] = dense(positions, rows, width)
        return given, dense(cache.positions(), rows, width), cache.buffers


class _Traced(nn.Module):
    """What is compiled: one pass of the model over buffers that are given, with every layer's output."""

    def __init__(self, target: Any, layers: Sequence[int]):
        super().__init__()
        self.model = target.model
        self.target, self.layers = target, layers

    def forward(
        self, tokens: Tensor, given: dict[str, Any], columns: Tensor, buffers: Buffers
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits [R, n, V], hidden [R, n, H], and every layer's output [R, n, H]."""
        masks: dict[str, Tensor] = given["masks"]
        kept = Columns(self.layers, buffers, columns, next(iter(masks.values())).shape[-1])
        return self.target.pass_through(tokens, kept, masks, given.get("positions"))


def passed(anchor: Tensor, draft: Draft, vocabulary: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a pass over anchor and draft is given: tokens [B, N+1], and a tree's visibility and depths."""
    tokens = anchor.unsqueeze(-1)
    if draft.tokens.shape[1]:
        # an id outside the vocabulary is judged by the law; here it only must not break the embedding
        tokens = torch.cat([tokens, draft.tokens.clamp(0, vocabulary - 1)], -1)
    if not draft.branches:
        return tokens, None, None
    return tokens, draft.visible(), nn.functional.pad(draft.depths() + 1, (1, 0))


def _chain(tokens: Tensor) -> Draft:
    return Draft.chain(tokens, torch.full((len(tokens),), tokens.shape[1]))


def _tree(tokens: Tensor) -> Draft:
    parents = torch.tensor((-1, 0, -1, 0, 1, 2), device=tokens.device)[: tokens.shape[1]].expand_as(tokens)
    return Draft(tokens, parents, torch.full((len(tokens),), tokens.shape[1]))
