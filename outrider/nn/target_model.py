"""A target's model whose weights are trained on, so that rows beside its text draft for it.

It becomes a target of its own, which writes alone as well: texts are exact relative to it, not to the target that it
began from.  The rows of text learn that target's own distribution by KL (`ar`), so that the model stays near it.

B texts, S tokens, A drawn positions of a text, K rows behind each, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.nn.draft_model import Batch, DraftModel, draw
from outrider.nn.probe_rows import rows_after
from outrider.nn.rows import DetachedRows, Labelled
from outrider.targets import causal_lm
from outrider.targets.load import load_target
from outrider.targets.protocol import Target


class TargetModel(DraftModel):
    """A copy of the target's model, all of its weights trained.  A method says what its rows are given."""

    taps: tuple[int, ...] = ()
    block: int
    """Rows behind a drawn position, K."""
    is_causal: bool
    """Whether a row sees only those before it in its block."""

    def __init__(self, config: Any, target: Target):
        super().__init__()
        self.target, self.config = target, config
        source: Any = target
        self.lm: Any = copy.deepcopy(source.model).requires_grad_(True)
        self._finish, _ = causal_lm.learn(self.lm, target.spec.name)

    @abstractmethod
    def inputs(self, tokens: Tensor, documents: Tensor, at: Tensor) -> Tensor:
        """What stands for embeddings of the rows behind positions `at` [B, A] of texts [B, S]: [B, A * K, H]."""

    def words(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H], as the model's passes take them."""
        embedded: Tensor = self.lm.get_input_embeddings()(tokens)
        return embedded

    def read(self, tokens: Tensor, documents: Tensor, at: Tensor, inputs: Tensor | None = None) -> Tensor:
        """States [B, S + A * K, H] of texts [B, S] and of the rows behind each position `at` [B, A].

        inputs: of these rows, those that `inputs` gives unless given."""
        if inputs is None:
            inputs = self.inputs(tokens, documents, at)
        length, source = tokens.shape[1], self.target
        order = torch.arange(length, device=tokens.device)
        text = (documents[:, :, None] == documents[:, None]) & (order[:, None] >= order)
        mask, after = rows_after(
            text.gather(1, at[..., None].expand(-1, -1, length)), at, self.block, causal=self.is_causal
        )
        mask = torch.cat([torch.nn.functional.pad(text, (0, after.shape[1])), mask], 1)
        positions = torch.cat([order.expand(len(tokens), -1), after], 1)
        given = source.masked(None, mask, positions, positions)  # type: ignore[attr-defined]
        embedded = torch.cat([self.words(tokens), inputs], 1)
        return causal_lm.states(self.lm, None, **given | {"use_cache": False, "inputs_embeds": embedded})

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] of states [..., H], of which a row of `Rows` has two side by side."""
        head = self.lm.get_output_embeddings()
        logits: Tensor = self._finish(head(states[..., : self.target.spec.hidden].to(head.weight.dtype)))
        return logits

    def terms(self, rows: Any, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        p = target.float().log_softmax(-1)
        own = self.logits(rows.states[part][..., self.target.spec.hidden :]).float().log_softmax(-1)
        return {"ar": (p.exp() * (p - own)).sum(-1)}

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def trained_target(self) -> Target:
        """The model as a target, with its own copy of the weights."""
        return load_target(copy.deepcopy(self.lm).requires_grad_(False))

    def save_target(self, folder: Path) -> None:
        """Write the model as a target, with the tokenizer of the one that it began from."""
        source: Any = self.target
        self.lm.save_pretrained(folder)
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(folder)

    def _apply(self, fn: Any, recurse: bool = True) -> TargetModel:
        """Weights follow a change of type; buffers that are computed once, such as rotary frequencies, do not."""
        with causal_lm.keeping_computed(self):
            super()._apply(fn, recurse)
        return self


class Rows(DetachedRows):
    """Predictions of the rows behind drawn positions; row k behind position i has label token i + 2 + k.

    Each has beside it the state of the text that has the same label."""

    def __init__(self, model: TargetModel, batch: Batch):
        length, block = batch.tokens.shape[1], model.block
        drawn = draw(batch, model.config.anchors, 2, block)
        states = model.read(batch.tokens, batch.documents, drawn.at)
        b, a, depth = drawn.learnt.nonzero().unbind(-1)
        label = drawn.labels_at[b, a, depth]
        weight, number = torch.ones(len(b), device=b.device), b * drawn.at.shape[1] + a
        both = torch.cat([states[b, length + a * block + depth], states[b, label - 1]], -1)
        super().__init__(model, both, batch.hidden, Labelled.of(batch, b, label, weight, depth, number))
