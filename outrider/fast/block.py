"""A block drafter's pass as one graph, from taps to tokens and confidences, for greedy and sampled requests.

R rows of a pass, C new taps, T taps, K slots of a block, N nodes, V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from outrider import fast
from outrider.decoding import noise
from outrider.decoding.noise import Purpose, Streams, race
from outrider.decoding.state import DecodeState
from outrider.fast import Compiled, Runnable
from outrider.fast.packages import build
from outrider.kernels import prepacked
from outrider.sampling import distribution
from outrider.sampling.distribution import tempered, wide
from outrider.storage.sources import code
from outrider.targets.accuracy import Loss, Tolerance, compared_with, converted, texts
from outrider.targets.cache import attention_mask
from outrider.targets.cache.attention_mask import PassLayout, TracedCache, additive
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import members_of


def noise_keys(streams: Streams, depths: int) -> Tensor:
    """Keys [B, depths] int64 with which `race` samples the same tokens as `Streams.draw` at depths 0 to `depths` -
    1."""
    seeded = None if streams.seeded is None else streams.seeded[:, None]
    wide = Streams(streams.seeds[:, None], streams.index[:, None], seeded)
    return wide.key(torch.arange(depths, device=streams.seeds.device), Purpose.DRAFT)


def real(new: int, counts: Tensor, width: int) -> Tensor:
    """Mask [B, width, all] bool of a block of `width` slots over itself and `new` taps, of which counts[b] are real."""
    columns = torch.arange(new + width, device=counts.device)
    return ((columns < counts[:, None]) | (columns >= new))[:, None].expand(-1, width, -1)


def seen(layout: PassLayout, new: int, counts: Tensor, width: int, window: int | None) -> Tensor:
    """The columns that a block's slots attend to, [R, width, end] bool: those before the pass, and `real` ones of it.

    window: number of positions back from each slot, including its own, at least `width`; None for all.  A block's own
    columns are never before their positions, so the window does not exclude them.
    """
    mask = layout.mask(real(new, counts, width))
    if window is None:
        return mask
    slots = (layout.starts + counts)[:, None] + torch.arange(width, device=counts.device)
    return mask & (layout.columns > slots[..., None] - window)


class CompiledBlock(Compiled):
    """Blocks as one graph: taps in, tokens and confidences out.  New taps are padded to at least one."""

    def __init__(self, traced: Greedy | Drawn, code: Sequence[ModuleType]):
        """code: other modules that contain code of the model."""
        super().__init__()
        self.traced, self.name, self.code = traced, traced.name, code
        self.backbone: Any = traced.draft.backbone

    def run(
        self, taps: Tensor, state: DecodeState, counts: Sequence[int], cache: SlotCache
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One block per slot after taps [R, C, T, H], of which counts[b] are real, in a pass of `cache` that is left
        open.

        Returns nodes [R, N], the distributions that they were sampled from [R, N, V] or None, and confidences [R, K].
        """
        rows, noise, anchors = state.rows, self.traced.noise(state), state.anchor
        if not taps.shape[1]:
            taps = nn.functional.pad(taps, (0, 0, 0, 0, 0, 1))
        cache.open(rows, taps.shape[1] + self.backbone.width)
        nodes, distributions, *rest = self.graph.forward(*self._arguments(taps, anchors, counts, cache, noise))
        return nodes, distributions if self.traced.draws else None, rest[0] if rest else None

    def model(self) -> nn.Module:
        return self.traced

    def settings(self) -> Sequence[object]:
        ours = code(fast, build, attention_mask, distribution, noise, sys.modules[__name__], *self.code)
        return [self.backbone.config.model_dump(), self.backbone.target.spec, *ours]

    def example(self) -> tuple[nn.Module, tuple[Any, ...], Any]:
        arguments = self._arguments(*self._pass(3, 4))
        rows = {0: Dim("rows", min=2, max=1024)}
        new, end, length = Dim("new", min=2, max=4096), Dim("end", min=3, max=2**20), Dim("length", min=4, max=2**20)
        buffers = [{**rows, 2: length} for _ in arguments[-1]]
        dims = {**rows, 1: new}, rows, rows, rows, {0: end}, [rows for _ in arguments[-2]], buffers
        return self.traced, arguments, dims

    @torch.inference_mode()
    def compare(self, graph: Runnable) -> str:
        loss = Loss.between(alike(self.predicted(self.traced), self.predicted(graph.forward)))
        return self._allowance().exceeded(loss)

    def _allowance(self) -> Tolerance:
        """The precision loss of the dtype on these passes; if that can't be measured, 64 rounding units."""
        dtype: torch.dtype = self.backbone.fc.weight.dtype
        exact = self.exact()
        with prepacked.disabled():
            plain = self.predicted(self.traced)
        if exact is not None:
            return Tolerance.of(alike(plain, exact), dtype)
        # at least that of float32: norms and rotary positions are computed in it
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        most = 64 * unit * max(float(values.abs().max()) for _, values in plain)
        return Tolerance(most, most)

    def exact(self) -> list[tuple[Tensor, Tensor]] | None:
        """`predicted` with the same weights in float64, or in float32 if they are float64; None if the target can't be
        copied."""
        target, other = self.backbone.target, compared_with(self.backbone.fc.weight.dtype)
        exact = converted(target, other) if isinstance(target, TransformersTarget) else None
        if exact is None:
            return None
        traced = copy.deepcopy(self.traced, {id(target): exact}).to(other)
        return CompiledBlock(traced, ()).predicted(traced)

    def predicted(self, run: Callable[..., Any]) -> list[tuple[Tensor, Tensor]]:
        """For passes of several sizes, the chain [R, K] and its logits or distributions [R, K, V]."""
        sizes = (1, 1), (1, 4), (3, 1), (3, 4)
        results = [run(*self._arguments(*self._pass(rows, new))) for rows, new in sizes]
        return [(nodes[:, self.traced.chain], values) for nodes, values, *_ in results]

    def _pass(self, rows: int, new: int, before: int = 100) -> tuple[Any, ...]:
        """Arguments of a pass with this many rows and new taps, after some context."""
        spec, noise = self.backbone.target.spec, torch.Generator().manual_seed(5)
        dtype, width = self.backbone.fc.weight.dtype, new + self.backbone.width
        cache = SlotCache(rows, before + 2 * width)
        taps = self._taps(rows, before + new).to(dtype)
        cache.open(range(rows), before)
        with torch.inference_mode():
            self.backbone.remember(taps[:, :before], torch.arange(before)[None].expand(rows, -1), cache)
        cache.append([before - row for row in range(rows)])
        counts = [max(1, new - row % 2) for row in range(rows)]
        cache.open(range(rows), width)
        anchors = torch.randint(spec.vocabulary, (rows,), generator=noise)
        return taps[:, before:], anchors, counts, cache, self.traced.example(rows)

    def _taps(self, rows: int, count: int) -> Tensor:
        """The target's states [R, count, T, H] over real text, which noise would not resemble."""
        taps: Tensor = self.backbone.target.read(texts(self.backbone.target, rows, count), self.backbone.taps)[1]
        return taps

    def _arguments(
        self, taps: Tensor, anchors: Tensor, counts: Sequence[int], cache: SlotCache, noise: list[Tensor]
    ) -> tuple[Any, ...]:
        """Taps, how many of them are real, anchors; starts of slots, and columns up to the end; noise; buffers."""
        taps = taps.to(self.backbone.fc.weight.dtype).contiguous()
        return taps, torch.tensor(counts), anchors, cache.starts, cache.columns, noise, cache.buffers


def alike(
    one: Sequence[tuple[Tensor, Tensor]], other: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What two ways predict, as long as the preceding tokens are equal: after a tie everything may differ."""
    for (nodes, values), (others, other_values) in zip(one, other, strict=True):
        same = nn.functional.pad((nodes == others).long().cumprod(-1), (1, 0), value=1)[:, :-1, None]
        yield values * same, other_values * same


class _Traced(nn.Module):
    """The compiled module, including the target's embedding and head."""

    draft: Any

    def __init__(self, model: nn.Module):
        super().__init__()
        self.draft = model
        target: Any = self.draft.backbone.target
        target = next(iter(members_of(target)), target)  # for an ensemble, the first member's are used
        whole: Any = getattr(target, "model", None)
        borrowed = [] if whole is None else [whole.get_input_embeddings()]
        if self.draft.reduced is not None:
            borrowed.append(self.draft.reduced.head(self.draft.dtype))
        elif whole is not None:
            borrowed.append(whole.get_output_embeddings())
        # so that their weights are part of the key and frozen
        self.ends = nn.ModuleList(borrowed)

    def block(
        self, taps: Tensor, counts: Tensor, anchors: Tensor, starts: Tensor, columns: Tensor, buffers: list[Tensor],
        pick: Callable[[Tensor, int], Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        new, width = taps.shape[1], self.draft.backbone.width
        layout = PassLayout(starts, columns, new + width)
        mask = additive(seen(layout, new, counts, width, self.draft.backbone.window), taps.dtype)
        cache: Any = TracedCache(range(len(buffers) // 2), buffers, layout)
        predicted: tuple[Tensor, Tensor, Tensor | None] = self.draft(
            taps, layout.positions(torch.arange(new)), anchors, starts + counts, mask, cache, pick
        )
        return predicted


class Greedy(_Traced):
    """The likeliest blocks, as trees: nodes, logits and confidences."""

    name, draws = "block", False

    def __init__(self, model: nn.Module, tree: Any):
        super().__init__(model)
        self.tree = tree
        self.chain = [n for n, path in enumerate(tree.paths) if not any(path)]

    def noise(self, state: DecodeState) -> list[Tensor]:
        return []

    def example(self, rows: int) -> list[Tensor]:
        return []

    def forward(
        self, taps: Tensor, counts: Tensor, anchors: Tensor, starts: Tensor, columns: Tensor, noise: list[Tensor],
        buffers: list[Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        tokens, logits, confidence = self.block(taps, counts, anchors, starts, columns, buffers, None)
        nodes = tokens if self.tree.is_chain else self.draft.named(self.tree.choices(logits))
        return (nodes, logits) if confidence is None else (nodes, logits, confidence)


class Drawn(_Traced):
    """Blocks sampled at a temperature: tokens, their distributions, and confidences."""

    name, draws = "block-drawn", True
    tokens: Tensor
    """[D], the tokens that can be drafted."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.chain = list(range(self.draft.backbone.config.block))
        reduced, spec = self.draft.reduced, self.draft.backbone.target.spec
        drafted = torch.arange(spec.vocabulary) if reduced is None else reduced.ids
        self.register_buffer("tokens", drafted, persistent=False)

    def noise(self, state: DecodeState) -> list[Tensor]:
        """Temperatures [R], and keys of the noise [R, K], which would take minutes to compile inside the graph."""
        assert state.judge.temperature is not None
        return [state.judge.temperature.to(state.device), noise_keys(state.streams, len(self.chain))]

    def example(self, rows: int) -> list[Tensor]:
        return [0.5 + 0.25 * torch.arange(rows), torch.arange(rows * len(self.chain)).view(rows, -1) + 7]

    def forward(
        self, taps: Tensor, counts: Tensor, anchors: Tensor, starts: Tensor, columns: Tensor, noise: list[Tensor],
        buffers: list[Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        (temperature, keys), distributions = noise, []

        def pick(logits: Tensor, slot: int) -> Tensor:
            distributions.append(tempered(wide(logits), temperature))
            return self.draft.named(race(distributions[-1], keys[:, slot], self.tokens))

        tokens, _, confidence = self.block(taps, counts, anchors, starts, columns, buffers, pick)
        q = self.draft.whole(torch.stack(distributions, 1), 0.0)
        return (tokens, q) if confidence is None else (tokens, q, confidence)
