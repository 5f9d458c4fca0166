"""A small language model drafts token by token; the classic pair.  (Leviathan 2211.17192, Chen 2302.01318.)

Any causal LM, best with the target's own vocabulary.  Its cache follows the committed text: what was rejected is forgotten
(recurrent layers go back to a state that was noted), and what it has not read yet (one token, or two after a block that was
kept whole) it reads before it drafts.  Of a text that is longer than its context it reads the end.  `width` above 1 grows a
tree (see `nn.trees`): each level is a pass over the nodes read so far, of which the accepted path stays in the cache.

It can be trained to say what the target says, all of its weights.  (DistillSpec, Zhou et al. 2310.08461.)  Every token of a
text is a row: the model's distribution of it against the target's.  Differs from the paper: all texts are the target's, made
beforehand; the model writes none itself while it learns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import ConfigError, DrafterError
from outrider.nn import language_model, trees
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.language_model import ModelConfig, TokenRows
from outrider.nn.serving import Branching, allowed
from outrider.targets import causal_lm
from outrider.targets.cache import SlotCache
from outrider.targets.load import load_target
from outrider.targets.protocol import Target
from outrider.targets.quantised import quantise
from outrider.targets.transformers import TransformersTarget


class New(Base):
    """Sizes of a model that training begins from nothing: a Qwen3 of the target's vocabulary and context."""

    layers: PositiveInt = 2
    """Decoder layers."""
    hidden: PositiveInt = 256
    """Width of its states."""
    intermediate: PositiveInt = 704
    """Width of the MLP."""
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 4
    head_dim: PositiveInt = 64
    rope_theta: PositiveFloat = 10_000.0
    tied: bool = True
    """One matrix is embedding and head."""


class Config(ModelConfig):
    kind: Literal["small_model"] = "small_model"
    new: New | None = None
    """Sizes of a fresh model to train, in place of `model`."""
    architecture: dict[str, Any] | None = None
    """What a checkpoint knows of the trained model's shape, as in a config.json: `model` is not needed again."""
    length: PositiveInt = 4
    """Tokens drafted per step; levels of a tree."""
    width: PositiveInt = 1
    """Children a node may have; above 1 the draft is a tree: the likeliest paths at temperature 0, drawn siblings else."""
    nodes: PositiveInt = 16
    """Nodes of a tree; a chain has `length`."""
    replacement: bool = False
    """Draw the siblings of a tree independently; by default a younger one is none of its elders, and more are kept."""

    @model_validator(mode="after")
    def _one_model(self) -> Config:
        if self.new is not None and "model" in self.model_fields_set and self.model != "demo":
            raise ValueError(f"`new` asks for a fresh model and `model` for {self.model!r}; give one of them")
        return self


@dataclass
class Memory:
    """The model's cache, and the tree it read in the pass that is still open."""

    cache: SlotCache
    skipped: list[int]
    """Tokens at the beginning of each slot's text that are read no longer: there were more than the model's context takes."""
    tree: Draft | None = None


class SmallModel(Drafter):
    """Drafts a chain or a tree with a language model of its own."""

    def __init__(self, model: TransformersTarget, config: Config):
        self.model, self.branching, self.config, self.steps = model, Branching(config), config, (model.step,)
        self.limit = self.branching.limit
        self.room = language_model.room(model, config.kind, config.length)

    def allocate(self, cache: Cache) -> Memory:
        read = self.config.width * (self.config.length - 1)
        own = self.model.allocate(cache.slots, cache.length + max(self.limit, read), undo=self.limit)
        return Memory(own, [0] * cache.slots)

    def admit(self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        self._read(memory, rows, [state.tokens[row][: state.prefilled[row]] for row in rows])

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        rows, cache = state.rows, memory.cache
        logits = self._read(memory, rows, [state.tokens[row] for row in rows])
        read_one = partial(language_model.read_one, self.model, cache, rows)

        def expand(tree: Draft, fresh: int) -> Tensor:
            if memory.tree is None:
                for row in rows:  # the anchor was read with the text; from here on it is the root of every pass
                    cache.lengths[row] -= 1
            memory.tree = tree
            return self.model.verify(cache, rows, state.anchor, tree).logits[:, -fresh:]

        return self.branching.draft(logits, read_one, expand, budget, state)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        """Forget what was rejected: of the committed tokens all but the last may stand in the cache, and no draft beyond."""
        if memory.tree is not None:
            tree, memory.tree = memory.tree, None
            read = [memory.skipped[row] + memory.cache.lengths[row] for row in state.rows]
            texts = [state.tokens[row][at + 1 : -1] for row, at in zip(state.rows, read, strict=True)]
            memory.cache.keep(trees.paths(tree, texts))
            return
        for b, row in enumerate(state.rows):
            agreed = len(state.tokens[row]) - memory.skipped[row] - (kept.next_tokens[b] >= 0)
            memory.cache.cut(row, agreed)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        memory.cache.free(rows)
        for row in rows:
            memory.skipped[row] = 0

    def _read(self, memory: Memory, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Logits [R, V] behind these texts, or behind the end of one that is more than the model's context takes."""
        for row, text in zip(rows, texts, strict=True):
            if len(text) - memory.skipped[row] > self.room:
                # half of the room, so that all is read anew only once in a while
                memory.skipped[row] = len(text) - max(1, self.room // 2)
                memory.cache.free([row])
        ends = [text[memory.skipped[row] :] for row, text in zip(rows, texts, strict=True)]
        return language_model.read_texts(self.model, memory.cache, rows, ends, self.limit + 1)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Model(DraftModel):
    """A causal LM of the target's vocabulary, all of its weights trained; embedding and head are its own."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.target = target
        new = None if config.new is None else config.new.model_dump()
        self.lm: Any = causal_lm.to_train(config.model, target, config.architecture, new)
        self.config = config.model_copy(update={"architecture": causal_lm.architecture_of(self.lm)})
        self._finish, self._reads_prepacked = causal_lm.learn(self.lm, config.model)

    def read(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """States [B, S, H] before the head; every text is read as if it stood alone.  tokens, documents [B, S]."""
        causal_lm.refuse_longer(self.lm, documents, self.config.model)
        return causal_lm.read(self.lm, tokens, documents, self._reads_prepacked)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V], the family's soft cap and scale applied."""
        head = self.lm.get_output_embeddings()
        return self._finish(head(states.to(head.weight.dtype)))

    def predict(self, batch: Batch) -> TokenRows:
        return TokenRows(self, batch)

    def drafter(self) -> SmallModel:
        """Drafts with a copy of the model's modules around the same weights: to serve it freezes and hooks nothing here."""
        shared = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in self.lm.parameters()}
        served = load_target(copy.deepcopy(self.lm, shared))
        return SmallModel(served, _allowed(self.config, served, self.target))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        """Weights follow a change of type; what is computed once, such as rotary frequencies, keeps its own."""
        with causal_lm.keeping_computed(self):
            super()._apply(fn, recurse)
        return self


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(config: Config, target: Target) -> SmallModel:
    if config.architecture is not None or config.new is not None:
        fresh = Model(config, target).to(target.device, getattr(torch, target.spec.dtype))
        if config.quantize is not None:
            quantise(fresh, config.quantize)
        return fresh.drafter()
    model = language_model.loaded(config, target)
    mine, theirs = model.spec, target.spec
    if mine.vocabulary != theirs.vocabulary or theirs.tokenizer_hash not in (None, mine.tokenizer_hash):
        raise DrafterError(
            f"small_model {config.model!r} has a vocabulary of {mine.vocabulary} (tokenizer {mine.tokenizer_hash}), the target "
            f"{theirs.name!r} one of {theirs.vocabulary} (tokenizer {theirs.tokenizer_hash}); choose a model with the target's "
            "tokenizer, or draft with cross_vocabulary"
        )
    return SmallModel(model, _allowed(config, model, target))


def _allowed(config: Config, model: TransformersTarget, target: Target) -> Config:
    """The config that both models can follow.  Raises ConfigError for a tree that the drafting model can't read."""
    found: Config = allowed(config, target)
    if found.width > 1 and model.spec.mode != "tree":
        raise ConfigError(
            f"small_model.width {config.width} asks for a tree; the self-test allows {config.model!r} no more than the mode "
            f"{model.spec.mode!r} ({model.selftest.failed}); set width to 1, or choose a model whose mode is 'tree'"
        )
    return found
