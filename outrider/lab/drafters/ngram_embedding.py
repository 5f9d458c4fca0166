"""Hashed n-grams: the next token from the mean of embeddings that the last few tokens look up in tables.

The tables are those of LongCat-Flash-Lite (arXiv 2601.21204), which has them before a target's layers; here they are
before its output layer: logits = head(norm(mean of [P E(x_i), P_j T_j[row_j]])), a neural n-gram model with a few
lookups and three products per token.  It reads no state of the target and stores nothing for a request; each node uses
the tokens of its own branch.  Any loss trains it: every token of a text is a row.

Differs from the paper's layer: E is the target's embedding and goes through a matrix, since the head does not read
embeddings; a norm follows the mean, since the head reads normed states; tables are 0 at first, so an n-gram that was
never trained adds nothing.

Use it if a drafted token may cost a few lookups but no layer.  In the one short training that was measured it was no
faster than `ngram`.

B live slots, S tokens, n order, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from outrider.config import Config as Base
from outrider.decoding.draft import Draft, to_device
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.kernels import prepacked
from outrider.lab.targets.ngram_embedding import NgramEmbedding, NgramHashes, shifted, stopped
from outrider.nn.blocks import RMSNorm
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.drafting import trees
from outrider.nn.drafting.serving import Branching, allowed
from outrider.nn.language_model import TokenRows
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["ngram_embedding"] = "ngram_embedding"
    order: int = Field(default=3, ge=2)
    """Longest n-gram: number of tokens that a prediction depends on."""
    splits: PositiveInt = 2
    """Tables per order; n-grams that share a row of one rarely share a row of another."""
    ratio: PositiveInt = 4
    """Rows of a table per token of the vocabulary."""
    dim: PositiveInt = 64
    """Width of a row."""
    boundaries: tuple[NonNegativeInt, ...] | None = None
    """Tokens that n-grams do not cross; by default the target's end tokens."""
    length: PositiveInt = 4
    """Tokens drafted per step; levels of a tree."""
    width: PositiveInt = 1
    """Most children of a node; above 1 the draft is a tree, of the likeliest paths at temperature 0 or of drawn
    siblings."""
    nodes: PositiveInt = 16
    """Nodes of a tree; a chain has `length`."""
    replacement: bool = False
    """Draw the siblings of a tree with replacement; no: without, and more are accepted."""


class NgramDrafter(Drafter):
    """Drafts a chain or a tree.  Its memory is the text."""

    def __init__(self, model: Model):
        self._packed = prepacked.Packed(model)
        self.model, self.order = model, model.config.order
        self.branching = Branching(allowed(model.config, model.target))
        self.limit = self.branching.limit

    def refresh(self) -> None:
        self._packed.refresh()

    @torch.inference_mode()
    def propose(self, memory: None, state: DecodeState, budget: Tensor) -> Draft:
        ends = [state.tokens[row][: -self.order - 1 : -1] for row in state.rows]
        context = to_device([[*end, *[-1] * (self.order - len(end))] for end in ends], state.device)

        def read_one(tokens: Tensor) -> Tensor:
            nonlocal context
            context = torch.cat([tokens[:, None], context[:, :-1]], 1)
            return self._logits(context)

        def expand(tree: Draft, new: int) -> Tensor:
            branch = torch.stack(trees.path(tree, new)[::-1], -1)  # [B, new, depth], newest first
            before = context[:, None].expand(-1, new, -1)
            return self._logits(torch.cat([branch, before], -1)[..., : self.order])

        return self.branching.draft(self._logits(context), read_one, expand, budget, state)

    def _logits(self, context: Tensor) -> Tensor:
        """Logits [..., V] after each context [..., n], newest token first, -1 for none."""
        with prepacked.enabled():
            return self.model.logits(self.model(context))


class Model(DraftModel):
    """The tables, and the matrix of the token's own embedding."""

    taps: tuple[int, ...] = ()
    reads_states = False

    def __init__(self, config: Config, target: Target):
        super().__init__()
        ends = target.ends if config.boundaries is None else config.boundaries
        self.config, self.target = config.model_copy(update={"boundaries": tuple(sorted(ends))}), target
        words, hidden = target.spec.vocabulary, target.spec.hidden
        self.word = nn.Linear(hidden, hidden, bias=False)
        self.ngrams = NgramEmbedding(
            NgramHashes(words, config.order, config.splits, config.ratio * words), hidden, config.dim
        )
        nn.init.zeros_(self.ngrams.ngram_table.weight)
        self.norm = RMSNorm(hidden)

    def forward(self, context: Tensor) -> Tensor:
        """States [..., H] before the target's head, of contexts [..., n]."""
        words = self.word(self.target.embed(context[..., 0]).to(self.dtype))
        states: Tensor = self.norm(self.ngrams(words, stopped(context, self.config.boundaries)))
        return states

    def read(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """States [B, S, H] after every token of texts [B, S]."""
        states: Tensor = self(shifted(tokens, self.config.order, documents))
        return states

    def predict(self, batch: Batch) -> TokenRows:
        return TokenRows(self, batch)

    def drafter(self) -> NgramDrafter:
        return NgramDrafter(self)


def build(config: Config, target: Target) -> Drafter:
    return Model.build(config, target)
