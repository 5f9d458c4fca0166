"""Pipeline: guesses one token from the states of tokens that are still passing through the target's stages.
(Speculative Pipeline Decoding, arXiv 2605.30852.)

The target is split into `stages` ranges of layers.  Of a token that has passed d of them, only the taps of those are
available; each number of taps has a linear layer that fuses them.  One decoder layer reads pairs of a token and the
feature of the token before it, and predicts the next token.  Training has the same inputs as serving: before a sampled
position, the last `fill` - 1 tokens have passed as many stages as they are places back, earlier ones have passed all.
`fill` is sampled from 1 to `stages`, since after a wrong guess the pipeline fills up again.

In the ordinary loop a step begins with one token in flight, the anchor, and drafts one token.  `lab.pipeline` has its
own loop, in which stages and drafter run side by side.

Differs from the paper: rows are pairs as in EAGLE, not a token's own states; there is one layer, so a row's keys depend
only on the row; the head is the target's; there are no trees.

Use it if the target's layers are on several devices and one text is generated at a time.

B slots or texts, S tokens, A drawn positions, P = S - 1 pairs, K kinds of feature, T taps, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache
from outrider.decoding.state import DecodeState
from outrider.errors import DrafterError
from outrider.kernels import prepacked
from outrider.lab.pipeline import PipelineDrafter
from outrider.lab.stages import ranges
from outrider.nn.blocks import Attend, PairLayer, RMSNorm, attending, attention, rotary
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.drafting.serving import Sampler
from outrider.nn.memory import FeatureMemory, PairDrafter
from outrider.nn.rows import DetachedRows, RowLabels, sample_anchors
from outrider.nn.shape import LayerConfig, resolve_taps, resolved
from outrider.targets.protocol import Target


class Config(LayerConfig):
    kind: Literal["pipeline"] = "pipeline"
    stages: PositiveInt = 4
    """Ranges of layers that the target is split into."""
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; by default the last layers of stages 1, 3 and 6, and the target's
    second to last layer."""
    anchors: PositiveInt | None = None
    """Most positions trained per text and step; by default all."""


class Model(DraftModel):
    """A linear layer for each number of available taps, one layer of pairs and a norm; the head is the target's."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        ends = _ends(target.spec.layers, config.stages)
        self.config, self.shape = resolved(config, target.spec)
        self.target = target
        self.taps = resolve_taps(_taps(ends) if config.taps is None else config.taps, target.spec)
        if self.taps[0] >= ends[0]:
            raise DrafterError(
                f"pipeline.taps {self.taps} begin after the first of {config.stages} stages, which has layers 0 to "
                f"{ends[0] - 1}; add one of these"
            )
        self.known = [sum(tap < end for tap in self.taps) for end in ends]
        """Taps that are available of a token that has passed 1, 2, ... stages."""
        self.kinds = sorted(set(self.known))
        hidden = target.spec.hidden
        self.fc = nn.ModuleDict({str(count): nn.Linear(count * hidden, hidden, bias=False) for count in self.kinds})
        self.layer = PairLayer(hidden, self.shape, norm_before_residual=False, qk_norm=False)
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)

    def features(self, taps: Tensor) -> Tensor:
        """Features [B, n, H] of the available taps, [B, n, T or fewer, H]."""
        return self.fc[str(taps.shape[2])](taps.flatten(2).to(self.dtype))

    def step(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States [B, n, H] of pairs: tokens [B, n] and the features [B, n, H] of the tokens before them."""
        words = self.target.embed(tokens).to(features.dtype)
        return self.layer(words, features, rotary(positions, self.shape), attend)

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(self.norm(states))

    def drafted(self, batch: Batch, at: Tensor, fill: Tensor) -> Tensor:
        """States [B, A, H] of the pairs at positions `at` [B, A], with `fill` [B, A] tokens in flight."""
        tokens, taps = batch.tokens[:, 1:], self.target_states(batch)[:, :-1]
        features = torch.stack([self.features(taps[:, :, :count]) for count in self.kinds], 1)
        order, count = torch.arange(tokens.shape[1], device=at.device), len(self.kinds)
        every = batch.positions[:, : len(order)].repeat(1, count)
        words = self.target.embed(tokens).to(features.dtype).repeat(1, count, 1)
        rows = [self.layer.input_layernorm(words), self.layer.hidden_norm(features.flatten(1, 2))]
        keys = self.layer.self_attn.keys_values(torch.cat(rows, -1), rotary(every, self.shape))
        kind = self.kind(torch.zeros_like(at), fill)
        pair_features = features[torch.arange(len(at), device=at.device)[:, None], kind, at]
        mask = self.mask(batch.documents, at, fill).flatten(2)[:, None]
        positions = batch.positions.gather(1, at)
        return self.step(tokens.gather(1, at), pair_features, positions, lambda q, *_: attention(q, *keys, mask))

    def kind(self, back: Tensor, fill: Tensor) -> Tensor:
        """Index of the kind of feature of the pair `back` places back if `fill` tokens are in flight."""
        stages = back + 1  # the feature is of the token before the pair's own
        of = torch.tensor([self.kinds.index(count) for count in (self.known[0], *self.known)], device=back.device)
        return torch.where(stages >= fill, len(self.kinds) - 1, of[stages.clamp(0, self.config.stages)])

    def mask(self, documents: Tensor, at: Tensor, fill: Tensor) -> Tensor:
        """Mask [B, A, K, P] bool of the pairs at `at` [B, A]: they attend to themselves and earlier pairs of their
        text, each with its available kind of feature."""
        back = at[..., None] - torch.arange(documents.shape[1] - 1, device=at.device)
        is_before = (back >= 0) & (documents.gather(1, at)[..., None] == documents[:, None, :-1])
        kinds = torch.arange(len(self.kinds), device=at.device)[:, None]
        return is_before[:, :, None] & (self.kind(back, fill[..., None])[:, :, None] == kinds)

    def predict(self, batch: Batch) -> Rows:
        return Rows(self, batch)

    def drafter(self) -> Pipeline:
        return Pipeline(self)


build = Model.build


def _ends(layers: int, stages: int) -> list[int]:
    return [layers_of_stage.stop for layers_of_stage in ranges(layers, stages)]


def _taps(ends: Sequence[int]) -> tuple[int, ...]:
    """The paper's choice, by the ends of the stages."""
    some = {ends[0] - 1, *(ends[i] - 1 for i in (2, 5) if i < len(ends)), max(ends[-1] - 2, 0)}
    return tuple(sorted(some))


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Pipeline(PairDrafter, PipelineDrafter):
    """Reads the pairs of committed tokens once, and those of tokens in flight in every guess, with more taps each
    time."""

    def __init__(self, model: Model):
        super().__init__(model, 1, 2)
        self.stages: int = model.config.stages

    def allocate(self, cache: Cache) -> FeatureMemory:
        # the text's pairs, those in flight, and columns since slots have unequal numbers of pairs
        return FeatureMemory(cache.slots, cache.length + self.stages + self.most + 1, 1, self.model)

    def draft(self, memory: FeatureMemory, state: DecodeState, sizes: Tensor) -> Draft:
        states, tokens, counts = memory.features.take_with_tokens(state.rows, state)
        outputs = self._read(memory, state.rows, tokens, self.model.features(states), counts)
        last = outputs[range(len(counts)), [max(count - 1, 0) for count in counts]]
        sampler = Sampler(state)
        sampler.next(self.model.logits(last))
        return sampler.draft(sizes.clamp(max=1) * (torch.tensor(counts) > 0))

    @torch.inference_mode()
    def guess(
        self, memory: Any, state: DecodeState, tokens: Sequence[int], flight_taps: Sequence[Tensor]
    ) -> Tensor | None:
        states, before, [count] = memory.features.take_with_tokens([0], state)
        if not count + len(tokens):
            return None
        features = torch.cat([self.model.features(part) for part in (states, *flight_taps) if part.shape[1]], 1)
        ids = torch.cat([before, torch.tensor([list(tokens)], dtype=torch.int64, device=state.device)], 1)
        with prepacked.enabled():
            outputs = self._read(memory, [0], ids, features, [count])
            return self.model.logits(outputs[:, -1])

    def read(self, memory: FeatureMemory, row: int, state: DecodeState) -> None:
        states, tokens, counts = memory.features.take_with_tokens([row], state, leave=1)
        self._read(memory, [row], tokens, self.model.features(states), counts)

    def _read(
        self, memory: FeatureMemory, rows: Sequence[int], tokens: Tensor, features: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """States [B, n, H] of pairs that follow what the slots have read, of which the first counts[b] stay."""
        cache = memory.kv_cache
        cache.open(rows, tokens.shape[1])
        mask = cache.mask(None, self.model.dtype)
        outputs: Tensor = self.model.step(tokens, features, cache.positions(), attending(mask, cache))
        cache.append(counts)
        return outputs


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rows(DetachedRows):
    """Predictions from sampled positions; the row of position i has label token i + 2, and its depth is the number of
    tokens in flight before the newest."""

    def __init__(self, model: Model, batch: Batch):
        anchors = sample_anchors(batch, model.config.anchors or batch.tokens.shape[1], 2, 1)
        # on the CPU, whose random state a checkpoint stores
        fill = batch.random(functools.partial(torch.randint, 1, model.config.stages + 1), *anchors.at.shape[1:])
        fill = fill.to(anchors.at.device)
        # no more in flight than tokens of the text
        fill = torch.minimum(fill, batch.positions.gather(1, anchors.at) + 2)
        states = model.drafted(batch, anchors.at, fill).flatten(0, 1)
        row = torch.arange(len(states), device=states.device)
        text, weight = row // anchors.at.shape[1], anchors.loss_mask.flatten().to(states.dtype)
        rows = RowLabels.of(batch, text, anchors.labels_at.flatten(), weight, (fill - 1).flatten(), row)
        super().__init__(model, states, batch.final, rows)
