"""Rows of predictions: where they start, their labels, and heads that run chunk by chunk.

The heads read a detached copy of the states, so logits over a large vocabulary never exist in full; `backward` sends
their gradient through the rest of the model at once.

B sequences, S tokens, A anchors of a sequence, D depths, M rows, m rows of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.nn.draft_model import Batch
from outrider.nn.draft_vocabulary import DraftVocabulary
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.cache.attention_mask import positions

# ── anchors: the positions that are drafted from ──────────────────────────────────────────────────────────────────────


class Anchors(NamedTuple):
    """Positions from which a batch is drafted."""

    at: Tensor
    """[B, A] int64, ascending."""
    live: Tensor
    """[B, A] bool, False for padding."""
    labels_at: Tensor
    """[B, A, D] int64, position of the token that each depth predicts; arbitrary where `loss_mask` is False."""
    loss_mask: Tensor
    """[B, A, D] bool: the label and those of all smaller depths are trained and belong to the anchor's text."""


def sample_anchors(batch: Batch, most: int, first: int, depths: int) -> Anchors:
    """Up to `most` anchors per text, sampled without replacement from those whose first label is trained.

    An anchor's first label is `first` tokens after it.
    """
    whole = batch.whole
    every = torch.arange(whole.tokens.shape[1] - first, device=whole.tokens.device).expand(len(whole.tokens), -1)
    is_trained = label_positions(whole, every, first, 1)[1][..., 0]
    at, live = map(batch.own, sample_positions(is_trained, most, whole))
    labels_at, loss_mask = label_positions(batch, at, first, depths)
    return Anchors(at, live, labels_at, loss_mask & live[..., None])


def label_positions(batch: Batch, at: Tensor, first: int, depths: int) -> tuple[Tensor, Tensor]:
    """Positions of the D labels of anchors `at` [B, A], from `at` + `first` on, and their loss mask; both [B, A, D].

    The loss mask is True if the label and those of all smaller depths are trained and belong to the anchor's text.
    """
    length = batch.tokens.shape[1]
    unclamped = at[..., None] + first + torch.arange(depths, device=at.device)
    labels_at = unclamped.clamp(max=length - 1)
    is_same_text = _at(batch.documents, labels_at) == batch.documents.gather(1, at)[..., None]
    return labels_at, (_at(batch.loss_mask, labels_at) & is_same_text & (unclamped < length)).cumprod(-1).bool()


def sample_positions(live: Tensor, most: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Up to `most` live positions per text, sampled without replacement: [B, A] ascending, and which of them are live.

    live [B, n], of the batch's first n positions.
    """
    # on the CPU, whose random state a checkpoint stores
    chance = torch.rand(live.shape).to(live.device).masked_fill(~live, -1.0)
    if batch.per_row > 1:
        chance = chance.masked_fill(_rank_in_text(chance, batch.documents[:, : live.shape[1]]) >= most, -1.0)
    # no wider than the fullest row: otherwise padding would go through the model and the head for nothing
    best = chance.topk(max(1, min(most * batch.per_row, int(live.sum(1).max()))), dim=1)
    at, order = best.indices.sort(1)
    return at, best.values.gather(1, order) >= 0


def _at(values: Tensor, at: Tensor) -> Tensor:
    """values [B, S] at positions [B, A, D]."""
    return values.gather(1, at.flatten(1)).view(at.shape)


def _rank_in_text(chance: Tensor, documents: Tensor) -> Tensor:
    """How many positions of the same text have a larger chance, [B, n].  chance [B, n], at most 1."""
    # float64: adding the text's number must not round the chance
    order = (2.0 * documents.double() - chance).argsort(1)
    return torch.zeros_like(order).scatter(1, order, positions(documents.gather(1, order)))


def pair_mask(documents: Tensor) -> Tensor:
    """Attention mask of pairs (see `nn.memory`), [B, S - 1, S - 1] bool: each attends to itself and to earlier pairs of
    its text.

    A position whose next token is padding or belongs to another text has no pair: it attends only to itself, and
    nothing else attends to it.
    """
    text = documents[:, 1:]
    is_pair = (text == documents[:, :-1]) & (text > 0)
    index = torch.arange(text.shape[1], device=text.device)
    is_same_text = text[:, :, None] == text[:, None, :]
    before = is_same_text & is_pair[:, None, :] & is_pair[:, :, None] & (index[:, None] >= index)
    return before | (index[:, None] == index)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RowLabels(NamedTuple):
    """Labels of a batch's rows, each [M]."""

    labels: Tensor
    weight: Tensor
    depth: Tensor
    block: Tensor
    """Rows of one block are contiguous."""
    hidden_at: Tensor
    """Index of the target's hidden state that predicts the label."""

    @classmethod
    def of(cls, batch: Batch, text: Tensor, at: Tensor, weight: Tensor, depth: Tensor, block: Tensor) -> RowLabels:
        """Rows labelled with the tokens at positions `at` of these texts, all [M]."""
        return cls(batch.tokens[text, at], weight, depth, block, text * batch.tokens.shape[1] + at - 1)

    @classmethod
    def blocks(cls, batch: Batch, text: Tensor, at: Tensor, weight: Tensor) -> RowLabels:
        """Like `of`, for blocks of D rows, with the rows of each in order of depth.  text [P]; at and weight [P, D]."""
        depths = at.shape[1]
        row = torch.arange(at.numel(), device=at.device)
        text = text.repeat_interleave(depths)
        return cls.of(batch, text, at.flatten(), weight.flatten(), row % depths, row // depths)


def rollouts(batch: Batch, depths: int, most: int | None, decay: float) -> tuple[Tensor, Tensor, RowLabels]:
    """Blocks of D rows after the positions whose first label is trained, at most `most` per text.

    Row s is labelled with token i + 2 + s and has weight decay ** s.  Returns a mask of the positions, [B, S - 2] bool,
    positions of the labels, [P, D], and the rows.
    """
    at = torch.arange(max(1, batch.tokens.shape[1] - 2), device=batch.tokens.device).expand(len(batch.tokens), -1)
    labels_at, loss_mask = label_positions(batch, at, 2, depths)
    live = loss_mask[..., 0]
    if most is not None and most < live.shape[1]:
        every = label_positions(batch.whole, at[:1].expand(len(batch.whole.tokens), -1), 2, 1)[1][..., 0]
        live = torch.zeros_like(live).scatter(1, *map(batch.own, sample_positions(every, most, batch.whole)))
    weight = loss_mask[live] * decay ** torch.arange(depths, device=at.device)
    return live, labels_at[live], RowLabels.blocks(batch, live.nonzero()[:, 0], labels_at[live], weight)


class DetachedRows:
    """`Predictions` of states [M, H], which the model's own `logits` turns into logits."""

    def __init__(self, model: Any, states: Tensor, final: Tensor | TopLogprobs, rows: RowLabels):
        """final: the target's hidden states [..., H], or its likeliest tokens; `rows.hidden_at` indexes them."""
        self.model, self.target, self.vocabulary = model, model.target, model.target.spec.vocabulary
        self.labels, self.weight, self.depth, self.block, self._hidden_at = rows
        self._drafted: DraftVocabulary | None = model.reduced
        if self._drafted is not None:
            self.labels, self.vocabulary = self._drafted.labels(self.labels), len(self._drafted.ids) + 1
        self._final = final.flat() if isinstance(final, TopLogprobs) else final.flatten(0, -2)
        self._states, self.states = states, states.detach()
        self._leaves: dict[tuple[int, int], Tensor] = {}
        """States of the chunks handed out so far, by (start, stop)."""
        self._gradient: Tensor | None = None

    def head(self, states: Tensor, rows: slice) -> Tensor:
        """Logits [m, V] of these rows' states [m, H]."""
        return self.model.logits(states)

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        for part in whole_blocks(self.block, rows):
            with torch.no_grad():
                target = self.target_logits(part)
            draft = self.head(self.leaf(part), part)
            chunk = [(draft if self._drafted is None else self._drafted.with_others(draft), target, part)]
            del draft
            del target
            # keep no reference here, so that one chunk's logits are freed before the next chunk's are allocated
            yield chunk.pop()
            self._collect()

    def leaf(self, part: slice) -> Tensor:
        """These rows' states [m, H], which collect the chunk's gradient.

        Each chunk has its own leaf: the gradient of a slice of a shared one would be as long as all rows.
        """
        key = part.start, part.stop
        if key not in self._leaves:
            self._leaves[key] = self.states[part].detach().requires_grad_()
        return self._leaves[key]

    def target_logits(self, part: slice) -> Tensor:
        """The target's logits [m, V] for these rows."""
        return self._logits_of(self._hidden_at[part])

    def _logits_of(self, at: Tensor) -> Tensor:
        """The target's logits [m, V] of its final states at these indices."""
        drafted = self._drafted
        if isinstance(self._final, TopLogprobs):
            return self._final.logits(at, self.vocabulary) if drafted is None else drafted.reduced_top(self._final, at)
        logits = self.model.target_logits(self._final[at])
        return logits if drafted is None else drafted.reduced(logits)

    def hidden(self, part: slice) -> Tensor:
        """The target's hidden states [m, H] that predict these rows' labels."""
        assert isinstance(self._final, Tensor)
        return self._final[self._hidden_at[part]]

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return self.model.terms(self, rows, draft, target)

    def served(self, rows: slice, draft: Tensor) -> Tensor | None:
        return self.model.served(self, rows, draft)

    def figures(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return self.model.figures(self, rows, draft, target)

    def _collect(self) -> None:
        """Add the chunks' gradients to that of all rows, then drop the leaves, which could keep their logits alive."""
        for (start, stop), leaf in self._leaves.items():
            if leaf.grad is not None:
                if self._gradient is None:
                    self._gradient = torch.zeros_like(self.states)
                self._gradient[start:stop] += leaf.grad
        self._leaves.clear()

    def backward(self) -> None:
        self._collect()
        if self._gradient is not None:
            self._states.backward(self._gradient)


class SharedLabels(DetachedRows):
    """Rows that share labels: the target's logits of each hidden state are computed once."""

    def target_logits(self, part: slice) -> Tensor:
        hidden_at, inverse = self._hidden_at[part].unique(return_inverse=True)
        return self._logits_of(hidden_at)[inverse]


def whole_blocks(block: Tensor, rows: int) -> Iterator[slice]:
    """Chunks of about `rows` rows, none of which splits a block; block [M], rows of one block contiguous."""
    ends = [*(block.diff().nonzero().flatten() + 1).tolist(), len(block)]
    start = 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if end > start and (following is None or following - start > rows):
            yield slice(start, end)
            start = end
