"""What timings depend on besides the code: machine, libraries, number type.  Times of two reports are compared only if
these agree.

Outrider's commit is not part of it, since it usually differs between two reports.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from outrider import machine
from outrider.report.compare import Fact

T = TypeVar("T")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
GPU_FACTS = {
    "gpu": "name", "gpu_driver": "driver_version", "gpu_clock_most_mhz": "clocks.max.sm",
    "gpu_clock_chosen_mhz": "clocks.applications.graphics", "gpu_power_limit_w": "power.limit",
}  # fmt: skip
"""Our names and nvidia-smi's.  The current clock is omitted because it changes with every reading."""


def fingerprint(target: Any = None, **more: Fact) -> dict[str, Fact]:
    """Names and values; `target` adds its number type, whether its steps are compiled, and its quantization."""
    device = torch.device("cpu") if target is None else target.device
    facts: dict[str, Fact] = {
        "cpu": machine.cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_governor": _or_none(lambda: GOVERNOR.read_text().strip() or None),
        "cpu_share": machine.cpu_share(),
        # whole gigabytes: the kernel's own share varies between boots
        "memory_gb": _or_none(lambda: round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _or_none(lambda: version("transformers")),
        "torchao": _or_none(lambda: version("torchao")),
        "mkldnn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
    }
    if device.type == "cuda":
        facts |= _gpu(device.index or 0) | {"cuda": torch.version.cuda}
    if target is not None:
        facts |= {
            "dtype": target.spec.dtype, "quantised": target.spec.quantised, "compiled": target.step.graph is not None,
        }  # fmt: skip
    return facts | more


def _gpu(index: int) -> dict[str, Fact]:
    """Facts from nvidia-smi; all None if it is not installed."""
    command = [
        "nvidia-smi",
        f"--id={index}",
        f"--query-gpu={','.join(GPU_FACTS.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(GPU_FACTS)
    return dict(zip(GPU_FACTS, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def _or_none(read: Callable[[], T]) -> T | None:
    """The result of `read`, or None if the system does not provide it."""
    try:
        return read()
    except (OSError, ValueError, PackageNotFoundError):
        return None
