"""Medusa: heads on the target's last hidden state, each for one token further ahead, drafted as a tree.  (arXiv 2401.10774.)

Head k, counted from 0, sees the state before the anchor and predicts the token k + 1 places behind it: x + SiLU(W x), then an
output matrix.  Heads know nothing of each other's tokens, so a chain of first choices is a poor draft; a tree of the likely
combinations is a good one.  How often the choice of each rank is right is counted while the heads learn, and the nodes with
the largest products of these accuracies are drafted: what that assumes is that heads err independently.

`sequential` lets head k see the words before its own too, the anchor first: y = [x; words], R y + SiLU(W y).  (Hydra, arXiv
2402.05109; its prefix attention is left out.)

Differs from the paper: the output matrix is the target's own unless `head` is own, so that a head has H * H weights and is
soon trained; accuracies are counted in training, not on texts kept aside; every draft is verified by the exact law, not by
typical acceptance; under a temperature nodes are drawn, which keeps more than the likeliest do.

B slots, S tokens, H hidden size, V vocabulary, K heads, R ranks, N nodes, W nodes of one level, P positions trained.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt, model_validator
from torch import Tensor, nn

from outrider import packed
from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import DrafterError
from outrider.nn import serving, trees
from outrider.nn.draft_model import Batch, DraftModel, chosen
from outrider.nn.heads import ResidualBlock
from outrider.nn.trees import Path, RankTree
from outrider.targets.protocol import Target

RANKS = 10
"""Choices of a head whose accuracies are counted."""
KEEP = 0.95
"""What one batch leaves of the accuracies that were counted before."""


class Config(Base):
    kind: Literal["medusa"] = "medusa"
    heads: PositiveInt = 5
    """Heads, and so tokens that a draft reaches ahead."""
    layers: PositiveInt = 1
    """Residual blocks of a head."""
    head: Literal["target", "own"] = "target"
    """Output matrix: the target's, frozen; or each head's own, begun as the target's, of V * H weights."""
    sequential: bool = False
    """Heads see the words before their own (Hydra): better deep down, and drafted level by level."""
    nodes: PositiveInt = 16
    """Nodes of the tree: those that are most often right, as counted in training."""
    tree: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    """The tree itself, as paths of ranks such as [[0], [0, 0], [1]], parents first, the most promising first."""
    drawn: bool = True
    """Draw the nodes of sampled requests, siblings without replacement; else they are the heads' likeliest there too, as they
    always are at temperature 0."""
    anchors: PositiveInt | None = None
    """Most positions trained per text and step; all unless given."""
    device: str | None = None
    """Where it drafts, such as cuda:1; the target's device unless given."""

    @model_validator(mode="after")
    def _is_a_tree(self) -> Config:
        seen: set[Path] = {()}
        for path in self.tree or ():
            if path in seen or path[:-1] not in seen:
                raise ValueError(f"tree: {list(path)} is empty, stands twice, or stands before its parent {list(path[:-1])}")
            if len(path) > self.heads:
                raise ValueError(f"tree: {list(path)} is deeper than {self.heads} heads reach; raise heads, or cut the path")
            seen.add(path)
        if self.tree == ():
            raise ValueError("tree has no node; leave it out for the best by experience")
        return self


class Model(DraftModel):
    """The heads, and how often the choices of each were right."""

    taps = ()
    accuracies: Tensor
    """[K, R]: how often head k's choice of rank r was the target's, where all before it was the text."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config, self.target = config, target
        hidden, vocabulary = target.spec.hidden, target.spec.vocabulary
        most = max((max(path) for path in config.tree or ()), default=0)
        if most >= vocabulary:
            raise DrafterError(f"tree asks for a choice of rank {most}, {target.spec.name} has {vocabulary} tokens; lower it")
        self.medusa_head = nn.ModuleList(nn.ModuleList(self._blocks(k, hidden)) for k in range(config.heads))
        if config.head == "own":
            rows = target.head_rows(torch.arange(vocabulary, device=target.device)).detach()
            for head in self.medusa_head:
                assert isinstance(head, nn.ModuleList)
                head.append(nn.Linear(hidden, vocabulary, bias=False))
                head[-1].weight = nn.Parameter(rows.clone())
        self.register_buffer("accuracies", assumed(config.heads, min(RANKS, vocabulary)))

    def _blocks(self, k: int, hidden: int) -> Iterator[nn.Module]:
        for layer in range(self.config.layers):
            yield ResidualBlock(hidden, k + 1 if self.config.sequential and layer == 0 else 0)

    def state(self, k: int, hidden: Tensor, words: Tensor | None) -> Tensor:
        """Head k's state [..., H] from the target's [..., H] and, where it is sequential, words [..., k + 1, H]."""
        head = self.medusa_head[k]
        assert isinstance(head, nn.ModuleList)
        x = hidden if words is None else torch.cat([hidden, words.flatten(-2)], -1)
        for block in head[: self.config.layers]:
            x = block(x)
        return x

    def logits(self, states: Tensor, first: int = 0) -> Tensor:
        """[..., k, V] of the states [..., k, H] of k heads from `first` on."""
        if self.config.head == "target":
            return self.target.head(states)
        outputs = [self.medusa_head[first + k][-1](states[..., k, :]) for k in range(states.shape[-2])]  # type: ignore[index]
        return torch.stack(outputs, -2)

    def words(self, tokens: Tensor) -> Tensor | None:
        """What the heads see of these tokens [...]: their embeddings [..., H], or nothing."""
        return self.target.embed(tokens).to(self.accuracies.dtype) if self.config.sequential else None

    def along(self, hidden: Tensor, words: Tensor | None, heads: int) -> Tensor:
        """Logits [..., k, V] of the first `heads` heads on known text: hidden [..., H], words [..., K, H], the anchor first."""
        seen = [None if words is None else words[..., : k + 1, :] for k in range(heads)]
        return self.logits(torch.stack([self.state(k, hidden, seen[k]) for k in range(heads)], -2))

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> MedusaDrafter:
        return MedusaDrafter(self)


def build(config: Config, target: Target) -> MedusaDrafter:
    return Model(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()


# ── the tree ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def assumed(heads: int, ranks: int) -> Tensor:
    """Accuracies [K, R] before anything was counted: 0.6 for the first choice of head 0, 0.8 times that a head further on,
    and falling with the square of the rank.
    """
    return 0.6 * 0.8 ** torch.arange(heads)[:, None] / torch.arange(1, ranks + 1) ** 2


def search(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """The `nodes` paths with the largest products of accuracies [K, R] along them, the largest first: the tree that keeps most.

    A child's product is never above its parent's and on equal terms the shallower stands first, so every prefix is the best
    tree of its size.  Fewer paths where the heads have no more to offer.
    """
    found: list[Path] = []
    waiting: list[tuple[float, int, Path]] = [(-chance, 1, (rank,)) for rank, chance in enumerate(accuracies[0])]
    heapq.heapify(waiting)
    while waiting and len(found) < nodes:
        product, depth, path = heapq.heappop(waiting)
        found.append(path)
        for rank, chance in enumerate(accuracies[depth] if depth < len(accuracies) else ()):
            heapq.heappush(waiting, (product * chance, depth + 1, (*path, rank)))
    return tuple(found)


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Memory:
    """The target's state before every slot's anchor."""

    def __init__(self, slots: int, hidden: int, device: torch.device, dtype: torch.dtype):
        self.hidden = torch.zeros(slots, hidden, device=device, dtype=dtype)
        self.known = [False] * slots

    def keep(self, rows: Sequence[int], states: Tensor, at: Sequence[int]) -> None:
        """Remember states[b, at[b]] of [B, n, H]."""
        self.hidden[list(rows)] = states[list(range(len(rows))), list(at)].to(self.hidden)
        for row in rows:
            self.known[row] = True


class MedusaDrafter(Drafter):
    """Drafts a tree of the heads' choices behind one state a slot; nothing where the anchor is all that is known."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: Model):
        packed.pack(model)
        self.model, self.hidden = model, model.target.spec.hidden
        self.tree = RankTree(_paths(model))
        self.limit = len(self.tree.paths)

    def allocate(self, cache: Cache) -> Memory:
        target = self.model.target
        return Memory(cache.slots, target.spec.hidden, target.device, self.model.accuracies.dtype)

    def admit(self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        memory.keep(rows, scores.hidden, [length - 1 for length in lengths])

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        budget = budget.where(torch.tensor([memory.known[row] for row in state.rows]), 0)
        most = int(budget.max())
        if not most:
            return Draft.empty(len(state.rows), state.device)
        tree, drawn = self.tree.first(most), self.model.config.drawn and state.judge.temperature is not None
        with packed.products():
            step = _Step(self.model, memory.hidden[state.rows], state, len(tree.levels))
            if step.all is not None and not (drawn or state.judge.bans):
                return tree.draft(tree.choices(step.all), budget)
            if not drawn:
                return trees.ranked(step.first(), step.expand, budget, tree)
            draft = trees.sampled(step.first(), step.expand, budget, state, parents=tree.parents)
        return replace(draft, branches=not tree.is_chain)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        # where a slot was cut its last node is the anchor again
        paths = [path if last >= 0 else path[:-1] for path, last in zip(kept.paths, kept.next_tokens, strict=True)]
        memory.keep(state.rows, scores.hidden, [path[-1] + 1 if path else 0 for path in paths])

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        for row in rows:
            memory.known[row] = False
        memory.hidden[list(rows)] = 0


class _Step:
    """What the heads say in one step.  hidden [B, H], of each slot's last verified token."""

    def __init__(self, model: Model, hidden: Tensor, state: DecodeState, depth: int):
        self.model, self.hidden, self.state = model, hidden, state
        self.anchor = model.words(state.anchor)
        self.all = model.along(hidden, None, depth) if self.anchor is None else None
        """[B, depth, V], where no head needs to know a drafted token."""
        self.depth = 0

    def first(self) -> Tensor:
        """Logits [B, V] behind the anchor, of what may stand there."""
        if self.anchor is None:
            assert self.all is not None
            return self.state.judge.masked(self.all[:, 0])
        state = self.model.state(0, self.hidden, self.anchor[:, None])
        return self.state.judge.masked(self.model.logits(state[:, None])[:, 0])

    def expand(self, tree: Draft, fresh: int) -> Tensor:
        """Logits [B, fresh, V] behind the last nodes of the tree; called level by level, as `trees.Expand`."""
        self.depth += 1
        if self.all is not None:
            logits = self.all[:, self.depth, None].expand(-1, fresh, -1)
        else:
            words = self.model.words(torch.stack(trees.path(tree, fresh), -1))
            assert words is not None and self.anchor is not None
            seen = torch.cat([self.anchor[:, None, None].expand(-1, fresh, -1, -1), words], 2)
            state = self.model.state(self.depth, self.hidden[:, None].expand(-1, fresh, -1), seen)
            logits = self.model.logits(state[..., None, :], self.depth)[..., 0, :]
        return serving.masked(logits, tree, self.state)


def _paths(model: Model) -> tuple[Path, ...]:
    """The tree that is asked for, or the best by what was counted; a chain where the target verifies no trees."""
    config = model.config
    chain = tuple((0,) * (k + 1) for k in range(min(config.heads, config.nodes)))
    if not serving.verifies_trees(model.target, "medusa", f"a chain of {len(chain)}, every head's first choice"):
        return chain
    if config.tree is None:
        return search(model.accuracies.tolist(), config.nodes)
    if config.nodes != Config.model_fields["nodes"].default:
        message = "medusa.nodes has no effect beside medusa.tree, whose %d nodes are drafted"
        logging.getLogger(__name__).warning(message, len(config.tree))
    return config.tree


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows:
    """Predictions of every head behind every anchor whose next token is one to learn: K rows an anchor, row k of head k.

    The hidden states are the target's and learn nothing, so a chunk's gradient goes to the weights at once.
    """

    def __init__(self, model: Model, batch: Batch):
        self.model, self.target, self.vocabulary = model, model.target, model.target.spec.vocabulary
        heads, length = model.config.heads, batch.tokens.shape[1]
        text, at, learnt = _anchors(batch, heads, model.config.anchors)
        steps = torch.arange(heads, device=at.device)
        wanted = (at[:, None] + 1 + steps).clamp(max=length - 1)
        flat = text * length
        self._hidden = batch.hidden.flatten(0, 1)
        self._before = flat + at - 1
        self._target_rows = flat[:, None] + wanted - 1
        self._seen = batch.tokens[text[:, None], (at[:, None] + steps).clamp(max=length - 1)]
        self.labels = batch.tokens[text[:, None], wanted].flatten()
        self.weight = (learnt * 0.8**steps).flatten()
        self.depth = steps.repeat(len(at))
        self.block = torch.arange(len(at), device=at.device).repeat_interleave(heads)
        self.hits = torch.zeros(model.accuracies.shape, device=at.device)
        """[K, R]: how often the target's likeliest token was head k's choice of rank r, in the rows that were counted."""
        self.seen = torch.zeros(heads, device=at.device)
        """[K], how many those are."""

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        heads = self.model.config.heads
        width = max(1, rows // heads)
        for start in range(0, len(self._before), width):
            part = slice(start, min(start + width, len(self._before)))
            with torch.no_grad():
                # heads of neighbouring anchors learn from the same rows
                places, at = self._target_rows[part].unique(return_inverse=True)
                target = self.target.head(self._hidden[places])[at.flatten()]
            hidden = self._hidden[self._before[part]].to(self.model.accuracies.dtype)
            draft = self.model.along(hidden, self.model.words(self._seen[part]), heads)
            yield draft.flatten(0, 1), target, slice(heads * part.start, heads * part.stop)

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        if self.model.training:
            self.count(rows, draft, target)
        return {}

    @torch.no_grad()
    def count(self, rows: slice, draft: Tensor, target: Tensor) -> None:
        """See which choice of its head the target's likeliest token was, in each of these rows."""
        best, ids = target.argmax(-1, keepdim=True), torch.arange(draft.shape[-1], device=draft.device)
        own = draft.gather(-1, best)
        # in bf16 the best are often equals, of which only one can be the first choice
        rank = (draft > own).sum(-1) + ((draft == own) & (ids < best)).sum(-1)
        depth, learnt = self.depth[rows], self.weight[rows] > 0
        self.seen += torch.bincount(depth[learnt], minlength=len(self.seen))
        near = learnt & (rank < self.hits.shape[1])
        self.hits.index_put_((depth[near], rank[near]), torch.ones_like(self.weight[rows][near]), accumulate=True)

    def backward(self) -> None:
        """Take what was counted into the model's accuracies; the heads have their gradients already."""
        counted = self.seen > 0
        found = self.hits[counted] / self.seen[counted, None]
        accuracies = self.model.accuracies
        accuracies[counted] = KEEP * accuracies[counted] + (1 - KEEP) * found.to(accuracies.dtype)
        self.hits.zero_()
        self.seen.zero_()


def _anchors(batch: Batch, heads: int, most: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors to draft behind: which text, where in it [P], and which of the `heads` tokens behind each are learnt [P, K].

    The token before the anchor and all that are learnt behind it are of the anchor's own text, without a gap.
    """
    length = batch.tokens.shape[1]
    at = torch.arange(1, max(1, length - 1), device=batch.tokens.device)
    wanted = at[:, None] + 1 + torch.arange(heads, device=at.device)
    labels_at = wanted.clamp(max=length - 1)
    own = batch.documents[:, at]
    follows = batch.loss_mask[:, labels_at] & (batch.documents[:, labels_at] == own[..., None]) & (wanted < length)
    learnt = (follows & (own == batch.documents[:, at - 1])[..., None]).cumprod(-1)
    text, place = chosen(learnt[..., 0] > 0, most).nonzero().unbind(-1)
    return text, at[place], learnt[text, place]
