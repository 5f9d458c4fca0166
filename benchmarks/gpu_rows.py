"""The rows of `gpu.py`: each a function from (device, whether it is small, results of earlier rows) to its figures."""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import gpu_acceptance, gpu_step
from benchmarks.replay import Replay
from outrider import demo, generation, load_target
from outrider.data.answers.store import Answer
from outrider.data.features.live import LiveFeatures
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.drafters import find
from outrider.errors import first_line
from outrider.fast import NotCompiled, flat
from outrider.fast.gpu.cuda_graphs import CudaGraphs
from outrider.fast.passes.compiled import CompiledStep, TracedPass
from outrider.gate import parity
from outrider.plan.measured.profile import busy_seconds
from outrider.sampling.settings import Sampling
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config as TrainConfig
from outrider.training.optimizers import Optimizers
from outrider.training.step import optimise

SHAPES = {
    "0.6b": (1024, 3072, 28, 16), "1.7b": (2048, 6144, 28, 16), "4b": (2560, 9728, 36, 32), "8b": (4096, 12288, 36, 32),
}  # fmt: skip
"""Qwen3: hidden size, intermediate size, layers, query heads; 8 key-value heads of size 128."""
SMALL_SHAPE = 128, 256, 2, 4
KV_HEADS, HEAD, VOCABULARY = 8, 128, 151_936
WIDTHS, BATCHES, CONTEXTS = (1, 8, 16, 4, 32, 64), (1, 4, 16, 64), (1024, 8192)
POINT_S = 0.06
"""Seconds for which a point is measured repeatedly, after its warm-up."""

Known = Mapping[str, Any]


class Points(list[dict[str, Any]]):
    """Figures of a row, written as they are produced: a row that is stopped keeps what it has so far."""

    place: Path

    def append(self, point: dict[str, Any]) -> None:
        super().append(point)
        part = self.place.with_suffix(".part")
        part.write_text(json.dumps({"points": self}))
        part.replace(self.place)


def run(row: str, device: str, small: bool, known: Known, out: Path) -> dict[str, Any]:
    """The figures of one row.  out: where they are written as they are produced; a trace is written next to it."""
    Points.place = out
    kind, _, shape = row.partition("-")
    torch.set_grad_enabled(kind == "training")
    given: Any = (device, small, known) if not shape else (shape, device, small, known)
    found: dict[str, Any] = ROWS[kind](*given)
    if device == "cuda":
        found["gpu"], found["peak_gib"] = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated() / 2**30
    return found


# ── shared by rows ────────────────────────────────────────────────────────────────────────────────────────────────────


def model_of(shape: str, device: str, small: bool, most: int = 99) -> Qwen3ForCausalLM:
    """A Qwen3 of that shape in bfloat16 with random weights, created on the device.

    Its embeddings outweigh what its layers add, so that a token's successor is certain: rounding decides nothing, and a
    draft's acceptance is as configured.  most: layers.
    """
    hidden, intermediate, layers, heads = SMALL_SHAPE if small else SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=min(layers, most), num_attention_heads=heads,
        num_key_value_heads=2 if small else KV_HEADS, head_dim=32 if small else HEAD,
        vocab_size=512 if small else VOCABULARY, max_position_embeddings=16_384,
        tie_word_embeddings=shape in ("0.6b", "1.7b", "4b"),
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), torch.no_grad():
            model = Qwen3ForCausalLM(config).eval()
            embedding = model.get_input_embeddings().weight
            embedding *= 2500  # one layer adds about 1, and there are up to 72 sublayers
            if not config.tie_word_embeddings:
                model.lm_head.weight.copy_(embedding.roll(1, 0) / 2500)
            return model
    finally:
        torch.set_default_dtype(before)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_ms(run: Callable[[], object], device: str, seconds: float = POINT_S) -> float:
    """Median time of a call, including the wait for the device, over as many calls as fit."""
    for _ in range(2):
        run()
    synchronize(device)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        synchronize(device)
        taken.append(1e3 * (time.perf_counter() - began))
    return sorted(taken)[len(taken) // 2]


class Rehearsed(CompiledStep):
    """CUDA graphs emulated on a CPU: a recorder that reruns the pass in place of a replay."""

    def get(self, build: bool) -> float:
        self._weights, self._version = [], 0
        self.graph = CudaGraphs(TracedPass(self.target, self._pass(1, 1)[0].layers), again)
        return 0.0


def again(function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Records what a CUDA graph would."""
    outputs = flat(function())

    def replay() -> None:
        for there, here in zip(outputs, flat(function()), strict=True):
            there.copy_(here)

    return replay, outputs


@contextmanager
def captured(target: TransformersTarget, is_wanted: bool) -> Iterator[str]:
    """Set the target to CUDA graphs or plain passes; returns the reason if that is impossible."""
    graph, why = target.step.graph, ""
    if is_wanted and graph is None:
        if target.device.type == "cpu":
            target.step = Rehearsed(target)
        try:
            target.compile()
        except NotCompiled as error:
            why = str(error)
    elif not is_wanted:
        target.step.graph = None
    try:
        yield why
    finally:
        if not is_wanted:
            target.step.graph = graph


def filled(target: TransformersTarget, slots: int, context: int, more: int) -> SlotCache:
    """A cache whose slots hold about `context` tokens of noise, of unequal length."""
    cache = target.allocate(slots, context + more)
    target.prefill(cache, [0], torch.ones(1, 1, dtype=torch.int64, device=target.device), [1])
    cache.reserve(context + more)
    for stack in cache.stacks.tensors:
        stack.normal_()
    cache.lengths = [context - slot % 7 for slot in range(slots)]
    return cache


# ── machine ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_machine(device: str, small: bool, known: Known) -> dict[str, Any]:
    """Memory copy, a large product, a kernel launch."""
    size, side = (2**22, 256) if small else (2**31, 8192)
    source = torch.randn(size // 4, device=device).view(torch.uint8)
    target = torch.empty_like(source)
    copy_s = median_ms(lambda: target.copy_(source), device) / 1e3
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = median_ms(lambda: a @ b, device, 0.5) / 1e3
    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    return {
        "copied_gb_per_s": 2 * size / copy_s / 1e9, "bf16_tflops": 2 * side**3 / product_s / 1e12,
        "launch_us": median_ms(launches, device),
        "memory_gib": torch.cuda.mem_get_info()[1] / 2**30 if device == "cuda" else None,
    }  # fmt: skip


# ── passes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_passes(shape: str, device: str, small: bool, known: Known) -> dict[str, Any]:
    """T(n) of verified passes: tokens per row, rows, context, plain and captured, compared with what the device's
    speeds allow."""
    target = load_target(model_of(shape, device, small), compile=False)
    speeds = known.get("machine", {})
    widths, batches, contexts = ((1, 8), (1, 2), (64,)) if small else (WIDTHS, BATCHES, CONTEXTS)
    found = Points()
    with captured(target, True) as why:
        graphs = ways_of(target)
    for context, batch in itertools.product(contexts, batches):
        floor = Floor(target, batch, context, speeds)
        cost = batch * (context + 2 * 64) * floor.column
        if device == "cuda" and cost * 1.3 + 2**31 > torch.cuda.mem_get_info()[0]:
            found.append({"batch": batch, "context": context, "error": f"{cost / 2**30:.0f} GiB of cache do not fit"})
            continue
        cache = filled(target, batch, context, 128)
        for way, width in itertools.product(graphs, widths):
            few = {"plain": (1, 8) if context <= 1024 else (), "captured": (1, 8, 16), "kernels": widths}[way]
            if width not in (few if context <= 1024 else few[:3]):
                continue
            point = {"batch": batch, "context": context, "width": width, "way": way}
            target.step.graph = graphs[way]
            try:
                point["ms"] = median_ms(verifying(target, cache, width), device)
                found.append(point | floor.beside(width, point["ms"]))
            except (RuntimeError, AssertionError) as error:
                found.append(point | {"error": first_line(error)[:300]})
        del cache
        for graph in filter(None, graphs.values()):
            graph.captures.clear()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"points": found, "not_captured": why, "weights_gib": floor.weights / 2**30, "ratios": ratios(found)}


def ways_of(target: TransformersTarget) -> dict[str, Any]:
    """Graphs by how the pass runs: plain, captured with transformers' code, captured with our kernels."""
    graph = target.step.graph
    if graph is None:
        return {"plain": None}
    written = getattr(graph.traced, "written", None)
    if written is None:
        return {"plain": None, "captured": graph}
    return {"plain": None, "captured": CudaGraphs(written, graph.recorder), "kernels": graph}


def verifying(target: TransformersTarget, cache: SlotCache, width: int) -> Callable[[], object]:
    """A verified pass of `width` tokens per row over all slots, which leaves no state behind."""
    rows, noise = range(cache.slots), torch.Generator().manual_seed(width)
    tokens = torch.randint(target.spec.vocabulary, (cache.slots, width), generator=noise).to(target.device)
    draft = Draft.chain(tokens[:, 1:], torch.full((cache.slots,), width - 1))
    return lambda: target.verify(cache, rows, tokens[:, 0], draft)


class Floor:
    """A lower bound on a pass's time: the bytes it reads, the products it computes."""

    def __init__(self, target: TransformersTarget, batch: int, context: int, speeds: Known):
        model: Any = target.model
        embedding = model.get_input_embeddings().weight
        is_tied = model.config.tie_word_embeddings
        self.weights = sum(weight.nbytes for weight in model.parameters()) - (0 if is_tied else embedding.nbytes)
        self.batch, self.speeds = batch, speeds
        config = model.config
        self.column = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
        self.cache = batch * context * self.column
        self.attended = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context

    def beside(self, width: int, ms: float) -> dict[str, float]:
        """The floor of a pass, and the share of the device's speed that a pass of `ms` reaches."""
        moved = self.weights + self.cache
        tokens = self.batch * width
        made = tokens * (self.weights + self.attended)  # two operations per weight, which takes two bytes
        if not self.speeds.get("copied_gb_per_s"):
            return {}
        reading = moved / self.speeds["copied_gb_per_s"] / 1e6
        multiplying = made / self.speeds["bf16_tflops"] / 1e9
        floor = max(reading, multiplying)
        return {"floor_ms": floor, "share": floor / ms}


def ratios(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """T(n) / T(1) for each batch and context, of the faster variant."""
    best: dict[tuple[int, int], dict[int, float]] = {}
    for point in points:
        if "ms" in point:
            own = best.setdefault((point["batch"], point["context"]), {})
            own[point["width"]] = min(own.get(point["width"], 1e9), point["ms"])
    return [
        {"batch": batch, "context": context, "ms_of_one": own[1], **{f"x{n}": ms / own[1] for n, ms in own.items()}}
        for (batch, context), own in best.items() if 1 in own
    ]  # fmt: skip


# ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_loop(shape: str, device: str, small: bool, known: Known) -> dict[str, Any]:
    """Steps of one text, plain and with replayed drafts: seconds per step, and the share of time without a running
    kernel."""
    target = load_target(model_of(shape, device, small), compile=False)
    prompt = torch.randint(target.spec.vocabulary, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    new, found = 16 if small else 64, Points()
    text, bits = written(target, [prompt], new)[0], dict[int, bool]()
    known_texts = [[*prompt, *text]]
    for is_captured in (False, True):
        with captured(target, is_captured) as why:
            if is_captured and target.step.graph is None:
                found.append({"captured": True, "error": why})
                continue
            for name, drafter in (("plain", None), ("drafted", replaying(target, known_texts))):
                written(target, [prompt], new, drafter)  # captures and warms up
                point = timed_steps(target, prompt, new, drafter, device)
                point |= {"captured": is_captured, "way": name, "differs": point.pop("text") != text}
                found.append(point)
            if is_captured:
                bits = same_bits(target, device)
    return {"points": found, "same_bits": bits}


def same_bits(target: TransformersTarget, device: str) -> dict[int, bool]:
    """By tokens per pass: whether a text's logits are bit-identical to those of one pass over sixteen."""
    cache, noise = filled(target, 1, 60, 64), torch.Generator().manual_seed(2)
    tokens, begin = torch.randint(target.spec.vocabulary, (1, 16), generator=noise).to(device), cache.lengths[0]

    def read(at: int, width: int) -> torch.Tensor:
        cache.lengths = [begin + at]
        draft = Draft.chain(tokens[:, at + 1 : at + width], torch.full((1,), width - 1))
        return target.verify(cache, [0], tokens[:, at], draft).logits

    whole = read(0, 16)
    return {
        width: torch.equal(torch.cat([read(at, width) for at in range(0, 16, width)], 1), whole)
        for width in (1, 2, 4, 8)
    }


def replaying(target: TransformersTarget, texts: list[list[int]], right: float = 0.85, width: int = 1) -> Drafter:
    """Drafts of seven tokens, each right with probability `right`."""
    return Replay(texts, target.spec.vocabulary, depth=7, width=width, right=right, eldest=True)


def written(
    target: TransformersTarget, prompts: Sequence[list[int]], new: int, drafter: Drafter | None = None, slots: int = 1,
    on_step: Callable[[], None] = lambda: None,
) -> list[list[int]]:  # fmt: skip
    """Greedy texts of all prompts, ignoring ends of text."""
    texts: list[list[int]] = [[] for _ in prompts]
    state = generation.batch(target, slots, ends=frozenset())
    requests = [Request(prompt, new, Sampling()) for prompt in prompts]
    last = None
    for progress in generation.serve(target, requests, drafter, policy="fixed", state=state):
        texts[progress.request] += progress.tokens
        if state.timing is not last:
            last = state.timing
            on_step()
    return texts


def timed_steps(
    target: TransformersTarget, prompt: list[int], new: int, drafter: Drafter | None, device: str
) -> dict[str, Any]:
    """Milliseconds per step by the wall clock, and of kernels by the profiler."""
    steps: list[float] = []
    [text] = written(target, [prompt], new, drafter, on_step=lambda: steps.append(time.perf_counter()))
    gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(steps))
    point = {"text": text, "ms": gaps[len(gaps) // 2], "tokens_per_step": new / len(steps)}
    point["tokens_per_s"] = 1e3 * point["tokens_per_step"] / (sum(gaps) / len(gaps))
    if device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            written(target, [prompt], 8, drafter)
            synchronize(device)
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        name = f"{'drafted' if drafter else 'plain'}-{'captured' if target.step.graph else 'eager'}"
        profiler.export_chrome_trace(str(Points.place.with_name(f"{name}.trace.json.gz")))
        point |= last_step(sorted((one.time_range.start, one.time_range.end, one.name) for one in events))
        point["outside_kernels"] = 1 - point["kernel_ms"] / point["ms"]
    return point


def last_step(kernels: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    """How many kernels ran between the last two choices of tokens, and for how long at least one did; they overlap."""
    choices = [start for start, _, name in kernels if "MaxOps" in name]
    own = [(start, end) for start, end, _ in kernels if choices[-2] <= start < choices[-1]]
    return {"kernel_ms": 1e3 * busy_seconds(own), "kernels_per_step": len(own)}


# ── exactness ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_exactness(device: str, small: bool, known: Known) -> dict[str, Any]:
    """Greedy texts of the demo target with replayed drafts compared with plain ones: equal, or rounding ties judged by
    margin."""
    count, new = (2, 16) if small else (16, 96)
    found = Points()
    for dtype, is_captured in itertools.product(("bfloat16", "float32", "float64"), (True, False)):
        target = load_target("demo", device=device, dtype=dtype, compile=False)
        prompts = [target.encode(text) for _, text in demo.prompts("held_out", count)]
        with captured(target, is_captured) as why:
            if is_captured and target.step.graph is None:
                found.append({"dtype": dtype, "captured": True, "error": why})
                continue
            plain = written(target, prompts, new, slots=4)
            texts = [[*prompt, *text] for prompt, text in zip(prompts, plain, strict=True)]
            for width in (1, 2):
                drafter = Replay(texts, target.spec.vocabulary, depth=6, width=width, right=0.8)
                drafted = written(target, prompts, new, drafter, slots=4)
                audit = parity.Audit(target)
                verdicts = Counter(
                    audit.pair(str(i), *row).verdict for i, row in enumerate(zip(prompts, plain, drafted, strict=True))
                )
                kept = sum(number * times for number, times in drafter.kept.items()) / max(1, drafter.kept.total())
                found.append(
                    {"dtype": dtype, "captured": is_captured, "branches": width, "kept": kept, **verdicts}
                )  # fmt: skip
    return {"points": found}


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────

TRAINED = "dspark", "dflash", "eagle3"


def measure_training(
    shape: str, device: str, small: bool, known: Known, compiled: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Training steps with live features: tokens per second, share of the device's product speed, memory."""
    batch, length, steps = (2, 64, 2) if small else (8, 2048, 4)
    target = load_target(model_of(shape, device, small), compile=False)
    layers: Any = target.model
    if compiled:
        for layer in layers.model.layers:
            layer.compile()
    noise, found = torch.Generator().manual_seed(0), Points()
    texts = torch.randint(target.spec.vocabulary, (batch * (steps + 2), length), generator=noise).tolist()
    answers = [Answer(str(i), text, [(length // 8, length)]) for i, text in enumerate(texts)]
    for kind in TRAINED:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found.append(
                trained(target, kind, answers, batch, length, steps, device, compiled, known)
            )  # fmt: skip
        except Exception as error:
            found.append({"drafter": kind, "error": f"{type(error).__name__}: {first_line(error)[:300]}"})
        gc.collect()
    return {"points": found, "compiled": compiled, "batch": batch, "length": length}


def trained(
    target: TransformersTarget, kind: str, answers: list[Answer], batch: int, length: int,
    steps: int, device: str, compiled: bool, known: Known,
) -> dict[str, Any]:  # fmt: skip
    module: Any = find(kind)
    with torch.device(device):
        model = module.Model(module.Config(), target).float().train()
    model = model.to(device)
    if compiled:
        for part in model.modules():
            if type(part).__name__ in ("ContextLayer", "PairLayer"):
                part.compile()
    config = TrainConfig(steps=steps + 2, batch=batch, lr=1e-4, dtype="bfloat16")
    source = LiveFeatures(
        target, answers, model.taps, batch=batch, length=length, dtype="bfloat16", cache_bytes=0
    )  # fmt: skip
    model.begin(source.counts)
    optimizer = Optimizers(model, config.optimizer, target.spec.vocabulary, 0.0, torch.bfloat16)
    taken, reading = [], []
    for step in range(steps + 2):
        synchronize(device)
        began = time.perf_counter()
        features = source.batch(step)
        synchronize(device)
        read = time.perf_counter()
        optimise(model, optimizer, [features], config, step, False)
        synchronize(device)
        taken.append(time.perf_counter() - began)
        reading.append(read - began)
    seconds, tokens = min(taken[2:]), batch * length
    own = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    body = sum(weight.numel() for weight in target.model.parameters())
    rate = known.get("machine", {}).get("bf16_tflops")
    made = 2 * body * tokens / min(reading[2:])
    return {
        "drafter": kind, "s_per_step": seconds, "reading_s": min(reading[2:]), "tokens_per_s": tokens / seconds,
        "first_step_s": taken[0], "trained_millions": own / 1e6,
        "reading_share_of_products": made / rate / 1e12 if rate else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }  # fmt: skip


def measure_acceptance(device: str, small: bool, known: Known) -> dict[str, Any]:
    """See `gpu_acceptance`."""
    return gpu_acceptance.measure(device, small, known, median_ms, Points())


def measure_step(shape: str, device: str, small: bool, known: Known) -> dict[str, Any]:
    """A step with Python between its graphs, and the same step as one graph."""
    target = load_target(model_of(shape, device, small), compile=False)
    with captured(target, True) as why:
        return {**gpu_step.measure(target, device, small, Points()), "not_captured": why}


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "machine": measure_machine, "passes": measure_passes, "loop": measure_loop, "exact": measure_exactness,
    "training": measure_training, "acceptance": measure_acceptance, "step": measure_step,
}  # fmt: skip
