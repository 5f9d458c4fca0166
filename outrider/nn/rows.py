"""Predictions whose heads run chunk by chunk on a detached copy of the states.

So logits over a large vocabulary never exist whole; `backward` sends their gradient through the rest of the model at
once.

M rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.nn.draft_model import Batch, drawn, labelled
from outrider.nn.draft_vocabulary import DraftVocabulary
from outrider.nn.top_logprobs import TopLogprobs


class Labelled(NamedTuple):
    """Labels of a batch's rows, each [M]."""

    labels: Tensor
    weight: Tensor
    depth: Tensor
    block: Tensor
    """Rows of one block are contiguous."""
    hidden_at: Tensor
    """Index of the target's hidden state that predicts the label."""

    @classmethod
    def of(cls, batch: Batch, text: Tensor, at: Tensor, weight: Tensor, depth: Tensor, block: Tensor) -> Labelled:
        """Rows labelled with the tokens at positions `at` of these texts, all [M]."""
        return cls(batch.tokens[text, at], weight, depth, block, text * batch.tokens.shape[1] + at - 1)

    @classmethod
    def blocks(cls, batch: Batch, text: Tensor, at: Tensor, weight: Tensor) -> Labelled:
        """As `of` for blocks of K rows, row k of each of depth k.  text [P]; at and weight [P, K]."""
        depths, row = at.shape[1], torch.arange(at.numel(), device=at.device)
        return cls.of(
            batch, text.repeat_interleave(depths), at.flatten(), weight.flatten(), row % depths, row // depths
        )


def rollouts(batch: Batch, depths: int, most: int | None, decay: float) -> tuple[Tensor, Tensor, Labelled]:
    """Blocks of K rows after the positions of a batch where there is something to learn, at most `most` a text.

    Row s is labelled with token i + 2 + s and weighs decay ** s.  Returns which positions, [B, S - 2] bool, positions
    of the labels, [P, K], and the rows.
    """
    at = torch.arange(max(1, batch.tokens.shape[1] - 2), device=batch.tokens.device).expand(len(batch.tokens), -1)
    labels_at, learnt = labelled(batch, at, 2, depths)
    live = learnt[..., 0]
    if most is not None and most < live.shape[1]:
        every = labelled(batch.whole, at[:1].expand(len(batch.whole.tokens), -1), 2, 1)[1][..., 0]
        live = torch.zeros_like(live).scatter(1, *map(batch.own, drawn(every, most, batch.whole)))
    weight = learnt[live] * decay ** torch.arange(depths, device=at.device)
    return live, labels_at[live], Labelled.blocks(batch, live.nonzero()[:, 0], labels_at[live], weight)


class DetachedRows:
    """`Predictions` of states [M, H], which the model's own `logits` turns into logits."""

    def __init__(self, model: Any, states: Tensor, final: Tensor | TopLogprobs, rows: Labelled):
        """final: the target's hidden states [..., H], or its likeliest tokens, of which `rows.hidden_at` counts."""
        self.model, self.target, self.vocabulary = model, model.target, model.target.spec.vocabulary
        self.labels, self.weight, self.depth, self.block, self._hidden_at = rows
        self._drafted: DraftVocabulary | None = model.reduced
        if self._drafted is not None:
            self.labels, self.vocabulary = self._drafted.labels(self.labels), len(self._drafted.ids) + 1
        self._final = final.flat() if isinstance(final, TopLogprobs) else final.flatten(0, -2)
        self._states, self.states = states, states.detach()
        self._leaves: dict[tuple[int, int], Tensor] = {}
        """The chunks handed out, by their first row and the one after their last: their states."""
        self._gradient: Tensor | None = None

    def head(self, states: Tensor, rows: slice) -> Tensor:
        """Logits [m, V] of these rows' states [m, H]."""
        return self.model.logits(states)

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        for part in whole_blocks(self.block, rows):
            with torch.no_grad():
                target = self.target_logits(part)
            draft = self.head(self.leaf(part), part)
            found = [(draft if self._drafted is None else self._drafted.with_others(draft), target, part)]
            del draft
            del target
            yield found.pop()  # nothing of it stays here, so that one chunk's logits are gone before the next one's
            self._collect()

    def leaf(self, part: slice) -> Tensor:
        """These rows' states [m, H], which collect the chunk's gradient.

        One leaf for a chunk: the gradient of a slice of one for all would be as long as all of them, in every chunk.
        """
        key = part.start, part.stop
        if key not in self._leaves:
            self._leaves[key] = self.states[part].detach().requires_grad_()
        return self._leaves[key]

    def target_logits(self, part: slice) -> Tensor:
        """The target's logits [m, V] for these rows."""
        return self._logits_of(self._hidden_at[part])

    def _logits_of(self, at: Tensor) -> Tensor:
        """The target's logits [m, V] of its final states of these numbers."""
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
        """Add the chunks' gradients to that of all rows.  Kept, one could hold on to the logits that it came from."""
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
    """Neighbouring rows are labelled by the same hidden states, whose logits are computed once."""

    def target_logits(self, part: slice) -> Tensor:
        which, back = self._hidden_at[part].unique(return_inverse=True)
        return self._logits_of(which)[back]


def whole_blocks(block: Tensor, rows: int) -> Iterator[slice]:
    """Chunks of about `rows` rows, none of which splits a block; block [M], rows of one block contiguous."""
    ends = [*(block.diff().nonzero().flatten() + 1).tolist(), len(block)]
    start = 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if end > start and (following is None or following - start > rows):
            yield slice(start, end)
            start = end
