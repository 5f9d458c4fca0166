"""A small language model drafts token by token; the classic pair.  (Leviathan 2211.17192, Chen 2302.01318.)

Any causal LM with the target's own vocabulary.  Its cache follows the committed text: what was rejected is forgotten, and
what it has not read yet (one token, or two after a block that was kept whole) it reads before it drafts.  `width` above 1
grows a tree (see `nn.trees`): each level is a pass over the nodes read so far, of which the accepted path stays in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from outrider import demo
from outrider.config import Config as Base
from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Scores, Target
from outrider.decoding.sampling import Purpose, distribution
from outrider.decoding.state import DecodeState
from outrider.errors import ConfigError, DrafterError
from outrider.nn import trees
from outrider.targets.cache import SlotCache
from outrider.targets.transformers import TransformersTarget, load_target


class Config(Base):
    kind: Literal["small_model"] = "small_model"
    model: str = "demo"
    """Folder or Hugging Face id of the drafting model; `demo` is the one that ships with Outrider."""
    length: PositiveInt = 4
    """Tokens drafted per step; levels of a tree."""
    width: PositiveInt = 1
    """Children a node may have; above 1 the draft is a tree: the likeliest paths at temperature 0, drawn siblings else."""
    nodes: PositiveInt = 16
    """Nodes of a tree; a chain has `length`."""
    replacement: bool = False
    """Draw the siblings of a tree independently; by default a younger one is none of its elders, and more are kept."""


@dataclass
class Memory:
    """The model's cache, and the tree it read in the pass that is still open."""

    cache: SlotCache
    tree: Draft | None = None


class SmallModel:
    """Drafts a chain or a tree with a language model of its own."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: TransformersTarget, config: Config):
        self.model = model
        self.config = config
        self.parents = trees.shape(config.width, config.length, config.nodes) if config.width > 1 else ()
        self.limit = config.length if config.width == 1 else len(self.parents)

    def compile(self, several: bool = False) -> float:
        """Have its own passes of one slot, or of several, compiled; returns the seconds it took.  NotCompiled says why not."""
        return self.model.compile(several)

    def allocate(self, cache: Cache) -> Memory:
        read = self.config.width * (self.config.length - 1)
        return Memory(self.model.allocate(cache.slots, cache.length + max(self.limit, read)))

    def admit(self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        self._read(memory.cache, rows, [state.tokens[row][: state.prefilled[row]] for row in rows])

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        logits = self._read(memory.cache, state.rows, [state.tokens[row] for row in state.rows])
        if self.config.width == 1:
            return self._chain(memory.cache, state, budget, logits)
        return self._tree(memory, state, budget, logits)

    def _chain(self, cache: SlotCache, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        rows = state.rows
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for depth in range(int(budget.max())):
            if depth:
                logits = self.model.verify(cache, rows, tokens[-1], Draft.empty(len(rows), state.device)).logits[:, -1]
                cache.append([1] * len(rows))
            logits = state.masked(logits, tokens)
            if state.settings.is_greedy:
                tokens.append(logits.argmax(-1))
            else:
                q.append(distribution(logits, state.settings))
                tokens.append(state.streams.draw(q[-1], depth, Purpose.DRAFT))
        return Draft.chain(torch.stack(tokens, 1), budget, torch.stack(q, 1) if q else None)

    def _tree(self, memory: Memory, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        rows, cache = state.rows, memory.cache

        def expand(tree: Draft, fresh: int) -> Tensor:
            if memory.tree is None:
                for row in rows:  # the anchor was read with the text; from here on it is the root of every pass
                    cache.lengths[row] -= 1
            memory.tree = tree
            return _masked(self.model.verify(cache, rows, state.anchor, tree).logits[:, -fresh:], tree, state)

        logits = state.masked(logits)
        if state.settings.is_greedy:
            return trees.beam(logits, expand, budget, width=self.config.width, depth=self.config.length)
        return trees.sampled(
            logits, expand, budget, parents=self.parents, settings=state.settings, streams=state.streams,
            replacement=self.config.replacement,
        )  # fmt: skip

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        """Forget what was rejected: of the committed tokens all but the last may stand in the cache, and no draft beyond."""
        if memory.tree is not None:
            tree, memory.tree = memory.tree, None
            memory.cache.keep(_paths(tree, [state.tokens[row][memory.cache.lengths[row] + 1 : -1] for row in state.rows]))
            return
        for b, row in enumerate(state.rows):
            agreed = len(state.tokens[row]) - (kept.next_tokens[b] >= 0)
            memory.cache.lengths[row] = min(memory.cache.lengths[row], agreed)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        memory.cache.free(rows)

    def _read(self, memory: SlotCache, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Read what the cache lacks of these texts; logits [R, V] after the last token of each."""
        for row, text in zip(rows, texts, strict=True):
            if len(rows) > 1 and len(text) - memory.lengths[row] > self.limit + 1:  # one that lags would pad all others
                self._read(memory, [row], [text[:-1]])
        pieces = [text[memory.lengths[row] :] for row, text in zip(rows, texts, strict=True)]
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (max(lengths) - len(piece)) for piece in pieces]
        tokens = torch.tensor(padded, device=self.model.device)
        return self.model.prefill(memory, rows, tokens, lengths).logits[:, -1]


def _masked(logits: Tensor, tree: Draft, state: DecodeState) -> Tensor:
    """logits [B, fresh, V] behind the last nodes of the tree with -inf where no token may follow; see `DecodeState.masked`."""
    if not state.prefixes:
        return logits
    fresh = logits.shape[1]
    path: list[Tensor] = []
    at = torch.arange(tree.tokens.shape[1] - fresh, tree.tokens.shape[1], device=logits.device).expand(len(logits), -1)
    while bool((at >= 0).all()):  # they are of one depth
        path.insert(0, tree.tokens.gather(1, at))
        at = tree.parents.gather(1, at)
    return torch.stack([state.masked(logits[:, w], [step[:, w] for step in path]) for w in range(fresh)], 1)


def _paths(tree: Draft, texts: Sequence[list[int]]) -> list[list[int]]:
    """The nodes that say how each text begins; what a target made of the draft is not asked."""
    paths = []
    for tokens, parents, text in zip(tree.ids, tree.tree, texts, strict=True):
        path: list[int] = []
        for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if len(path) < len(text) and token == text[len(path)] and parent == (path[-1] if path else -1):
                path.append(n)
        paths.append(path)
    return paths


def build(config: Config, target: Target) -> SmallModel:
    name = str(demo.SMALL_MODEL) if config.model == "demo" else config.model
    model = load_target(name, device=target.device, dtype=target.spec.dtype)
    mine, theirs = model.spec, target.spec
    if mine.vocabulary != theirs.vocabulary or (theirs.tokenizer_hash and mine.tokenizer_hash != theirs.tokenizer_hash):
        raise DrafterError(
            f"small_model {config.model!r} has a vocabulary of {mine.vocabulary} (tokenizer {mine.tokenizer_hash}), the target "
            f"{theirs.name!r} one of {theirs.vocabulary} (tokenizer {theirs.tokenizer_hash}); "
            "choose a model with the target's tokenizer"
        )
    return SmallModel(model, _allowed(config, model, target))


def _allowed(config: Config, model: TransformersTarget, target: Target) -> Config:
    """The config that both models can follow.  Raises ConfigError for a tree that the drafting model can't read."""
    log = logging.getLogger(__name__)
    if config.width == 1:
        idle = [name for name in ("nodes", "replacement") if getattr(config, name) != Config.model_fields[name].default]
        if idle:
            log.warning("small_model.%s has no effect on a chain; set width above 1 for a tree", " and ".join(idle))
    elif target.spec.mode != "tree":
        log.warning(
            "%s verifies no trees (its mode is %s): small_model drafts a chain of %d, as with width 1",
            target.spec.name, target.spec.mode, config.length,
        )  # fmt: skip
        return config.model_copy(update={"width": 1})
    elif model.spec.mode != "tree":
        raise ConfigError(
            f"small_model.width {config.width} asks for a tree; the self-test allows {config.model!r} no more than the mode "
            f"{model.spec.mode!r} ({model.selftest.failed}); set width to 1, or choose a model whose mode is 'tree'"
        )
    return config
