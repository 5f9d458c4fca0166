"""DFlash: draft a whole block in one pass, from the target's own hidden states.  (arXiv 2602.06036.)

States of a few target layers, fused, stand as extra keys and values in every layer of a small transformer.  A block is the
anchor and masks; its tokens see each other both ways and all context before the anchor.  Every slot predicts by itself.

Two layouts, with the same weights.  DSpark's, the default: the anchor's slot predicts the first token, so K inputs give K
drafts.  The paper's (`anchor_predicts: no`): every mask predicts what stands in its own place and the anchor's slot predicts
nothing, so K drafts take K masks.

Differs from the paper: the default layout; training samples anchors anew in every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.export import Dim

from outrider import compiled, packed
from outrider.compiled import Graphs, Replays
from outrider.decoding import sampling
from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Scores, Target
from outrider.decoding.sampling import Purpose, distribution, race, tempered
from outrider.decoding.state import DecodeState
from outrider.errors import DrafterError
from outrider.nn import blocks, heads
from outrider.nn.blocks import ContextLayer, RMSNorm, angles, block_mask
from outrider.nn.draft_model import (
    Batch,
    DraftModel,
    MaskToken,
    copy_layers,
    drawn,
    mask_token,
    picked,
    resolve_taps,
    with_mask,
)
from outrider.nn.shape import LayerConfig, resolved
from outrider.targets import cache
from outrider.targets.cache import Columns, Sight, SlotCache, additive

Pick = Callable[[Tensor, int], Tensor]
"""(logits [B, V], slot) to the drafted token [B]."""


class BackboneConfig(LayerConfig):
    """What every drafter with this backbone can set."""

    block: PositiveInt = 7
    """Tokens drafted per step, one behind the other."""
    anchor_predicts: bool = True
    """The anchor's slot predicts the first token and masks the next ones; else each mask predicts its own place, one more."""
    runners_up: tuple[NonNegativeInt, ...] = ()
    """Next best tokens verified beside slot 0, 1, … of a greedy request's block: leaves, so that the draft is a tree."""
    layers: PositiveInt = 5
    """Decoder layers of the draft model."""
    taps: tuple[int, ...] | None = None
    """Target layers it sees, counted from 0; five spread over the depth unless given."""
    copies: tuple[NonNegativeInt, ...] | None = None
    """Target layers, one a draft layer and counted from 0, whose weights training begins with; random unless given."""
    mask_token: MaskToken = None
    """The target's token whose embedding stands in masked slots, or learnt for a vector of its own.  Unless given, the
    tokenizer's mask token, else the first row of the embedding that is no token, else learnt."""
    anchors: PositiveInt = 512
    """Most blocks trained per text and step."""
    decay: PositiveFloat = 4.0
    """Draft k weighs exp(-k / decay) in training."""


class Config(BackboneConfig):
    kind: Literal["dflash"] = "dflash"
    block: PositiveInt = 16
    """Tokens drafted per step, one behind the other."""
    decay: PositiveFloat = 7.0
    """Draft k weighs exp(-k / decay) in training."""


class Backbone(nn.Module):
    """Context states and a block of anchor and masks in, one state a drafted token out."""

    def __init__(self, config: BackboneConfig, target: Target):
        super().__init__()
        if len(config.runners_up) > config.block or 1 + max(config.runners_up, default=0) > target.spec.vocabulary:
            raise DrafterError(
                f"runners_up {config.runners_up} asks for more than a block of {config.block} slots and a vocabulary of "
                f"{target.spec.vocabulary} have; give at most one number a slot"
            )
        self.config, self.shape = resolved(config, target.spec)
        self.target = target
        self.width = config.block if config.anchor_predicts else config.block + 1
        """Input slots of a block: the anchor and the masks."""
        self.taps = resolve_taps(config.taps, target.spec)
        hidden = target.spec.hidden
        self.fc = nn.Linear(hidden * len(self.taps), hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.layers = nn.ModuleList(ContextLayer(hidden, self.shape) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.mask_token = mask_token(config.mask_token, target)
        if self.mask_token is None:
            self.mask = nn.Parameter(torch.randn(hidden) * 0.02)
        if config.copies is not None:
            copy_layers(self.layers, config.copies, target)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None,
        kept: SlotCache | None = None,
    ) -> Tensor:  # fmt: skip
        """States of drafted blocks, [B, A, K, H].

        taps [B, C, T, H] at positions taps_at [B, C]; anchors [B, A] ids at positions anchors_at [B, A]; mask over C +
        A * width columns, or over all that `kept` holds.
        """
        context = self._context(taps)
        x = self._inputs(anchors).to(context.dtype)
        x_at = (anchors_at[..., None] + torch.arange(self.width, device=anchors.device)).flatten(1)
        k_angles = angles(torch.cat([taps_at.expand(x_at.shape[0], -1), x_at], 1), self.shape)
        q_angles = k_angles[..., taps_at.shape[1] :, :]
        for i, layer in enumerate(self.layers):
            x = layer(x, context, q_angles, k_angles, mask, kept, i)
        return self.norm(x).unflatten(1, (*anchors.shape[1:], self.width))[:, :, self.width - self.config.block :]

    def drafted(self, batch: Batch, at: Tensor, live: Tensor) -> Tensor:
        """The same for blocks under the tokens at places `at` [B, A] of a batch's texts, as `BlockRows` asks for them."""
        places = torch.arange(batch.tokens.shape[1], device=at.device)[None]
        mask = block_mask(at, batch.tokens.shape[1], self.width, batch.documents, live)
        return self(batch.taps, places, batch.tokens.gather(1, at), at, mask)

    def weights(self, at: Tensor) -> Tensor:
        """[K] what a learnt row of each depth weighs."""
        return torch.exp(-torch.arange(self.config.block, device=at.device) / self.config.decay)

    def remember(self, taps: Tensor, taps_at: Tensor, kept: SlotCache) -> None:
        """Take context in without drafting: every layer's keys and values of it go into `kept`'s open pass."""
        context = self._context(taps)
        k_angles = angles(taps_at, self.shape)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, ContextLayer)
            kept.update(*layer.self_attn.keys_values(context, k_angles), i)

    def _context(self, taps: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(taps.flatten(2).to(self.fc.weight.dtype)))

    def _inputs(self, anchors: Tensor) -> Tensor:
        """Embeddings of every block's anchor and masks, [B, A * width, H]."""
        masks = self.width - 1
        if self.mask_token is not None:
            ids = nn.functional.pad(anchors.unsqueeze(-1), (0, masks), value=self.mask_token)
            return self.target.embed(ids.flatten(1))
        words = self.target.embed(anchors).unsqueeze(2)
        return torch.cat([words, self.mask.to(words.dtype).expand(*anchors.shape, masks, -1)], 2).flatten(1, 2)


class BlockModel(Protocol):
    """A draft model on this backbone, as `BlockDrafter` serves it."""

    backbone: Backbone

    def __call__(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, kept: SlotCache,
        pick: Pick | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...  # fmt: skip


class Model(DraftModel):
    """The backbone with the target's head on every slot."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.config, self.target = with_mask(resolved(config, target.spec)[0], target), target
        self.backbone = Backbone(self.config, target)
        self.taps = self.backbone.taps

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, kept: SlotCache,
        pick: Pick | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Draft one block a slot: tokens [B, K], logits [B, K, V], no confidence.  pick None takes the most likely token."""
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, kept)[:, 0]
        logits = self.target.head(states)
        if pick is None:
            return logits.argmax(-1), logits, None
        return torch.stack([pick(logits[:, k], k) for k in range(logits.shape[1])], 1), logits, None

    def predict(self, batch: Batch) -> BlockRows:
        return BlockRows(self.backbone, batch, lambda states, _previous, _rows: self.target.head(states))

    def drafter(self) -> BlockDrafter:
        return BlockDrafter(self)


def build(config: Config, target: Target) -> BlockDrafter:
    return Model(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()


# ── serving ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class BlockMemory:
    """Context keys and values of every slot, and taps that no pass has taken in yet."""

    def __init__(self, slots: int, length: int, device: torch.device, layers: int):
        self.kept = SlotCache(slots, length, device, layers)
        self.pending: list[list[Tensor]] = [[] for _ in range(slots)]


class BlockDrafter:
    """Drafts a block a slot in one pass.  Committed taps wait until the next pass takes them in together with the block."""

    def __init__(self, model: BlockModel):
        assert isinstance(model, nn.Module)
        packed.pack(model)
        self.model = model
        self.backbone = model.backbone
        self.taps, self.hidden = model.backbone.taps, model.backbone.target.spec.hidden
        self.block = model.backbone.config.block
        self.tree = Tree(self.block, model.backbone.config.runners_up)
        self.limit = len(self.tree.slots)
        # a greedy request's tree has runners-up, of which the head says nothing
        self.is_confident = getattr(model, "confidence_head", None) is not None and self.limit == self.block
        self.greedy, self.drawn = self.steps = CompiledBlock(Greedy(model, self.tree)), CompiledBlock(Drawn(model))

    def compile(self, several: bool = False) -> float:
        """Have blocks of one slot, or of several, compiled; returns the seconds it took.  NotCompiled says why not."""
        return sum(step.get(several, build=True) for step in self.steps)

    def allocate(self, cache: Cache) -> BlockMemory:
        # besides the context: the block, and as many columns again where slots bring unequal numbers of new taps
        backbone = self.backbone
        return BlockMemory(cache.slots, cache.length + 2 * backbone.width, backbone.target.device, len(backbone.layers))

    def admit(self, memory: BlockMemory, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        assert scores.taps is not None
        for b, row in enumerate(rows):
            read = state.prefilled[row] - memory.kept.lengths[row] - sum(map(len, memory.pending[row]))
            memory.pending[row].append(scores.taps[b, :read])
        self._settle(memory, rows)

    @torch.inference_mode()
    def propose(self, memory: BlockMemory, state: DecodeState, budget: Tensor) -> Draft:
        rows, kept = state.rows, memory.kept
        self._settle(memory, rows)
        taps, counts = self._take(memory, rows)
        is_greedy = state.settings.is_greedy and not state.bans
        step = self._compiled(state)
        if step is not None and step.fits(kept, rows, max(2, taps.shape[1]) + self.backbone.width):
            taps = nn.functional.pad(taps, (0, 0, 0, 0, 0, max(0, 2 - taps.shape[1])))
            kept.open(rows, taps.shape[1] + self.backbone.width)
            tokens, q, confidence = step.run(taps, state, counts, kept)
        else:
            pick = None if is_greedy else _Picker(state)
            kept.open(rows, taps.shape[1] + self.backbone.width)
            mask = self._mask(kept, taps.shape[1], counts)
            starts = [kept.lengths[row] for row in rows]
            taps_at = torch.tensor([list(range(start, start + taps.shape[1])) for start in starts], device=state.device)
            anchors_at = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)], device=state.device)
            with packed.products():
                tokens, logits, confidence = self.model(taps, taps_at, state.anchor, anchors_at, mask, kept, pick)
            if pick is None:
                tokens = self.tree.nodes(tokens, logits)
            q = torch.stack(pick.q, 1) if pick is not None and pick.q else None
        kept.append(counts)
        if is_greedy and self.limit > self.block:
            return self.tree.draft(tokens, budget)
        return Draft.chain(tokens, budget.clamp(max=self.block), q, confidence)

    def observe(self, memory: BlockMemory, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        assert scores.taps is not None
        for b, row in enumerate(state.rows):
            path, taps = kept.paths[b], scores.taps[b]
            is_straight = path == list(range(len(path)))
            memory.pending[row].append(taps[: len(path) + 1] if is_straight else taps[[0, *(node + 1 for node in path)]])

    def _compiled(self, state: DecodeState) -> CompiledBlock | None:
        """What drafts for these requests in one graph, where it is there."""
        if state.bans:
            return None
        if state.settings.is_greedy:
            return self.greedy
        # asked last: on a GPU, where there is no graph, it would wait for the device
        return self.drawn if self.drawn.graphs and state.settings.is_tempered else None

    def free(self, memory: BlockMemory, rows: Sequence[int]) -> None:
        memory.kept.free(rows)
        for row in rows:
            memory.pending[row] = []

    def _settle(self, memory: BlockMemory, rows: Sequence[int]) -> None:
        """Take in what waits where it is more than a step brings, such as a prompt; each slot by itself, so none is padded."""
        for row in rows:
            if sum(map(len, memory.pending[row])) > self.block + 1:
                self._take_in(memory, row)

    @torch.inference_mode()
    def _take_in(self, memory: BlockMemory, row: int) -> None:
        taps, [count] = self._take(memory, [row])
        start = memory.kept.lengths[row]
        memory.kept.open([row], count)
        self.backbone.remember(taps, torch.arange(start, start + count, device=taps.device)[None], memory.kept)
        memory.kept.append([count])

    def _take(self, memory: BlockMemory, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Waiting taps of these slots, right-padded [B, C, T, H], and how many each brought."""
        waiting = [memory.pending[row] for row in rows]
        for row in rows:
            memory.pending[row] = []
        if len(rows) == 1 and len(waiting[0]) == 1:
            return waiting[0][0][None], [len(waiting[0][0])]
        target, dtype = self.backbone.target, self.backbone.fc.weight.dtype
        empty = torch.empty(0, len(self.taps), target.spec.hidden, device=target.device, dtype=dtype)
        joined = [torch.cat(parts) if parts else empty for parts in waiting]
        return nn.utils.rnn.pad_sequence(joined, batch_first=True), [len(taps) for taps in joined]

    def _mask(self, kept: SlotCache, width: int, counts: list[int]) -> Tensor | None:
        """None where no slot has padding among its new taps and all stand at the same place: then all is visible."""
        if kept.is_even and min(counts) == width:
            return None
        seen = real(width, torch.tensor(counts, device=kept.device), self.backbone.width)
        return kept.mask(seen, self.backbone.fc.weight.dtype)


def real(new: int, counts: Tensor, width: int) -> Tensor:
    """What a block of `width` slots sees of `new` taps, of which counts[b] are real, and itself: [B, width, all] bool."""
    columns = torch.arange(new + width, device=counts.device)
    return ((columns < counts[:, None]) | (columns >= new))[:, None].expand(-1, width, -1)


class CompiledBlock(Graphs):
    """Blocks as one graph: taps in, tokens and confidences out.  New taps are padded to two at least."""

    def __init__(self, traced: Greedy | Drawn):
        super().__init__()
        self.traced, self.name = traced, traced.name
        self.backbone: Backbone = traced.draft.backbone

    def run(
        self, taps: Tensor, state: DecodeState, counts: Sequence[int], kept: SlotCache
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A block a slot behind taps [R, C, T, H], C at least 2, of which counts[b] are real, in the open pass of `kept`.

        Returns nodes [R, N], the laws that they were drawn from [R, N, V] or None, and confidences [R, K].
        """
        given = self._arguments(taps, state.anchor, counts, kept, self.traced.noise(state))
        nodes, laws, *rest = self.graphs[len(taps) > 1].forward(*given)
        return nodes, laws if self.traced.draws else None, rest[0] if rest else None

    def model(self) -> nn.Module:
        return self.traced

    def settings(self) -> Sequence[object]:
        own = sys.modules[type(self.traced.draft).__module__]
        spec = self.backbone.target.spec
        return [
            self.backbone.config.model_dump(),
            spec,
            *compiled.code(compiled, blocks, heads, cache, sampling, sys.modules[__name__], own),
        ]

    def example(self, several: bool) -> tuple[nn.Module, tuple[Any, ...], Any]:
        given = self._arguments(*self._pass(several))
        rows = {0: Dim("rows", min=2, max=1024)} if several else {}
        new, end, length = Dim("new", min=2, max=4096), Dim("end", min=3, max=2**20), Dim("length", min=4, max=2**20)
        buffers = [{**rows, 2: length} for _ in given[-1]]
        return self.traced, given, ({**rows, 1: new}, rows, rows, rows, {0: end}, [rows for _ in given[-2]], buffers)

    @torch.inference_mode()
    def apart(self, graph: Replays, several: bool) -> tuple[float, float]:
        given = self._arguments(*self._pass(several))
        (nodes, laws), (said, plain) = graph.forward(*given)[:2], self.traced(*given)[:2]
        # behind a token that a tie decided otherwise all may differ
        chain = (nodes == said)[:, self.traced.chain]
        alike = nn.functional.pad(chain.long().cumprod(-1), (1, 0), value=1)[:, :-1, None]
        # of float32 at least: norms and angles are computed in it
        rounding = max(torch.finfo(plain.dtype).eps, torch.finfo(torch.float32).eps)
        return float(((laws - plain) * alike).abs().max()), 64 * rounding * float(plain.abs().max())

    def _pass(self, several: bool) -> tuple[Any, ...]:
        """Arguments of a pass behind some context."""
        rows, new, before = (4 if several else 1), 4, 300
        spec, noise = self.backbone.target.spec, torch.Generator().manual_seed(5)
        dtype, width = self.backbone.fc.weight.dtype, new + self.backbone.width
        kept = SlotCache(rows, before + 2 * width)
        taps = torch.randn(rows, before + new, len(self.backbone.taps), spec.hidden, generator=noise).to(dtype)
        kept.open(range(rows), before)
        with torch.inference_mode():
            self.backbone.remember(taps[:, :before], torch.arange(before)[None].expand(rows, -1), kept)
        kept.append([before - row for row in range(rows)])
        counts = [new - row % 2 for row in range(rows)]
        kept.open(range(rows), width)
        anchors = torch.randint(spec.vocabulary, (rows,), generator=noise)
        return taps[:, before:], anchors, counts, kept, self.traced.example(rows)

    def _arguments(
        self, taps: Tensor, anchors: Tensor, counts: Sequence[int], kept: SlotCache, noise: list[Tensor]
    ) -> tuple[Any, ...]:
        """Taps, how many of them are real, anchors; where slots stand, and columns up to the end; noise; buffers."""
        taps = taps.to(self.backbone.fc.weight.dtype).contiguous()
        return taps, torch.tensor(counts), anchors, kept.starts, kept.columns, noise, kept.buffers


class _Traced(nn.Module):
    """What is compiled; the target's embedding and head are part of it."""

    def __init__(self, model: BlockModel):
        super().__init__()
        assert isinstance(model, nn.Module)
        self.draft: Any = model
        whole: Any = getattr(model.backbone.target, "model", None)
        # or their weights were not in its key, and not frozen as the others are
        self.ends = nn.ModuleList([whole.get_input_embeddings(), whole.get_output_embeddings()] if whole is not None else [])

    def block(
        self, taps: Tensor, counts: Tensor, anchors: Tensor, starts: Tensor, columns: Tensor, buffers: list[Tensor],
        pick: Pick | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        new, width = taps.shape[1], self.draft.backbone.width
        sight = Sight(starts, columns, new + width)
        mask = additive(sight.seen(real(new, counts, width)), taps.dtype)
        kept: Any = Columns(range(len(buffers) // 2), buffers, sight)
        found: tuple[Tensor, Tensor, Tensor | None] = self.draft(
            taps, sight.positions(torch.arange(new)), anchors, starts + counts, mask, kept, pick
        )
        return found


class Greedy(_Traced):
    """The likeliest blocks, as trees: nodes, logits and confidences."""

    name, draws = "block", False

    def __init__(self, model: BlockModel, tree: Tree):
        super().__init__(model)
        self.tree, self.chain = tree, tree.chain

    def noise(self, state: DecodeState) -> list[Tensor]:
        return []

    def example(self, rows: int) -> list[Tensor]:
        return []

    def forward(
        self, taps: Tensor, counts: Tensor, anchors: Tensor, starts: Tensor, columns: Tensor, noise: list[Tensor],
        buffers: list[Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        tokens, logits, confidence = self.block(taps, counts, anchors, starts, columns, buffers, None)
        nodes = self.tree.nodes(tokens, logits)
        return (nodes, logits) if confidence is None else (nodes, logits, confidence)


class Drawn(_Traced):
    """Blocks drawn at a temperature: tokens, the laws they were drawn from, and confidences."""

    name, draws = "block-drawn", True
    tokens: Tensor

    def __init__(self, model: BlockModel):
        super().__init__(model)
        self.chain = list(range(model.backbone.config.block))
        self.register_buffer("tokens", torch.arange(model.backbone.target.spec.vocabulary), persistent=False)

    def noise(self, state: DecodeState) -> list[Tensor]:
        """Temperatures [R], and keys of the noise [R, K]: traced, what they are made by takes minutes to compile."""
        assert state.settings.temperature is not None
        return [state.settings.temperature, state.streams.keys(len(self.chain), Purpose.DRAFT)]

    def example(self, rows: int) -> list[Tensor]:
        return [0.5 + 0.25 * torch.arange(rows), torch.arange(rows * len(self.chain)).view(rows, -1) + 7]

    def forward(
        self, taps: Tensor, counts: Tensor, anchors: Tensor, starts: Tensor, columns: Tensor, noise: list[Tensor],
        buffers: list[Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        (heat, keys), laws = noise, []

        def pick(logits: Tensor, slot: int) -> Tensor:
            logits = logits if logits.dtype == torch.float64 else logits.float()
            laws.append(tempered(logits, heat))
            return race(laws[-1], keys[:, slot], self.tokens)

        tokens, _, confidence = self.block(taps, counts, anchors, starts, columns, buffers, pick)
        q = torch.stack(laws, 1)
        return (tokens, q) if confidence is None else (tokens, q, confidence)


class Tree:
    """A block's chain with runners-up beside its first slots, in an order of which every prefix is a draft.

    The runner-up of rank r beside slot k stands where the chain's slot k + 2 r does: about as likely, by experience.
    """

    def __init__(self, block: int, runners_up: Sequence[int]):
        nodes = [(k, 0) for k in range(block)]
        nodes += [(k, rank + 1) for k, count in enumerate(runners_up) for rank in range(count)]
        nodes.sort(key=lambda node: (node[0] + 2 * node[1], node[1]))
        at = {slot: n for n, (slot, rank) in enumerate(nodes) if not rank}
        self.slots, self.ranks = torch.tensor(nodes).unbind(-1)
        self.parents = torch.tensor([at[slot - 1] if slot else -1 for slot, _ in nodes])
        self.chain = [at[slot] for slot in range(block)]
        self.width = 1 + max(rank for _, rank in nodes)

    def nodes(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """[B, N] from a block's tokens [B, K] and logits [B, K, V]: the chain and, beside its slots, the next best."""
        if self.width == 1:
            return tokens
        return logits.topk(self.width, -1).indices[:, self.slots, self.ranks]

    def draft(self, tokens: Tensor, budget: Tensor) -> Draft:
        """The draft of these nodes, [B, N]."""
        return Draft(tokens, self.parents.to(tokens.device).expand(len(tokens), -1), budget.clamp(max=len(self.slots)))


class _Picker:
    """Draws slot by slot, of what may stand there, from the distribution the request asks for, and remembers it as q."""

    def __init__(self, state: DecodeState):
        self.state, self.streams = state, state.streams
        self.q: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def __call__(self, logits: Tensor, slot: int) -> Tensor:
        logits = self.state.masked(logits, self.tokens)
        if self.state.settings.is_greedy:
            self.tokens.append(logits.argmax(-1))
        else:
            self.q.append(distribution(logits, self.state.settings))
            self.tokens.append(self.streams.draw(self.q[-1], slot, Purpose.DRAFT))
        return self.tokens[-1]


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Blocks(Protocol):
    """What drafts whole blocks in training: `Backbone`, or a model with layers of its own."""

    config: Any
    """`block` and `anchors` are among its fields."""
    target: Target

    def drafted(self, batch: Batch, at: Tensor, live: Tensor) -> Tensor:
        """States [B, A, K, H] of blocks under the tokens at places `at` [B, A]; one that is not live [B, A] teaches nothing."""

    def weights(self, at: Tensor) -> Tensor:
        """What a learnt row weighs, [K] or [B, A, K]."""


class BlockRows:
    """Predictions of blocks drawn under random anchors of a batch: K rows a block, row k labelled with token a + 1 + k.

    Heads run chunk by chunk on a detached copy of the states; `backward` sends its gradient through the rest at once.
    head: (states [m, H], the token before each [m], which rows) to logits [m, V].
    """

    def __init__(self, blocks: Blocks, batch: Batch, head: Callable[[Tensor, Tensor, slice], Tensor]):
        config = blocks.config
        self.target, self.slots, self._head = blocks.target, config.block, head
        self.vocabulary = blocks.target.spec.vocabulary
        at, live = draw_anchors(batch, config.anchors)
        self._states = blocks.drafted(batch, at, live)
        wanted = at[..., None] + torch.arange(config.block, device=at.device)
        inside = (wanted + 1 < batch.tokens.shape[1]) & live[..., None]
        labels_at = (wanted + 1).clamp(max=batch.tokens.shape[1] - 1)
        learnt = (
            picked(batch.loss_mask, labels_at)
            & inside
            & (picked(batch.documents, labels_at) == batch.documents.gather(1, at)[..., None])
        )
        self.labels = picked(batch.tokens, labels_at).flatten()
        self.previous = picked(batch.tokens, wanted.clamp(max=batch.tokens.shape[1] - 1)).flatten()
        self.weight = (learnt.cumprod(-1) * blocks.weights(at)).flatten()
        self.depth = torch.arange(config.block, device=at.device).repeat(at.numel())
        self.block = torch.arange(at.numel(), device=at.device).repeat_interleave(config.block)
        self._rows_of_hidden = (wanted.clamp(max=batch.tokens.shape[1] - 1) + _row_offsets(batch.tokens)[..., None]).flatten()
        self._hidden = batch.hidden.flatten(0, 1)
        self.states = self._states.flatten(0, 2).detach().requires_grad_()

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        width = max(1, rows // self.slots) * self.slots
        for start in range(0, len(self.labels), width):
            part = slice(start, min(start + width, len(self.labels)))
            with torch.no_grad():
                target = self.target.head(self._hidden[self._rows_of_hidden[part]])
            yield self._head(self.states[part], self.previous[part], part), target, part

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {}

    def backward(self) -> None:
        if self.states.grad is not None:
            self._states.flatten(0, 2).backward(self.states.grad)


def draw_anchors(batch: Batch, most: int) -> tuple[Tensor, Tensor]:
    """Up to `most` positions a text whose next token is one to learn, drawn without replacement: [B, A] and which are live."""
    follows = batch.loss_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
    return drawn(follows, most)


def _row_offsets(tokens: Tensor) -> Tensor:
    return (torch.arange(len(tokens), device=tokens.device) * tokens.shape[1])[:, None]
