"""Local head: a small model of text alone corrects any block drafter left to right.  (DeLS-Spec, arXiv 2607.09407.)

A GRU reads the target's embeddings of the anchor and of the tokens drafted since, and scores the next one.  It is
trained on text, without a pass of the target (`prepare.features: text`), so it takes minutes, and one head serves every
block drafter of that target.  With `base` and `head` set, each row of the base's block is drafted from

    logits of the base + local * logits of the head - prior * log of the token's share of all text

over the row's likeliest `candidates`; all others have no probability.  Without them, the head drafts alone.

Differs from the paper: a row's candidates alone are scored, so a step has no second product over the vocabulary; the
head reads what the block has, not the text before it; drawn drafts and blocks that are already corrected, as dspark's.

Use it if a block drafter is there and can't be trained again.

B live slots, K rows of a block, k candidates, g size of the GRU's state, r rank, H hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor, nn

from outrider.config import Config as Base
from outrider.decoding.draft import Draft, padded
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.drafters import Choice, Load, built
from outrider.errors import ConfigError
from outrider.kernels import prepacked
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.draft_vocabulary import DraftVocabulary
from outrider.nn.drafting import lattice, serving
from outrider.nn.drafting.block_drafter import BlockDrafter
from outrider.nn.drafting.block_model import BlockModel, Decoded, Pick
from outrider.nn.heads import PrefixGRU
from outrider.nn.language_model import TokenRows
from outrider.targets.cache.attention_mask import positions
from outrider.targets.cache.slots import SlotCache
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["local_head"] = "local_head"
    base: Choice | None = None
    """The block drafter that a trained head corrects: the folder of a checkpoint; the head then drafts nothing
    itself."""
    head: str | None = None
    """Folder of the trained head."""
    local: NonNegativeFloat = 0.3
    """Weight of the head's logits."""
    prior: NonNegativeFloat = 0.3
    """Weight of the logarithm of a token's share of the text that the head was trained on."""
    candidates: PositiveInt = 32
    """Candidates per row of the base's block, its likeliest tokens."""
    gru: PositiveInt = 512
    """Size of the GRU's state."""
    rank: PositiveInt = 128
    """Rank of the output layer."""
    context: PositiveInt = 8
    """Most tokens that the GRU reads before a prediction in training, and when the head drafts alone."""
    length: PositiveInt = 4
    """Tokens drafted per step when the head drafts alone."""

    @model_validator(mode="after")
    def _has_both(self) -> Config:
        if (self.base is None) != (self.head is None):
            raise ValueError("base and head belong together: set both to draft, neither to train a head")
        return self


class Model(DraftModel):
    """The head: GRU and low-rank output layer."""

    taps: tuple[int, ...] = ()
    reads_states = False
    log_share: Tensor
    """[V], natural logarithm of each token's share of the training text; evenly spread until training begins."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        if config.base is not None:
            raise ConfigError("a head is trained on text alone; leave out base and head, and set them to draft with it")
        self.config, self.target = config, target
        self.gru = PrefixGRU(target.spec.hidden, config.gru)
        self.down = nn.Linear(config.gru, config.rank, bias=False)
        self.out = nn.Linear(config.rank, target.spec.vocabulary, bias=False)
        self.register_buffer("log_share", torch.zeros(target.spec.vocabulary))

    @torch.no_grad()
    def begin(self, counts: Tensor) -> None:
        share = counts.float() + 1
        self.log_share.copy_((share / share.sum()).log())

    def words(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., H] of tokens [...]."""
        return self.target.embed(tokens).to(self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        return self.out(states)

    def read(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """States [B, S, r] after every token of texts [B, S]; each block of `context` tokens is read by itself."""
        size = self.config.context
        text, first = ((positions(documents) % size == 0) & (documents > 0)).nonzero(as_tuple=True)
        at = first[:, None] + torch.arange(size, device=tokens.device)
        inside = at.clamp(max=tokens.shape[1] - 1)
        belongs = (at == inside) & (documents[text[:, None], inside] == documents[text, first][:, None])
        read = self.down(self.gru.along(self.words(tokens[text[:, None], inside])))
        states = read.new_zeros(*tokens.shape, self.config.rank)
        return states.index_put((text[:, None].expand_as(at)[belongs], at[belongs]), read[belongs])

    def predict(self, batch: Batch) -> TokenRows:
        return TokenRows(self, batch)

    def scores(self, read: Tensor, ids: Tensor, local: float, prior: float) -> Tensor:
        """[B, k]: what the head adds to logits of tokens `ids` [B, k] after the state [B, g] of its GRU."""
        logits = (self.out.weight[ids] @ self.down(read)[..., None])[..., 0]
        return local * logits - prior * self.log_share[ids]

    def drafter(self) -> LocalDrafter:
        return LocalDrafter(self)


class LocalDrafter(Drafter):
    """The head alone; its memory is the text."""

    def __init__(self, model: Model):
        self._packed = prepacked.Packed(model)
        self.model, self.limit = model, model.config.length

    def refresh(self) -> None:
        self._packed.refresh()

    @torch.inference_mode()
    def propose(self, memory: None, state: DecodeState, budget: Tensor) -> Draft:
        model, size = self.model, self.model.config.context
        texts = [state.tokens[row] for row in state.rows]
        ends = [text[(len(text) - 1) // size * size :] for text in texts]  # blocks as in training
        read = model.gru.along(model.words(padded(ends, 0, state.device)))
        read = torch.stack([read[b, len(end) - 1] for b, end in enumerate(ends)])

        def read_one(tokens: Tensor) -> Tensor:
            nonlocal read
            read = model.gru(model.words(tokens), read)
            return self._logits(read)

        return serving.chain(self._logits(read), read_one, budget, state)

    def _logits(self, read: Tensor) -> Tensor:
        with prepacked.enabled():
            return self.model.logits(self.model.down(read))


class Fused(BlockModel):
    """A block model whose rows are corrected by a head."""

    def __init__(self, base: BlockModel, head: Model, config: Config):
        nn.Module.__init__(self)
        self.base, self.head, self.fusion = base, head, config
        self.backbone, self.config, self.target, self.taps = base.backbone, base.config, base.target, base.taps
        self.has_confidence = base.has_confidence

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:  # type: ignore[override]
        return self.base.draft_vocabulary

    @property
    def sources(self) -> tuple[ModuleType, ...]:
        return (*self.base.sources, sys.modules[__name__], lattice)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, cache: SlotCache,
        pick: Pick | None,
    ) -> Decoded:  # fmt: skip
        head, fusion, corrected = self.head, self.fusion, list[Tensor]()
        words = head.words(anchors)
        read = head.gru(words, head.gru.start(words))

        def corrected_pick(logits: Tensor, row: int) -> Tensor:
            nonlocal read
            best = logits.topk(min(fusion.candidates, logits.shape[-1]), -1)
            added = head.scores(read, self.named(best.indices), fusion.local, fusion.prior)
            corrected.append(lattice.spread(best.values + added, best.indices, logits.shape[-1]))
            token = self.picked(corrected[-1], row, pick)
            read = head.gru(head.words(token), read)
            return token

        tokens, _, confidence = self.base(taps, taps_at, anchors, anchors_at, mask, cache, corrected_pick)
        return tokens, torch.stack(corrected, 1), confidence

    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None) -> Decoded:
        return self.base.decode(states, anchors, pick)


def build(config: Config, target: Target, load: Load | None = None) -> Drafter:
    if config.base is None or config.head is None:
        return Model.build(config, target)
    base: Any = built(config.base, target, load)
    head: Any = built(config.head, target, load)
    if not isinstance(getattr(base, "model", None), BlockModel):
        raise ConfigError(f"base {config.base!r} is no block drafter; give one, such as a dflash, dflash2 or dspark")
    if not isinstance(getattr(head, "model", None), Model):
        raise ConfigError(f"head {config.head!r} is no trained local_head; train one with prepare.features: text")
    return BlockDrafter(Fused(base.model, head.model, config))
