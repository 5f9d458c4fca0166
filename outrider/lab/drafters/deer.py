"""DEER: one denoising step of a small masked-diffusion model drafts a whole block, from the text alone.  (arXiv
2512.15176.)

A small transformer reads the committed tokens, whose keys and values it caches, and then K masks that attend to each
other in both directions.  Mask i predicts the i-th next token from the committed text alone.  Positions are
independent, so one pass gives the draft, and q is the softmax of each mask's own row.  It reads no state of the target,
and borrows the target's embedding and head.

Training has two stages, both on texts cut after random tokens.  I: all K masks after a cut are trained with equal
weight.  II, from `refine` on: in a suffix of random length R up to K, the token at distance i from the cut weighs
alpha^(R - i), so that tokens next to the committed text matter most.

With `init_from_layers` the target itself is adapted: these layers, which have norms of queries and keys only if the
target's do, and its final norm.  Copied in order from the first, they begin with the target's states of the text.

Differs from the paper: the paper trains a pretrained diffusion language model further; here training starts from the
autoregressive target, or from scratch.  The text is read causally, so its keys stay valid.  The masks themselves mark
the cut, without a separator.  In stage II a block still has all its masks, as in serving; R
decides which of them are trained.

Use it if no state of the target can be read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from outrider.decoding.draft import Draft, padded
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.fast.block import real
from outrider.kernels import prepacked
from outrider.nn.blocks import ContextLayer, RMSNorm, attending, block_mask, rotary
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.drafting import serving
from outrider.nn.drafting.block_rows import BlockRows
from outrider.nn.masks import MaskedModule, MaskToken, with_mask
from outrider.nn.shape import InitLayers, LayerConfig, copy_layers, resolved
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import Target


class Config(LayerConfig):
    REMOVED: ClassVar[Mapping[str, str]] = {
        "pretrained": "train a model with `outrider run recipes/lab/demo-deer.yaml` instead"
    }
    kind: Literal["deer"] = "deer"
    block: PositiveInt = 32
    """Tokens drafted per step, one after the other."""
    layers: PositiveInt = 5
    """Decoder layers of the draft model."""
    init_from_layers: InitLayers = None
    anchors: PositiveInt = 512
    """Most blocks trained per text and step."""
    mask_token: MaskToken = None
    refine: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the training, 0 to 1, after which stage II starts."""
    alpha: PositiveFloat = 1.02
    """In stage II a token weighs this many times as much as the token after it."""


class Model(DraftModel, MaskedModule):
    """Layers of its own over text and masks, between the target's embedding and its head."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config, self.shape = resolved(with_mask(config, target), target.spec)
        self.target, self.taps = target, ()
        hidden = target.spec.hidden
        copied = config.init_from_layers
        # a norm that the target's layers lack would change what they compute
        qk_norm = copied is None or "self_attn.q_norm.weight" in target.layer(0).state_dict()
        self.layers = nn.ModuleList(ContextLayer(hidden, self.shape, qk_norm) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.choose_mask()
        if copied is not None:
            copy_layers(self.layers, copied, target)
            if isinstance(target, TransformersTarget):
                ones = torch.ones(hidden, device=target.device)
                self.norm.weight.data.copy_(target.finish(ones))  # of root mean square 1, so this is the norm's weight

    def forward(
        self, tokens: Tensor, positions: Tensor, blocks: int, mask: Tensor, cache: SlotCache | None = None
    ) -> Tensor:
        """States [B, blocks, K, H] of masks after tokens [B, C].

        positions [B or 1, C + blocks * K], of tokens and then of masks; mask has as many columns, or all of `cache`.
        """
        x = self.words(tokens, blocks * self.config.block, self.norm.weight.dtype)
        cos_sin, attend = rotary(positions.expand(len(x), -1), self.shape), attending(mask, cache)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos_sin, attend, i)
        return self.norm(x[:, tokens.shape[1] :]).unflatten(1, (blocks, self.config.block))

    def predict(self, batch: Batch) -> BlockRows:
        return BlockRows(self, self, batch)

    def prefix_lengths(self, batch: Batch, blocks: int) -> None:
        """No first token of a block is given in training."""

    def drafted(self, batch: Batch, at: Tensor, live: Tensor, prefix_lengths: Tensor | None = None) -> Tensor:
        """States [B, A, K, H] of blocks after the tokens at positions `at` [B, A], which they attend to."""
        length, block = batch.tokens.shape[1], self.config.block
        line = torch.arange(length, device=at.device)
        masks_at = batch.positions.gather(1, at)[..., None] + 1 + torch.arange(block, device=at.device)
        positions = torch.cat([batch.positions, masks_at.flatten(1)], 1)
        is_same_text = batch.documents[:, None, :, None] == batch.documents[:, None, None]
        text = nn.functional.pad((line <= line[:, None]) & is_same_text, (0, at.shape[1] * block))
        # a mask block begins one position after its anchor and attends to all before
        mask = torch.cat([text, block_mask(at + 1, length, block, batch.documents, live)], 2)
        return self(batch.tokens, positions, at.shape[1], mask)

    def weights(self, batch: Batch, at: Tensor) -> Tensor:
        """What a learnt row weighs in this stage, [K] or [B, A, K]."""
        if self.progress < self.config.refine:
            return torch.ones(self.config.block, device=at.device)
        # on the CPU, whose random state a checkpoint stores
        lengths = batch.random(functools.partial(torch.randint, 1, self.config.block + 1), *at.shape[1:])
        return suffix_weights(lengths, self.config.block, self.config.alpha).to(at.device)

    def drafter(self) -> MaskDrafter:
        return MaskDrafter(self)


def suffix_weights(lengths: Tensor, block: int, alpha: float) -> Tensor:
    """[..., K] alpha^(R - i) for the token at distance i = 1 ... R from the cut, 0 after that.  lengths [...], the
    R."""
    left = lengths[..., None] - 1 - torch.arange(block)
    return torch.where(left >= 0, alpha ** left.float(), 0.0)


build = Model.build


class MaskDrafter(Drafter):
    """Drafts a block in one pass over the new tokens and a block of masks.  Its memory is the text's keys and
    values."""

    def __init__(self, model: Model):
        self._packed = prepacked.Packed(model)
        self.model = model
        self.limit = model.config.block

    def refresh(self) -> None:
        self._packed.refresh()

    def allocate(self, cache: Cache) -> SlotCache:
        # the text, the masks, and as many columns again, since slots have unequal numbers of new tokens
        length = cache.length + 2 * (self.limit + 1)
        return SlotCache(cache.slots, length, self.model.target.device, len(self.model.layers))

    def admit(
        self, memory: SlotCache, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        for row in rows:
            self._pass(memory, [row], [state.tokens[row][: state.prefilled[row]]])

    @torch.inference_mode()
    def propose(self, memory: SlotCache, state: DecodeState, budget: Tensor) -> Draft:
        texts = [state.tokens[row] for row in state.rows]
        for row, text in zip(state.rows, texts, strict=True):
            if len(text) - memory.lengths[row] > self.limit + 1:  # more than one step brings would pad all other slots
                self._pass(memory, [row], [text[:-1]])
        states = self._pass(memory, state.rows, texts)
        logits = self.model.target.head(states[:, : int(budget.max())])
        return serving.side_by_side(logits, budget, state)

    def free(self, memory: SlotCache, rows: Sequence[int]) -> None:
        memory.free(rows)

    @torch.inference_mode()
    def _pass(self, memory: SlotCache, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """States [R, K, H] of a block of masks after each text, whose new tokens are read too."""
        device, block = self.model.target.device, self.limit
        pieces = [text[memory.lengths[row] :] for row, text in zip(rows, texts, strict=True)]
        tokens, counts = padded(pieces, 0, device), torch.tensor([len(piece) for piece in pieces], device=device)
        new, masks = tokens.shape[1], counts[:, None] + torch.arange(block, device=device)
        memory.open(rows, new + block)
        depths = torch.cat([torch.arange(new, device=device).expand(len(rows), -1), masks], 1)
        mask = memory.mask(pass_mask(counts, new, block), self.model.norm.weight.dtype)
        with prepacked.enabled():
            states = self.model(tokens, memory.positions(depths), 1, mask, memory)[:, 0]
        memory.append([len(piece) for piece in pieces])
        return states


def pass_mask(counts: Tensor, new: int, block: int) -> Tensor:
    """Attention mask [B, new + K, new + K] bool of `new` tokens, of which counts[b] are real, and K masks.

    Tokens attend to those before them; masks attend to the real tokens and to one another.
    """
    order = torch.arange(new + block, device=counts.device)
    tokens = (order <= order[:new, None]).expand(len(counts), -1, -1)
    return torch.cat([tokens, real(new, counts, block)], 1)
