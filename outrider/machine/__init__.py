"""The speed of this machine: number types, kernels, threads.  Measured once and stored on disk.

One CPU multiplies bfloat16 four times as fast as float32, the next one fifty times as slowly, and neither its name nor
torch tells which.  So matrix products of every type are timed (in under a second), and alternatives are timed against
each other (`fastest`).  Results are stored in `$OUTRIDER_CACHE/machine` by processor, versions, settings and threads:
the shortest times of three processes, measured while no other program disturbs them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.machine import measurements
from outrider.machine.measurements import Figures, best_times
from outrider.storage import cache

log = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16"]
ROWS = (1, 8, 64)
"""Rows of the timed matrix products: a plain step, the verification of a draft, a batch or a prompt."""
TRAINING = "training"
"""The column of one training step: forward and backward in mixed precision, and an iteration of Muon."""
WIDTH, LAYERS, TRAINED = 1024, 4, 256
"""The timed matrices: LAYERS weights of WIDTH x WIDTH, used in turn; in training one of TRAINED x TRAINED."""
LARGE = 4096
"""Rows and width of a product that is large enough to reach a GPU's full speed."""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MALLOC = {-3: 2**25, -1: 2**31 - 1, -2: 0}
"""glibc's M_MMAP_THRESHOLD at its highest, M_TRIM_THRESHOLD, M_TOP_PAD."""
INT8 = "int8 weights"
UNKNOWN_MEMORY = 2**32
"""Bytes assumed to be free if the system does not tell."""
HOPELESS = 10.0
"""A type this many times slower than float32 is not timed with more rows; its time is extrapolated."""


@dataclass(frozen=True)
class MatmulTimes:
    """Times of the same matrix products in each number type."""

    ms: Mapping[str, Mapping[str, float]]
    """By type, then by column: rows, or `training`."""

    def slowdown(self, way: str, column: str) -> float:
        """Time relative to the fastest type in this column; 1 if it is the fastest or was not timed."""
        if way not in self.ms:
            return 1.0
        return self.ms[way][column] / min(columns[column] for name, columns in self.ms.items() if name in TYPES)

    def decoding(self, way: str) -> float:
        """Time of passes of several rows in this type: the geometric mean of a verification and a batch."""
        return statistics.geometric_mean([self.ms[way][str(rows)] for rows in ROWS[1:]])


def matmul_times() -> MatmulTimes:
    """The times of this machine, measured if needed."""
    return MatmulTimes(measurements.timed(_place("products"), _time_matmuls))


def fastest(
    question: str, ways: Callable[[], Mapping[str, Callable[[], object]]], margin: float = 1.1,
    processes: int = measurements.PROCESSES,
) -> str:  # fmt: skip
    """Name of the fastest alternative: the first one, unless another is `margin` times as fast.

    Timed by the first processes on a machine, each in a quiet moment; the shortest times count.

    question: names what is timed, including everything the answer depends on besides the machine, such as shapes.
    ways: called only if the answer is not stored.  processes: number of processes that time; 1 if it takes long.
    """
    measure = lambda: {way: {"ms": ms} for way, ms in best_times(ways()).items()}
    figures = measurements.timed(_place(question), measure, processes)
    ms = {way: columns["ms"] for way, columns in figures.items()}
    usual, best = next(iter(ms)), min(ms, key=ms.__getitem__)
    return best if ms[best] * margin <= ms[usual] else usual


def training_dtype(device: torch.device | str = "cpu") -> Precision:
    """Type of mixed-precision passes on this device: bfloat16 unless it is slower, else float32."""
    kind = torch.device(device).type
    if kind == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if kind != "cpu":
        return "float32"
    slowdown = matmul_times().slowdown
    return "bfloat16" if slowdown("float32", TRAINING) >= 1 >= slowdown("bfloat16", TRAINING) else "float32"


def decoding_dtype(stored: torch.dtype) -> torch.dtype:
    """Type in which weights of type `stored` are multiplied on this CPU: the same unless float32 is faster."""
    name, time_of = str(stored).removeprefix("torch."), matmul_times().decoding
    is_slow = time_of("float32") < time_of(name) if name in TYPES else stored.itemsize <= 2
    return torch.float32 if is_slow else stored


def slow_type(name: str, column: str) -> str | None:
    """A one-line warning about number type `name` on this CPU; None if it is not much slower than the fastest."""
    factor = matmul_times().slowdown(name, column)
    if factor < 1.5:
        return None
    return f"{name} takes {factor:.1f} times as long as the fastest type on this CPU ({cpu_name()})"


def set_up_process() -> None:
    """Set up threads and malloc for long work.  For programs; importing the library changes nothing."""
    set_up_threads()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Make malloc keep freed memory: steps allocate and free megabytes, and every new page costs a fault.

    In the demo's training this reduces page faults from 32 to 4 thousand per step and saves a tenth of the CPU time.
    """
    with suppress(OSError, AttributeError):  # another libc than glibc
        libc = ctypes.CDLL(None)
        for option, value in MALLOC.items():
            libc.mallopt(option, value)


def release_freed_memory() -> None:
    """Return freed memory to the system, for example before measuring resident memory."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def set_up_threads() -> int:
    """Limit torch's threads to this container's share of the cores if that is faster; returns their number.

    OMP_NUM_THREADS takes precedence.
    """
    default, share = torch.get_num_threads(), cpu_share()
    fewer = default if share is None else max(1, math.ceil(share))
    if fewer >= default or "OMP_NUM_THREADS" in os.environ:
        return default

    def multiply(threads: int) -> None:
        torch.set_num_threads(threads)
        _linear(torch.float32, ROWS[-1])()

    ways = {str(threads): functools.partial(multiply, threads) for threads in (default, fewer)}
    chosen = int(fastest(f"threads {default} or {fewer}", lambda: ways))
    torch.set_num_threads(chosen)
    return chosen


def gflops(rows: int, dtype: Precision = "float32", device: torch.device | str = "cpu") -> float:
    """GFLOP/s of this device in this type, for products of about `rows` rows; on a GPU for large ones."""
    if torch.device(device).type != "cpu":
        question = f"large products of {dtype} on {torch.cuda.get_device_name(device)}"
        ms = measurements.timed(_place(question), lambda: {dtype: {"ms": _time_large(dtype, torch.device(device))}})[
            dtype
        ]["ms"]
        return 2 * LARGE**3 / ms / 1e6
    timed = max((rows_timed for rows_timed in ROWS if rows_timed <= rows), default=ROWS[0])
    return 2 * LAYERS * WIDTH**2 * timed / matmul_times().ms[dtype][str(timed)] / 1e6


def describe(device: torch.device | str = "cpu") -> str:
    """This machine and its speed, in one line."""
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(device)}; training in {training_dtype(device)}"
    table, trains = matmul_times(), training_dtype()
    other = next(name for name in ("bfloat16", "float32") if name != trains)
    factor = table.ms[other][TRAINING] / table.ms[trains][TRAINING]
    threads, speed = torch.get_num_threads(), gflops(ROWS[-1])
    return (
        f"{cpu_name()}, {threads} thread{'s' * (threads != 1)}, {speed:.0f} GFLOP/s in float32; training in {trains} "
        f"({other} takes {factor:.1f} times as long)"
    )


# ── identity and memory ───────────────────────────────────────────────────────────────────────────────────────────────


def identity() -> tuple[object, ...]:
    """What speed depends on: versions, processor, torch's settings, threads."""
    mkldnn = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    chosen = {
        name: value for name, value in os.environ.items() if name.startswith(("ONEDNN_", "DNNL_", "MKL_ENABLE", "KMP_"))
    }
    capability = torch.backends.cpu.get_cpu_capability()
    machine = (platform.machine(), cpu_name(), cpu_flags(), capability, mkldnn, sorted(chosen.items()), cpu_share())
    return (torch.__version__, *_versions(), torch.get_num_threads(), *machine)


@functools.cache
def _versions() -> tuple[str, ...]:
    """Of the packages whose code runs, as far as they are installed."""
    versions = []
    for package in ("outrider", "transformers"):
        with suppress(PackageNotFoundError):
            versions.append(version(package))
    return tuple(versions)


def cpu_name() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


def cpu_flags() -> str:
    """The processor's instruction sets; two processors of one name may differ."""
    return _cpu_line("flags") or _cpu_line("Features") or ""


def cpu_share() -> float | None:
    """The container's limit of processor time in cores; None without a limit."""
    try:
        quota, _, period = Path("/sys/fs/cgroup/cpu.max").read_text().strip().partition(" ")
    except OSError:
        return None
    return round(int(quota) / int(period), 2) if quota.isdigit() and period.isdigit() else None


def memory() -> int:
    """Bytes of memory of the machine, or of the container if it has a lower limit."""
    whole = _memory_line("MemTotal")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        whole = min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return whole


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes of free memory of a GPU, or of this machine within the container's limit."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _memory_line("MemAvailable")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def fits(size_bytes: float) -> str:
    """Why so much can't be loaded; empty if it fits into the free memory."""
    free = free_memory()
    return (
        "" if size_bytes <= free else f"it takes {size_bytes / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free"
    )


def _memory_line(name: str) -> int:
    """A field of /proc/meminfo in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
    except (OSError, StopIteration):  # a system without /proc/meminfo
        return UNKNOWN_MEMORY


@functools.cache
def _cpu_line(name: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def remembered(question: str, measure: Callable[[], Figures]) -> Figures:
    """Figures that depend on this machine and on `question`, but not on load: measured once."""
    return measurements.remembered(_place(question), measure)


def forget() -> None:
    """Forget all measurements; they are repeated when needed."""
    measurements.forget(_place("").parent)


def _place(question: str) -> Path:
    machine = hashlib.sha256(repr(identity()).encode()).hexdigest()[:16]
    return cache.folder() / "machine" / machine / f"{hashlib.sha256(question.encode()).hexdigest()[:16]}.json"


# ── timing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _time_matmuls() -> dict[str, dict[str, float]]:
    began = time.perf_counter()
    ms_by_type: dict[str, dict[str, float]] = {way: {} for way in (*TYPES, INT8)}
    for rows, before in zip(ROWS, (None, *ROWS), strict=False):
        ways = {INT8: _linear(torch.int8, rows)}
        for name, dtype in TYPES.items():
            if before is not None and ms_by_type[name][str(before)] > HOPELESS * ms_by_type["float32"][str(before)]:
                ms_by_type[name][str(rows)] = ms_by_type[name][str(before)] * rows / before
            else:
                ways[name] = _linear(dtype, rows)
        for way, ms in best_times(ways).items():
            ms_by_type[way][str(rows)] = ms
    for name, ms in best_times({name: _training_step(dtype) for name, dtype in TYPES.items()}).items():
        ms_by_type[name][TRAINING] = ms
    log.info("timed the matrix products of this machine in %.1f s: %s", time.perf_counter() - began, ms_by_type)
    return ms_by_type


def _linear(dtype: torch.dtype, rows: int) -> Callable[[], object]:
    # int8 weights, like torchao's, are converted to floats in every pass
    x = torch.ones(rows, WIDTH, dtype=dtype if dtype.is_floating_point else torch.float32)
    weights = [torch.ones(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)]
    return torch.inference_mode()(lambda: [F.linear(x, weight.to(x.dtype)) for weight in weights])


def _time_large(dtype: Precision, device: torch.device) -> float:
    """Milliseconds of a product of two matrices of LARGE x LARGE on a GPU."""
    square = torch.ones(LARGE, LARGE, dtype=TYPES[dtype], device=device)

    def product() -> None:
        square @ square
        torch.cuda.synchronize(device)

    product()
    return best_times({"": product})[""]


def _training_step(dtype: torch.dtype) -> Callable[[], object]:
    with torch.inference_mode(False):  # a target may be loaded in inference mode, where nothing has a gradient
        x, weight = torch.ones(TRAINED, TRAINED), torch.ones(TRAINED, TRAINED, requires_grad=True)
        square = torch.ones(TRAINED, TRAINED, dtype=dtype)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step() -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            F.linear(x, weight).float().sum().backward()
        return square @ square

    return step
