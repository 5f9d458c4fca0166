"""A small language model drafts token by token; the classic pair.  (Leviathan 2211.17192, Chen 2302.01318.)

Any causal LM, best with the target's own vocabulary.  Its cache follows the committed text: rejected tokens are
forgotten (recurrent layers return to a saved state), and tokens it has not read yet (one, or two after a block that was
accepted whole) are read before it drafts.  It reads the end of a text that is longer than its context.  `width` above 1
grows a tree (see `nn.drafting`): each level is a pass over the nodes so far, of which the accepted path stays in the
cache.

All of its weights can be trained to match the target.  (DistillSpec, Zhou et al. 2310.08461.)  Every token of a text is
a row: the model's distribution against the target's.  Differs from the paper: all texts are the target's, written
beforehand; the model writes none itself while it learns.

Take it where a small model of the target's family is there and a pass of it takes a small part of the target's; much is
accepted of it, and its passes are what it costs.
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
from outrider.decoding.draft import Draft, chain_rows
from outrider.decoding.protocols import Cache, Drafter, NoStatic
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import ConfigError, DrafterError
from outrider.fast.static.step import (
    Committed,
    Proposed,
    StaticDrafter,
    StaticRule,
    StaticSlots,
    sizes_of,
)  # fmt: skip
from outrider.fast.static.target import StaticPass, made
from outrider.method import Method
from outrider.nn import language_model
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.drafting import trees
from outrider.nn.drafting.serving import Branching, allowed
from outrider.nn.drafting.static import Branched
from outrider.nn.language_model import ModelConfig, TokenRows
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf import causal_lm
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.protocol import Target
from outrider.targets.quantised import quantise

METHOD = Method(
    cost="each", is_model=True, chain={"width": 1},
    engines={
        "vllm": {"name": "draft_model", "formats": ("transformers",), "varies": True},
        "sglang": {"name": "STANDALONE", "formats": ("transformers",)},
        "trtllm": {"name": "Draft_Target", "formats": ("trtllm", "transformers"), "varies": True},
        "llamacpp": {"name": "draft-simple", "formats": ("gguf",), "cuts": True},
        "transformers": {"name": "assistant_model", "formats": ("transformers",), "cuts": True},
    },
)  # fmt: skip


class New(Base):
    """Sizes of a model that is trained from random weights: a Qwen3 with the target's vocabulary and context."""

    layers: PositiveInt = 2
    """Decoder layers."""
    hidden: PositiveInt = 256
    """Width of its hidden states."""
    intermediate: PositiveInt = 704
    """Width of the MLP."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt = 4
    """Heads of keys and values."""
    head_dim: PositiveInt = 64
    """Width of one head."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    tied: bool = True
    """Embedding and head are the same matrix."""


class Config(ModelConfig):
    kind: Literal["small_model"] = "small_model"
    new: New | None = None
    """Sizes of a new model to train, instead of `model`."""
    architecture: dict[str, Any] | None = None
    """Shape of the trained model as in a config.json, written by a checkpoint; not set by hand."""
    length: PositiveInt = 4
    """Tokens drafted per step; levels of a tree."""
    width: PositiveInt = 1
    """Most children of a node; above 1 the draft is a tree: the likeliest paths at temperature 0, else drawn
    siblings."""
    nodes: PositiveInt = 16
    """Nodes of a tree; a chain has `length`."""
    replacement: bool = False
    """Draw the siblings of a tree independently; no: without replacement, and more are accepted."""

    @model_validator(mode="after")
    def _one_model(self) -> Config:
        if self.new is not None and "model" in self.model_fields_set and self.model != "demo":
            raise ValueError(f"`new` asks for a new model and `model` for {self.model!r}; give one of them")
        return self


@dataclass
class Memory:
    """The model's cache, and the tree of its pass that is still open."""

    cache: SlotCache
    skipped: list[int]
    """Tokens at the beginning of each slot's text that are no longer read, since the text is longer than the
    context."""
    tree: Draft | None = None


class SmallModel(Drafter):
    """Drafts a chain or a tree with a language model of its own."""

    def __init__(self, model: TransformersTarget, config: Config):
        self.model, self.branching, self.config, self.steps = model, Branching(config), config, (model.step,)
        self.limit = self.branching.limit
        self._more = max(self.limit, config.width * (config.length - 1))
        """Columns of its cache behind a text."""
        self.room = language_model.room(model, config.kind, config.length)

    def allocate(self, cache: Cache) -> Memory:
        own = self.model.allocate(cache.slots, cache.length + self._more, undo=self.limit)
        return Memory(own, [0] * cache.slots)

    def admit(
        self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self.read(memory, rows, [state.tokens[row][: state.prefilled[row]] for row in rows])

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        rows, cache = state.rows, memory.cache
        logits = self.read(memory, rows, [state.tokens[row] for row in rows])
        read_one = partial(language_model.read_one, self.model, cache, rows)

        def expand(tree: Draft, new: int) -> Tensor:
            if memory.tree is None:
                for row in rows:  # the anchor was read with the text; from here on it is the root of every pass
                    cache.lengths[row] -= 1
            memory.tree = tree
            return self.model.verify(cache, rows, state.anchor, tree).logits[:, -new:]

        return self.branching.draft(logits, read_one, expand, budget, state)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        """Forget rejected tokens: the cache may hold all committed tokens but the last, and no drafted ones."""
        if memory.tree is not None:
            tree, memory.tree = memory.tree, None
            read = [memory.skipped[row] + memory.cache.lengths[row] for row in state.rows]
            texts = [state.tokens[row][at + 1 : -1] for row, at in zip(state.rows, read, strict=True)]
            memory.cache.keep(trees.paths(tree, texts))
            return
        for b, row in enumerate(state.rows):
            agreed = len(state.tokens[row]) - memory.skipped[row] - (accepted.next_tokens[b] >= 0)
            memory.cache.cut(row, agreed)

    def static(self, memory: Memory, is_greedy: bool) -> StaticModel:
        longest = memory.cache.length - self._more - self.limit - 1
        if longest > self.room:
            raise NoStatic(f"a text of {longest} tokens is longer than the drafting model's context")
        if self.config.width > 1:
            return StaticModelTree(self, memory, self.branching, is_greedy)
        return StaticModelChain(self, memory, self.limit, is_greedy)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        memory.cache.free(rows)
        for row in rows:
            memory.skipped[row] = 0

    def read(self, memory: Memory, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Logits [R, V] after these texts; of one that is longer than the model's context the end is read."""
        for row, text in zip(rows, texts, strict=True):
            if len(text) - memory.skipped[row] > self.room:
                # half of the room, so that everything is read again only now and then
                memory.skipped[row] = len(text) - max(1, self.room // 2)
                memory.cache.free([row])
        ends = [text[memory.skipped[row] :] for row, text in zip(rows, texts, strict=True)]
        return language_model.read_texts(self.model, memory.cache, rows, ends, self.limit + 1)


class StaticModel(StaticDrafter):
    """The same in a static step: a pass over the end of each text that the model may not have read, then its draft."""

    def __init__(self, drafter: SmallModel, memory: Memory, unread: int, more: int):
        """unread: most tokens of such an end; more: columns that a step needs besides the target's."""
        self.drafter, self.memory, cache, model = drafter, memory, memory.cache, drafter.model
        self.run = StaticPass(model, made(model, cache), (), (), more)
        self.model, self.caches = model.model, self.run.caches
        self.start = torch.zeros(cache.slots, dtype=torch.int64, device=model.device)
        """[B], tokens before the end."""
        self.ends, self.counts = self.start.new_zeros(cache.slots, unread), self.start + 1
        """[B, E], right-padded, and how many of it are real."""

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        for row in rows:
            text, last = state.tokens[row], state.tokens[row][-2:]
            self.drafter.read(self.memory, [row], [text])
            self.start[row], self.counts[row] = len(text) - len(last), len(last)
            for i, token in enumerate(last):
                self.ends[row, i] = token

    def leave(self, rows: Sequence[int], state: DecodeState) -> None:
        self.memory.tree = None
        for row in rows:
            self.memory.cache.lengths[row] = len(state.tokens[row]) - 1

    def first(self) -> Tensor:
        """Logits [B, V] after each text."""
        logits = self.read(self.ends, self.start)
        return logits.gather(1, (self.counts - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]

    def read(self, tokens: Tensor, start: Tensor, tree: Draft | None = None) -> Tensor:
        """Logits [B, n, V] of tokens [B, n] after the first start[b] of each slot; of a tree's, its anchor first."""
        mask, depths = chain_rows(tokens.shape[0], tokens.shape[1], tokens.device) if tree is None else tree.rows()
        run = self.run.over(self.run.tensors, caches=self.caches)
        return run.read(tokens, start, mask.contiguous(), depths.contiguous()).logits

    def end(self, slots: StaticSlots, committed: Committed, begin: Tensor) -> None:
        """From here on the texts' ends begin so many tokens, [B], after their anchors."""
        is_new, text = committed.counts > 0, torch.cat([slots.anchor[:, None], committed.tokens], 1)
        at = begin.clamp(min=0)[:, None] + torch.arange(self.ends.shape[1], device=begin.device)
        at = at.clamp(max=text.shape[1] - 1)  # fewer than fit may have been verified
        self.ends.copy_(torch.where(is_new[:, None], text.gather(1, at), self.ends))
        self.start.copy_(torch.where(is_new, slots.length + begin, self.start))
        self.counts.copy_(torch.where(is_new, committed.counts + 1 - begin, self.counts))


class StaticModelChain(StaticModel):
    """After a block that was accepted whole the model has not read the token before the anchor; else it reads it
    again."""

    def __init__(self, drafter: SmallModel, memory: Memory, length: int, is_greedy: bool):
        super().__init__(drafter, memory, 2, length + 2)
        self.parents, self.has_q = range(-1, length - 1), not is_greedy

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        logits, tokens, q = self.first(), list[Tensor](), list[Tensor]()
        for depth in range(len(self.parents)):
            if depth:
                logits = self.read(tokens[-1][:, None], self.start + self.counts + depth - 1)[:, 0]
            token, own = rule.drawn(logits, slots, depth)
            tokens.append(token)
            q.extend([] if own is None else [own])
        sizes = sizes_of(slots, len(self.parents))
        return Proposed(torch.stack(tokens, 1), sizes, torch.stack(q, 1) if q else None)

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        self.end(slots, committed, committed.counts - 1)


class StaticModelTree(Branched, StaticModel):
    """Nothing of a tree stays in the cache: accepted tokens are read again with the next one."""

    def __init__(self, drafter: SmallModel, memory: Memory, branching: Branching, is_greedy: bool):
        config = branching.config
        unread = max(2, min(config.length, branching.limit) + 1)
        super().__init__(drafter, memory, unread, 1 + unread + config.width * (config.length - 1))
        self.branch(branching, is_greedy)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        first, anchor_at = self.first(), self.start + self.counts - 1

        def expand(tree: Draft, new: int) -> Tensor:
            return self.read(torch.cat([slots.anchor[:, None], tree.tokens], 1), anchor_at, tree)[:, -new:]

        return self.grown(first, expand, slots, rule)

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        self.end(slots, committed, torch.ones_like(committed.counts))


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Model(DraftModel):
    """A causal LM of the target's vocabulary, all of its weights trained; embedding and head are its own."""

    taps: tuple[int, ...] = ()
    reads_target = False

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
        """Drafts with a copy of the modules around the same weights, so that serving freezes and hooks nothing here."""
        shared = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in self.lm.parameters()}
        served = load_target(copy.deepcopy(self.lm, shared))
        return SmallModel(served, _allowed(self.config, served, self.target))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        """Weights follow a change of type; buffers that are computed once, such as rotary frequencies, do not."""
        with causal_lm.keeping_computed(self):
            super()._apply(fn, recurse)
        return self


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(config: Config, target: Target) -> SmallModel:
    if config.architecture is not None or config.new is not None:
        trained = Model(config, target).to(target.device, getattr(torch, target.spec.dtype))
        if config.quantize is not None:
            quantise(trained, config.quantize)
        return trained.drafter()
    model = language_model.loaded(config, target)
    mine, theirs = model.spec, target.spec
    if mine.vocabulary != theirs.vocabulary or theirs.tokenizer_hash not in (None, mine.tokenizer_hash):
        raise DrafterError(
            f"small_model {config.model!r} has a vocabulary of {mine.vocabulary} (tokenizer {mine.tokenizer_hash}), "
            f"the "
            f"target {theirs.name!r} one of {theirs.vocabulary} (tokenizer {theirs.tokenizer_hash}); choose a model "
            f"with "
            "the target's tokenizer, or draft with cross_vocabulary"
        )
    return SmallModel(model, _allowed(config, model, target))


def _allowed(config: Config, model: TransformersTarget, target: Target) -> Config:
    """The config that both models allow.  Raises ConfigError for a tree that the drafting model can't read."""
    found: Config = allowed(config, target)
    if found.width > 1 and model.spec.mode != "tree":
        raise ConfigError(
            f"small_model.width {config.width} needs a model whose mode is 'tree'; the self-test of {config.model!r} "
            f"allows mode {model.spec.mode!r} ({model.selftest.failed}); set width to 1, or choose another model"
        )
    return found
