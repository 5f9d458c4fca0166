"""What limits a plain step on a GPU: kernel launches, memory or compute.

The utilisation that monitors show is the share of time in which a kernel ran.  It is near one both in memory-bound
steps, where drafts are nearly free, and in compute-bound steps, where they are not.  So the bytes and operations of a
step are compared with the speeds of a copy and a large product on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from time import perf_counter

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from outrider.decoding.state import Request
from outrider.generation import batch, serve
from outrider.plan.paper.anatomy import Anatomy
from outrider.plan.paper.roofline import weights_read
from outrider.plan.schema import Profile
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

STEPS, WARM = 12, 4
"""Profiled steps; warm-up steps."""
COPIED, WIDTH = 2**28, 8192
"""Bytes of the copy and size of the product that measure the device's speed."""
ROUNDS = 5


def profile(target: TransformersTarget, model: Anatomy, slots: int, context: int) -> Profile | None:
    """A short profile of plain steps; None on a CPU."""
    if target.device.type != "cuda":
        return None
    busy_s, step_s = _steps(target, slots, context)
    bandwidth, flops = _speeds(target.device, target.model.dtype)
    read = weights_read(model, slots) + slots * model.cache_bytes(context)
    made = 2.0 * model.active * slots
    busy = min(1.0, busy_s / step_s)
    shares = {"launch": 1 - busy, "memory": read / bandwidth / step_s, "compute": made / flops / step_s}
    return Profile(
        device=torch.cuda.get_device_name(target.device), concurrency=slots, context=context, busy=busy,
        bound=bound(**shares), **shares,
    )  # fmt: skip


def bound(launch: float, memory: float, compute: float) -> str:
    """The name of the largest share."""
    return max((launch, "launch"), (memory, "memory"), (compute, "compute"))[1]


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of these spans, each (begin, end) in microseconds."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered / 1e6


def _steps(target: TransformersTarget, slots: int, context: int) -> tuple[float, float]:
    """Seconds of a step in which a kernel ran, and seconds of a whole step without the profiler."""
    times = _run(target, slots, context)
    next(times)
    step_s = median(next(times) for _ in range(STEPS))
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(STEPS):
            next(times)
        torch.cuda.synchronize(target.device)
    spans = [
        (event.time_range.start, event.time_range.end) for event in traced.events() or ()
        if event.device_type == DeviceType.CUDA
    ]  # fmt: skip
    return busy_seconds(spans) / STEPS, step_s


def _run(target: TransformersTarget, slots: int, context: int) -> Iterator[float]:
    """Seconds of successive plain steps."""
    room = 2 * STEPS + WARM + 2
    length = max(2, min(context, target.spec.context - room - 2))
    noise = torch.Generator().manual_seed(slots)
    texts = torch.randint(target.spec.vocabulary, (slots, length), generator=noise).tolist()
    state = batch(target, slots, ends=frozenset())
    running = iter(serve(target, [Request(text, room, Sampling()) for text in texts], None, state=state))
    timing, count, began = None, 0, perf_counter()
    for _ in running:
        if state.timing is timing:
            continue
        timing, count, ended = state.timing, count + 1, perf_counter()
        if count >= WARM:
            yield ended - began
        began = perf_counter()


def _speeds(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and operations per second of a large product."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target, matrix = torch.empty_like(source), torch.randn(WIDTH, WIDTH, device=device).to(dtype)
    copy_s = _seconds(lambda: target.copy_(source), device)
    product_s = _seconds(lambda: matrix @ matrix, device)
    return 2 * COPIED / copy_s, 2 * WIDTH**3 / product_s


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several rounds after a warm-up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize(device)
        began = perf_counter()
        work()
        torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return min(seconds[1:])
