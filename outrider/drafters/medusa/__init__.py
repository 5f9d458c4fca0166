"""Medusa: heads on the target's last hidden state, each for one token further ahead, drafted as a tree.  (arXiv
2401.10774.)

Head k, counted from 0, reads the state before the anchor and predicts the token k + 1 positions after the anchor: x +
SiLU(W x), then an output matrix.  Heads do not see each other's tokens, so a chain of first choices is a poor draft,
while a tree of likely combinations is a good one.  Training counts how often the choice of each rank is right, and the
draft consists of the nodes with the largest products of these accuracies.  This assumes that heads err independently.

With `sequential`, head k also reads the tokens before its own, starting with the anchor: y = [x; words], R y +
SiLU(W y). (Hydra, arXiv 2402.05109; its prefix attention is left out.)

Differs from the paper: the output matrix is the target's unless `head` is own, so a head has only H * H weights and
trains fast; accuracies are counted in training, not on held-out texts; verification is exact, not by typical
acceptance; above temperature 0 nodes are sampled, since more of them are accepted than of the likeliest ones.

Use it if drafting must take almost no time: it needs a few matrix products on an existing state.  Prefer `sequential`
if your engine supports it.

B slots, S tokens, H hidden size, V vocabulary, K heads, R ranks, N nodes, W nodes of one level, P positions trained.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor, nn

from outrider.config import Config as Base
from outrider.decoding.draft import Draft, to_device
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import DrafterError
from outrider.fast.static.step import (
    Committed,
    Proposed,
    StaticDrafter,
    StaticRule,
    StaticSlots,
    sizes_of,
)  # fmt: skip
from outrider.kernels import prepacked
from outrider.method import Method
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.drafting import serving, trees
from outrider.nn.drafting.trees import Path, RankTree
from outrider.nn.heads import ResidualBlock
from outrider.nn.memory import LastStates, StateDrafter
from outrider.nn.rows import SharedLabels, rollouts, whole_blocks
from outrider.targets.protocol import Target

METHOD = Method(
    cost="once", length="heads",
    engines={
        "vllm": {
            "name": "medusa",
            "formats": ("medusa",),
            "until": (0, 33),
            "bad": ({"versions": "0\\.(3[3-9]|[4-9]\\d).*|[1-9].*", "what": "vLLM dropped Medusa in 0.33"},),
        },
    },
    instead={
        "vllm": "train a DFlash or an EAGLE-3, or stay with 0.32",
        "sglang": "train an EAGLE-3, whose trees it verifies",
        "trtllm": "its PyTorch backend dropped Medusa; train an EAGLE-3",
        "llamacpp": "train an EAGLE-3",
    },
)  # fmt: skip

RANKS = 10
"""Number of ranks per head whose accuracies are counted."""
KEEP = 0.95
"""Weight of the previous accuracies in the moving average over batches."""


class Config(Base):
    kind: Literal["medusa"] = "medusa"
    heads: int = Field(5, ge=1, le=64)
    """Heads, each for one token further ahead: the depth of a draft in tokens."""
    layers: PositiveInt = 1
    """Residual blocks per head."""
    head: Literal["target", "own"] = "target"
    """Output matrix: the target's (frozen), or one per head with V * H weights, initialised from the target's."""
    sequential: bool = False
    """Heads read the drafted tokens before their own (Hydra): better at depth, and drafted level by level."""
    nodes: PositiveInt = 16
    """Number of nodes of the tree: those that were most often right in training."""
    tree: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    """The tree as paths of ranks, such as [[0], [0, 0], [1]], parents before children and the most promising first."""
    drawn: bool = True
    """Sample the nodes of sampled requests, siblings without replacement; no: use the likeliest tokens, as at
    temperature
    0."""
    anchors: PositiveInt | None = None
    """Maximum number of positions trained per text and step; by default all."""
    device: str | None = None
    """Device of the drafter, such as cuda:1; the target's by default."""

    @model_validator(mode="after")
    def _is_a_tree(self) -> Config:
        earlier: set[Path] = {()}
        for path in self.tree or ():
            if path in earlier or path[:-1] not in earlier:
                raise ValueError(
                    f"tree: path {list(path)} is empty, repeated, or before its parent {list(path[:-1])}; "
                    "list parents first, each once"
                )
            if len(path) > self.heads:
                raise ValueError(
                    f"tree: path {list(path)} is deeper than {self.heads} heads; raise heads, or shorten the path"
                )
            earlier.add(path)
        if self.tree == ():
            raise ValueError("tree must have at least one node; leave it out to use the best tree as measured")
        return self


class Model(DraftModel):
    """The heads and their accuracies."""

    taps = ()
    accuracies: Tensor
    """[K, R], how often head k's choice of rank r was the target's token, after true text."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config, self.target = config, target
        hidden, vocabulary = target.spec.hidden, target.spec.vocabulary
        most = max((max(path) for path in config.tree or ()), default=0)
        if most >= vocabulary:
            raise DrafterError(
                f"tree: rank {most} must be below the {vocabulary} tokens of {target.spec.name}; lower it"
            )
        rows = (
            target.head_rows(torch.arange(vocabulary, device=target.device)).detach() if config.head == "own" else None
        )
        self.medusa_head = nn.ModuleList()
        for k in range(config.heads):
            num_words = k + 1 if config.sequential else 0
            head = nn.ModuleList(ResidualBlock(hidden, 0 if layer else num_words) for layer in range(config.layers))
            if rows is not None:
                head.append(nn.Linear(hidden, vocabulary, bias=False))
                head[-1].weight = nn.Parameter(rows.clone())
            self.medusa_head.append(head)
        self.register_buffer("accuracies", assumed(config.heads, min(RANKS, vocabulary)))

    def state(self, k: int, hidden: Tensor, words: Tensor | None) -> Tensor:
        """Head k's state [..., H] from the target's [..., H] and, if sequential, words [..., >= k + 1, H]."""
        x = hidden if words is None else torch.cat([hidden, words[..., : k + 1, :].flatten(-2)], -1)
        for layer in range(self.config.layers):
            x = self.medusa_head[k][layer](x)  # type: ignore[index]
        return x

    def logits(self, states: Tensor, first: int = 0) -> Tensor:
        """Logits [..., k, V] of the states [..., k, H] of k heads, from head `first` on."""
        if self.config.head == "target":
            return self.target.head(states)
        outputs = [self.medusa_head[first + k][-1](states[..., k, :]) for k in range(states.shape[-2])]  # type: ignore[index]
        return torch.stack(outputs, -2)

    def words(self, tokens: Tensor) -> Tensor | None:
        """Embeddings [..., H] of tokens [...] if the heads read them, else None."""
        return self.target.embed(tokens).to(self.accuracies.dtype) if self.config.sequential else None

    def along(self, hidden: Tensor, words: Tensor | None, heads: int) -> Tensor:
        """Teacher-forced logits [..., k, V] of the first `heads` heads: hidden [..., H], words [..., K, H], the anchor
        first."""
        return self.logits(torch.stack([self.state(k, hidden, words) for k in range(heads)], -2))

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> MedusaDrafter:
        return MedusaDrafter(self)


build = Model.build


# ── the tree ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def assumed(heads: int, ranks: int) -> Tensor:
    """Initial accuracies [K, R]: 0.6 for the first choice of head 0, 0.8 times that per further head, divided by the
    square of the rank.
    """
    return 0.6 * 0.8 ** torch.arange(heads)[:, None] / torch.arange(1, ranks + 1) ** 2


def search(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """The `nodes` paths with the largest products of accuracies [K, R], largest first: the tree with the highest
    expected acceptance.

    A child's product is never above its parent's and on a tie the shallower comes first, so every prefix is the best
    tree of its size.  Returns fewer paths if there are no more.
    """
    paths: list[Path] = []
    candidates: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
    while candidates and len(paths) <= nodes:
        product, depth, path = heapq.heappop(candidates)
        paths.append(path)
        for rank, chance in enumerate(accuracies[depth] if depth < len(accuracies) else ()):
            heapq.heappush(candidates, (product * chance, depth + 1, (*path, rank)))
    return tuple(paths[1:])  # without the anchor


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class MedusaDrafter(StateDrafter):
    """Drafts a tree of the heads' choices."""

    def __init__(self, model: Model):
        self._packed = prepacked.Packed(model)
        self.model, self.hidden, self.tree = model, model.target.spec.hidden, RankTree(_paths(model))
        super().__init__(model.target, model.accuracies.dtype, len(self.tree.paths))

    def refresh(self) -> None:
        self._packed.refresh()

    def draft(self, memory: LastStates, state: DecodeState, sizes: Tensor) -> Draft:
        tree = self.tree.first(int(sizes.max()))
        drawn = self.model.config.drawn and state.judge.temperature is not None
        hidden = memory.hidden[to_device(state.rows, memory.hidden.device)]
        step = _Step(self.model, hidden, state.anchor, 1 + int(tree.depths.max()))
        if step.all is not None and not (drawn or state.judge.bans):
            return tree.draft(tree.choices(step.all), sizes)

        def possible(nodes: Draft, new: int) -> Tensor:
            return serving.masked(step.expand(nodes, new), nodes, state)

        first = state.judge.masked(step.first())
        if not drawn:
            return tree.draft(trees.ranked(first, possible, tree), sizes)
        draft = trees.sampled(first, possible, sizes, state, parents=tree.parents)
        return replace(draft, branches=not tree.is_chain)

    def static(self, memory: LastStates, is_greedy: bool) -> StaticHeads:
        return StaticHeads(self, memory, is_drawn=self.model.config.drawn and not is_greedy)


class StaticHeads(StaticDrafter):
    """A `MedusaDrafter` in a static step."""

    code = (trees,)

    def __init__(self, drafter: MedusaDrafter, memory: LastStates, is_drawn: bool):
        self.model, self.tree, self.has_q = drafter.model, drafter.tree, is_drawn
        self.memory, self.hidden = memory, memory.hidden
        self.is_ready = torch.zeros(len(self.hidden), dtype=torch.bool, device=self.hidden.device)
        self.parents = self.tree.parents
        self.choices = self.tree.indices.to(self.hidden.device).repeat(len(self.hidden), 1)
        self.deepest = 1 + int(self.tree.depths.max())

    def enter(self, rows: Sequence[int], state: DecodeState) -> None:
        for row in rows:
            self.is_ready[row] = self.memory.is_ready[row]

    def leave(self, rows: Sequence[int], state: DecodeState) -> None:
        for row, is_ready in zip(rows, self.is_ready[rows].tolist(), strict=True):
            self.memory.is_ready[row] = is_ready

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        step, q = _Step(self.model, self.hidden, slots.anchor, self.deepest), None
        if self.has_q:
            distribution = functools.partial(rule.distribution, slots=slots)
            tokens, q = trees.drawn(step.first(), step.expand, self.parents, distribution, slots.streams)
        elif step.all is None:
            tokens = trees.ranked(step.first(), step.expand, self.tree)
        else:
            tokens = step.all.topk(self.tree.width, -1).indices.flatten(1).gather(1, self.choices)
        return Proposed(tokens, sizes_of(slots, len(self.parents), self.is_ready), q)

    def observe(self, slots: StaticSlots, committed: Committed, scores: Scores) -> None:
        last = (committed.counts - 1).clamp(min=0)
        rows, is_new = committed.rows.gather(1, last[:, None]), committed.counts > 0
        states = scores.hidden.gather(1, rows[..., None].expand(-1, -1, scores.hidden.shape[-1]))[:, 0]
        self.hidden.copy_(torch.where(is_new[:, None], states.to(self.hidden), self.hidden))
        self.is_ready.logical_or_(is_new)


class _Step:
    """The heads' logits in one step.  hidden [B, H], of each slot's last verified token; anchor [B]."""

    def __init__(self, model: Model, hidden: Tensor, anchor: Tensor, depth: int):
        self.model, self.hidden, self.anchor = model, hidden, anchor
        self.all = None if model.config.sequential else model.along(hidden, None, depth)
        """[B, depth, V] if no head depends on a drafted token; else None."""

    def first(self) -> Tensor:
        """Logits [B, V] after the anchor."""
        return self._logits_after([], 1)[:, 0]

    def expand(self, tree: Draft, new: int) -> Tensor:
        """Logits [B, new, V] after the last nodes of the tree, as `trees.Expand`."""
        return self._logits_after(trees.path(tree, new), new)

    def _logits_after(self, path: list[Tensor], new: int) -> Tensor:
        """Logits [B, new, V] after drafted tokens, [B, new] of each depth."""
        k = len(path)
        if self.all is not None:
            return self.all[:, k, None].expand(-1, new, -1)
        words = self.model.words(torch.stack([self.anchor[:, None].expand(-1, new), *path], -1))
        state = self.model.state(k, self.hidden[:, None].expand(-1, new, -1), words)
        return self.model.logits(state[..., None, :], k)[..., 0, :]


def _paths(model: Model) -> tuple[Path, ...]:
    """The configured tree, or the best one according to the accuracies; a chain if the target can't verify trees."""
    config = model.config
    chain = tuple((0,) * (k + 1) for k in range(min(config.heads, config.nodes)))
    if not serving.verifies_trees(model.target, "medusa", f"a chain of {len(chain)}, every head's first choice"):
        return chain
    if config.tree is None:
        return search(model.accuracies.tolist(), config.nodes)
    serving.warn_idle(
        "medusa", config, {"nodes": False}, f"with medusa.tree, whose {len(config.tree)} nodes are drafted"
    )
    return config.tree


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows(SharedLabels):
    """Predictions of every head after every anchor whose next token is trained: K rows per anchor, row k of head k.

    The hidden states are the target's and not trained, so a chunk's gradient goes directly to the weights.
    """

    def __init__(self, model: Model, batch: Batch):
        heads, device = model.config.heads, batch.tokens.device
        live, labels_at, rows = rollouts(batch, heads, model.config.anchors, 0.8)
        text, before = live.nonzero().unbind(-1)
        super().__init__(model, batch.hidden[text, before], batch.final, rows)
        self._before = batch.tokens[text[:, None], labels_at - 1]
        """[P, K], the anchor and the tokens after it; head k may read the first k + 1."""
        self.hits = torch.zeros(heads, model.accuracies.shape[1] + 1, device=device)
        """[K, R + 1], how often the target's likeliest token was head k's choice of rank r; the last column counts all
        later ranks."""

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        heads = self.model.config.heads
        for part in whole_blocks(self.block, rows):
            anchors = slice(part.start // heads, part.stop // heads)
            with torch.no_grad():
                target = self.target_logits(part)
            hidden = self._states[anchors].to(self.model.accuracies.dtype)
            draft = self.model.along(hidden, self.model.words(self._before[anchors]), heads)
            chunk = [(draft.flatten(0, 1), target, part)]
            del draft, target
            yield chunk.pop()  # keep no reference here, as in `DetachedRows`

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        if self.model.training:
            self.count(rows, draft, target)
        return {}

    @torch.no_grad()
    def count(self, rows: slice, draft: Tensor, target: Tensor) -> None:
        """Count the rank of the target's likeliest token in each of these rows."""
        best, ids = target.argmax(-1, keepdim=True), torch.arange(draft.shape[-1], device=draft.device)
        value = draft.gather(-1, best)
        # in bf16 the best logits are often tied, but only one is the first choice
        rank = (draft > value).sum(-1) + ((draft == value) & (ids < best)).sum(-1)
        ranks, is_trained = self.hits.shape[1], self.weight[rows] > 0
        at = self.depth[rows] * ranks + rank.clamp(max=ranks - 1)
        self.hits += torch.bincount(at[is_trained], minlength=self.hits.numel()).view_as(self.hits)

    def backward(self) -> None:
        """Update the model's accuracies by the counts; the heads already have their gradients."""
        counts, accuracies = self.hits.sum(1), self.model.accuracies
        counted = counts > 0
        measured = self.hits[counted, :-1] / counts[counted, None]
        accuracies[counted] = KEEP * accuracies[counted] + (1 - KEEP) * measured.to(accuracies.dtype)
        self.hits.zero_()
