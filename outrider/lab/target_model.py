"""A target's model that is trained further, so that additional rows of its passes draft for it.

It becomes a new target, which can also decode alone; the output is exact relative to it, not to the original target.
The rows of text learn the original target's distribution by KL (`ar`), so that the model stays near it.

B texts, S tokens, A sampled positions of a text, K rows after each, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.lab.probe_rows import rows_after
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.rows import Anchors, DetachedRows, RowLabels, sample_anchors
from outrider.targets.cache.attention_mask import positions
from outrider.targets.hf import causal_lm
from outrider.targets.load import load_target
from outrider.targets.protocol import Target
from outrider.targets.quantised import dtype_of


class TargetModel(DraftModel):
    """A copy of the target's model with all weights trained; a subclass chooses the trained rows."""

    taps: tuple[int, ...] = ()
    block: int
    """Rows after a sampled position, K."""

    def __init__(self, config: Any, target: Target):
        super().__init__()
        self.target, self.config = target, config
        source: Any = target
        self.lm: Any = copy.deepcopy(source.model).requires_grad_(True)
        self._finish, _ = causal_lm.learn_passes(self.lm, target.spec.name)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H]; a row of `Rows` has two states side by side, the first is used."""
        head = self.lm.get_output_embeddings()
        logits: Tensor = self._finish(head(states[..., : self.target.spec.hidden].to(dtype_of(head))))
        return logits

    def terms(self, rows: Any, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        p = target.float().log_softmax(-1)
        log_p = self.logits(rows.leaf(part)[..., self.target.spec.hidden :]).float().log_softmax(-1)
        return {"ar": (p.exp() * (p - log_p)).sum(-1)}

    def trained_target(self) -> Target:
        """The model as a target, with a copy of the weights."""
        return load_target(copy.deepcopy(self.lm).requires_grad_(False))

    def save_target(self, folder: Path) -> None:
        """Write the model as a target, with the original target's tokenizer."""
        source: Any = self.target
        self.lm.save_pretrained(folder)
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(folder)

    def _apply(self, fn: Any, recurse: bool = True) -> TargetModel:
        """Convert weights, but not computed buffers such as rotary frequencies."""
        with causal_lm.keeping_computed(self):
            super()._apply(fn, recurse)
        return self


class ProbedTargetModel(TargetModel):
    """A target model that is trained on a probe's rows; a subclass chooses their inputs."""

    is_causal: bool
    """Whether a row sees only those before it in its block."""

    @abstractmethod
    def inputs(self, tokens: Tensor, documents: Tensor, at: Tensor) -> Tensor:
        """Embeddings [B, A * K, H] of the rows after positions `at` [B, A] of texts [B, S]."""

    def words(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H], as the model's passes take them."""
        embedded: Tensor = self.lm.get_input_embeddings()(tokens)
        return embedded

    def read(self, tokens: Tensor, documents: Tensor, at: Tensor, inputs: Tensor | None = None) -> Tensor:
        """States [B, S + A * K, H] of texts [B, S] and of the rows after each position `at` [B, A].

        inputs: embeddings of these rows, by default from `inputs`.
        """
        if inputs is None:
            inputs = self.inputs(tokens, documents, at)
        mask, positions = rows_of(documents, at, self.block, causal=self.is_causal)
        source: Any = self.target
        inputs_of_pass = source.masked(None, mask, positions, positions)
        embedded = torch.cat([self.words(tokens), inputs], 1)
        return causal_lm.states(self.lm, None, **inputs_of_pass | {"use_cache": False, "inputs_embeds": embedded})

    def predict(self, batch: Batch) -> Rows:
        anchors = sample_anchors(batch, self.config.anchors, 2, self.block)
        return Rows(self, batch, anchors, self.read(batch.tokens, batch.documents, anchors.at))


def rows_of(documents: Tensor, at: Tensor, count: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention mask [B, n, n] bool and positions [B, n] of texts, documents [B, S], and of `count` rows after each
    position `at` [B, A] of them, n = S + A * count; see `rows_after`."""
    length, text_at = documents.shape[1], positions(documents)
    order = torch.arange(length, device=documents.device)
    text = (documents[:, :, None] == documents[:, None]) & (order[:, None] >= order)
    before = text.gather(1, at[..., None].expand(-1, -1, length))
    mask, after = rows_after(before, text_at.gather(1, at), count, causal=causal)
    mask = torch.cat([torch.nn.functional.pad(text, (0, after.shape[1])), mask], 1)
    return mask, torch.cat([text_at, after], 1)


class Rows(DetachedRows):
    """Predictions of the rows after sampled positions; row k after position i has label token i + 2 + k.

    Each row also has the state of the text with the same label.
    """

    def __init__(self, model: TargetModel, batch: Batch, anchors: Anchors, states: Tensor):
        """states: as `model.read` returns them."""
        length, block = batch.tokens.shape[1], model.block
        b, a, depth = anchors.loss_mask.nonzero().unbind(-1)
        label = anchors.labels_at[b, a, depth]
        weight, number = torch.ones(len(b), device=b.device), b * anchors.at.shape[1] + a
        both = torch.cat([states[b, length + a * block + depth], states[b, label - 1]], -1)
        super().__init__(model, both, batch.final, RowLabels.of(batch, b, label, weight, depth, number))
