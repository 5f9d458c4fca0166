"""The target's step as one compiled graph: the same modules and hooks, traced once.

Slots, tokens per row, columns and the cache's length are dynamic sizes.  The pass is traced with several of each, since
tracing specialises a size of 1; the graph also works for 1, which is tested whenever one is loaded.

R rows of a pass, n tokens per row, K of them with logits, h heads, L cache length.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

from outrider import fast
from outrider.decoding.draft import to_device
from outrider.decoding.state import Scores, likeliest
from outrider.errors import first_line
from outrider.fast import Compiled, Graph, NotCompiled, Runnable, dense
from outrider.fast.gpu.cuda_graphs import CudaGraphs
from outrider.fast.packages import build
from outrider.kernels import prepacked
from outrider.storage.sources import code
from outrider.targets import accuracy
from outrider.targets.accuracy import Loss, Tolerance
from outrider.targets.cache import attention_mask
from outrider.targets.cache.attention_mask import PassLayout, TracedCache, Tree, additive
from outrider.targets.cache.slots import SlotCache
from outrider.targets.cache.stacks import LayerBuffer
from outrider.targets.hf import family, passes
from outrider.targets.hf.passes import passed

log = logging.getLogger(__name__)

WIDEST = 1024
"""Maximum number of tokens per row of a pass."""
EXAMPLE, BEFORE = (3, 8), 300
"""Rows and tokens per row of the traced pass, and columns before it."""
ALLOWED = 0.1
"""Relative difference of logits allowed for our kernels: rounding to bfloat16 explains a few hundredths, whereas a
missing part of a layer causes several tenths."""


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters beside weights."""
    layers = sys.modules.get("peft.tuners.tuners_utils")  # imported if there are any adapters
    return layers is not None and any(isinstance(module, layers.BaseTunerLayer) for module in model.modules())


class CompiledStep(Compiled):
    """Verification passes of a target."""

    def __init__(self, target: Any):
        super().__init__()
        self.target = target
        self.layout: tuple[LayerBuffer, ...] | None = None
        """The buffers of a cache with weights of dtype `_layout_dtype`; None until they are known."""
        self._layout_dtype: torch.dtype | None = None
        self._lock = threading.Lock()

    def model(self) -> nn.Module:
        family = self.target.family
        if not self.target.is_whole:
            raise NotCompiled(
                f"the weights of {self.target.spec.name} are not all in one place (tensor_parallel or device_map); "
                "its steps stay plain"
            )
        if family.masks == "none" or family.follows_one_path:
            raise NotCompiled(
                f"{self.target.spec.name}'s family has no attention masks, or has a recurrent state or a cache of its "
                "own; its steps stay plain"
            )
        if family.has_patches:
            raise NotCompiled(
                f"the global model of {self.target.spec.name} runs only where the bytes of a pass end a patch; its "
                "steps stay plain"
            )
        if family.rotary is not None:
            raise NotCompiled(
                f"the rotary factors of {self.target.spec.name} depend on the length of each text; its steps stay plain"
            )
        model: nn.Module = self.target.model
        if has_adapters(model):
            raise NotCompiled(
                f"{self.target.spec.name} has PEFT adapters beside its weights, and a graph would not notice when they "
                "are switched; its steps stay plain unless they are merged into the weights (merge_and_unload)"
            )
        return model

    def get(self, build: bool) -> float:
        """Like `Compiled.get`; from then on caches have buffers before a prompt is read, so that its first chunk can
        also be compiled."""
        seconds = super().get(build)
        self._learn_layout()
        return seconds

    def renew(self) -> None:
        if self._layout_dtype != self.target.model.dtype:
            self.layout = None
        super().renew()

    @torch.inference_mode()
    def _learn_layout(self) -> None:
        """Found by reading one token."""
        if self.layout is None:
            cache = self.target.allocate(1, 1)
            self.target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=self.target.device), [1])
            self.layout, self._layout_dtype = cache.layout, self.target.model.dtype

    @property
    def traced(self) -> nn.Module:
        return TracedPass(self.target, [])

    def settings(self) -> Sequence[object]:
        model = self.target.model
        config = model.config
        setup = transformers.__version__, type(model).__name__, config.to_json_string(), config._attn_implementation
        traced = (sys.modules[type(each).__module__] for each in (self, self.target, model))
        return [setup, self.target.family, *code(fast, build, family, attention_mask, passes, *traced)]

    def reads(self, cache: SlotCache, rows: Sequence[int], tokens: Tensor) -> bool:
        """Whether a prompt's chunk [R, S] of these slots can run compiled."""
        # on a GPU every width would be captured
        if not isinstance(self.graph, Graph):
            return False
        return tokens.shape[1] <= WIDEST and self.fits(cache, rows, tokens.shape[1])

    def run(
        self, cache: SlotCache, rows: Sequence[int], tokens: Tensor, tree: Tree | None, taps: tuple[int, ...] = (),
        last: Sequence[int] | None = None, graph: Runnable | None = None,
    ) -> Scores:  # fmt: skip
        """A pass of these slots over tokens [R, n], which is left open.

        last: the one token of each row whose logits are returned; by default all tokens.  graph: a graph to test.
        """
        cache.open(rows, tokens.shape[1])
        arguments = self._arguments(tokens, cache, tree, taps, last)
        with self._lock:  # another thread's replay would use the same memory for its arguments
            logits, hidden, choice, tapped = (graph or self.graph).forward(*arguments)
        return Scores(logits, hidden, tapped if taps else None, choice)

    def example(self) -> tuple[nn.Module, tuple[Any, ...], Any]:
        cache, tokens = self._pass(*EXAMPLE)
        arguments = self._arguments(tokens, cache, None, (0, 1))
        rows, width = Dim("rows", min=2, max=1024), Dim("width", min=2, max=WIDEST)
        columns, length = {0: Dim("end", min=3, max=2**20)}, Dim("length", min=4, max=2**20)
        taps, logit_indices = {0: Dim("taps", min=2, max=2**10)}, {0: rows, 1: Dim("logits", min=2, max=WIDEST)}
        tokens_dims = {0: rows, 1: width}
        buffers = [{0: rows, 2: length} for _ in arguments[-1]]
        dims = (
            tokens_dims, tokens_dims, {0: rows, 1: width, 2: width}, {0: rows}, columns, taps, logit_indices, buffers,
        )  # fmt: skip
        return TracedPass(self.target, cache.layers), arguments, dims

    def trials(self) -> list[tuple[Any, ...]]:
        """A plain step of one slot and of several, and the verification of a draft."""
        passes = []
        for rows, width in ((1, 1), (1, EXAMPLE[1]), (EXAMPLE[0], 1)):
            cache, tokens = self._pass(rows, width)
            passes.append(self._arguments(tokens, cache, None, ()))
        return passes

    def plain(self) -> Callable[..., Any]:
        return prepacked.enabled()(super().plain())

    def cuda_graphs(self) -> Runnable:
        if self.target.device.type != "cuda":
            raise NotCompiled(
                f"compiled steps are for CPUs and CUDA GPUs, not for {self.target.device.type!r}; steps stay plain"
            )
        written = TracedPass(self.target, self._pass(1, 1)[0].layers)
        return self._by_kernels(written) or CudaGraphs(written)

    def _by_kernels(self, written: nn.Module) -> Runnable | None:
        """Passes by our kernels, if they support the model and agree with its own modules."""
        name = self.target.spec.name
        try:
            from outrider.fast.gpu.kernel_pass import GpuPass  # Triton is only part of torch for GPUs

            graph = CudaGraphs(GpuPass(self.target, written))
            differs = max(_share(plain, fast) for plain, fast in self._both(graph))
        except Exception as error:  # another kind of model, no Triton, no C compiler for it, too little shared memory
            log.info("passes of %s run in transformers' code: %s", name, first_line(error))
            return None
        if differs <= ALLOWED:
            return graph
        log.info(
            "passes of %s run in transformers' code: the relative difference of our kernels' logits is %.3f, more than "
            "%.2f", name, differs, ALLOWED,
        )  # fmt: skip
        return None

    @torch.inference_mode()
    def _pass(self, rows: int, width: int) -> tuple[SlotCache, Tensor]:
        """An open pass after random states in slots of unequal length, and its tokens [rows, width]."""
        before, noise = min(BEFORE, self.target.spec.context // 2), torch.Generator().manual_seed(5)
        tokens = torch.randint(self.target.spec.vocabulary, (rows, width), generator=noise).to(self.target.device)
        self._learn_layout()
        cache = self.target.allocate(rows, before + width + 8)
        cache.lengths = [before - row for row in range(rows)]
        cache.open(range(rows), width)
        for buffer in cache.buffers:
            buffer.copy_(torch.randn(buffer.shape, generator=noise))
        return cache, tokens

    def compare(self, graph: Runnable) -> str:
        """With one token, chains and, if the mode allows them, a tree; for one slot and for several."""
        allowed = accuracy.allowance(self.target)
        if allowed is None:
            most = 2 * self.target.selftest.allowed  # each may differ by that from the model's own passes
            allowed = Tolerance(most, most)
        return allowed.exceeded(Loss.between(self._both(graph)))

    @torch.inference_mode()
    def _both(self, graph: Runnable) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits of the plain path and of the graph for these passes."""
        for cache, anchors, draft in accuracy.passes(self.target):
            rows = range(len(anchors))
            plain = self.target.verify(cache, rows, anchors, draft).logits
            tokens, tree = passed(anchors, draft, self.target.spec.vocabulary)
            yield plain, self.run(cache, rows, tokens, tree, graph=graph).logits
            if isinstance(graph, Graph):  # a package also reads prompts
                last = [tokens.shape[1] - 1] * len(rows)
                yield plain[:, -1:], self.run(cache, rows, tokens, tree, last=last, graph=graph).logits

    def _arguments(
        self,
        tokens: Tensor,
        cache: SlotCache,
        tree: Tree | None,
        taps: tuple[int, ...],
        last: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Tokens; depths and tree mask; starts of rows, and columns up to the end; taps; logit indices; buffers."""
        tree_mask, depths = _chain_of(*tokens.shape, tokens.device) if tree is None else tree
        tapped = numbers(taps or (0,), tokens.device)
        indices = _all_of(*tokens.shape, tokens.device) if last is None else to_device(last, tokens.device)[:, None]
        inputs = tokens.contiguous(), depths.contiguous(), tree_mask.contiguous()
        return *inputs, cache.starts, cache.columns, tapped, indices, cache.buffers


@functools.lru_cache(256)
def _chain_of(rows: int, width: int, device: torch.device) -> Tree:
    """Chains [R, n] as trees."""
    depths = torch.arange(width, device=device)
    return Tree(dense(depths[:, None] >= depths, rows, width, width), dense(depths, rows, width))


@functools.lru_cache(256)
def _all_of(rows: int, width: int, device: torch.device) -> Tensor:
    """[R, n] indices of the tokens within each row."""
    return dense(torch.arange(width, device=device), rows, width)


class TracedPass(nn.Module):
    """The compiled module: one pass of the model over the given buffers."""

    def __init__(self, target: Any, layers: Sequence[int]):
        super().__init__()
        self.model = target.model
        self.target, self.layers = target, layers

    def forward(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, starts: Tensor, columns: Tensor, taps: Tensor,
        logit_indices: Tensor,
        buffers: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Logits [R, K, V] of the tokens at `logit_indices` [R, K], hidden [R, n, H], choice [R, K] as in `Scores`, and
        outputs of layers `taps` [T]: [R, n, T, H]."""
        logits, hidden, layers = self.all_layers(tokens, depths, tree_mask, starts, columns, logit_indices, buffers)
        return logits, hidden, likeliest(logits), torch.stack(layers, 2).index_select(2, taps)

    def all_layers(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, starts: Tensor, columns: Tensor, logit_indices: Tensor,
        buffers: list[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
        """Logits and hidden as above, and the output [R, n, H] of every layer."""
        target, layout = self.target, PassLayout(starts, columns, tokens.shape[1])
        mask, dtype = layout.mask(tree_mask), target.model.dtype
        masks = {
            kind: additive(mask if limit is None else mask & layout.limit_mask(limit, depths), dtype)
            for kind, limit in target.family.limits.items()
        }
        cache = TracedCache(self.layers, buffers, layout)
        positions = layout.positions(depths).clamp(max=target.spec.context - 1)
        outputs: tuple[Tensor, Tensor, list[Tensor]] = target.pass_through(
            tokens, cache, masks, positions, logit_indices
        )
        return outputs


def _share(plain: Tensor, captured: Tensor) -> float:
    """The difference of logits relative to their deviation from the mean, as root mean squares."""
    plain = plain.double()
    return float((plain - captured.double()).norm() / (plain - plain.mean(-1, keepdim=True)).norm())


@functools.lru_cache(64)
def numbers(taps: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(taps, device=device)


step = CompiledStep
"""The name under which `targets.hf.transformers` finds it."""
