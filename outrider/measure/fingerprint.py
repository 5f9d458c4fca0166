"""What times depend on besides the code: machine, libraries, number type.  Times of two reports are compared only where
these agree.

The commit of Outrider is not part of it: the commit is what changes between two reports.
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
from outrider.report.fingerprint import Value

T = TypeVar("T")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
GPU_FACTS = {
    "gpu": "name", "gpu_driver": "driver_version", "gpu_clock_most_mhz": "clocks.max.sm",
    "gpu_clock_chosen_mhz": "clocks.applications.graphics", "gpu_power_limit_w": "power.limit",
}  # fmt: skip
"""Our names, and nvidia-smi's.  The current clock is left out: it is different at each reading."""


def fingerprint(target: Any = None, **more: Value) -> dict[str, Value]:
    """Names and values; `target` adds its number type, whether its steps are compiled, and what it is quantised to."""
    device = torch.device("cpu") if target is None else target.device
    found: dict[str, Value] = {
        "cpu": machine.cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_governor": _known(lambda: GOVERNOR.read_text().strip() or None),
        "cpu_share": machine.cpu_share(),
        # whole gigabytes: what a kernel keeps for itself moves the rest from boot to boot
        "memory_gb": _known(lambda: round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _known(lambda: version("transformers")),
        "torchao": _known(lambda: version("torchao")),
        "mkldnn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
    }
    if device.type == "cuda":
        found |= _gpu(device.index or 0) | {"cuda": torch.version.cuda}
    if target is not None:
        found |= {
            "dtype": target.spec.dtype, "quantised": target.spec.quantised, "compiled": target.step.graph is not None,
        }  # fmt: skip
    return found | more


def _gpu(index: int) -> dict[str, Value]:
    """What nvidia-smi says; None for each fact where it is not installed."""
    asked = [
        "nvidia-smi",
        f"--id={index}",
        f"--query-gpu={','.join(GPU_FACTS.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(GPU_FACTS)
    return dict(zip(GPU_FACTS, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def _known(read: Callable[[], T]) -> T | None:
    """The result of `read`; None where the system does not have it."""
    try:
        return read()
    except (OSError, ValueError, PackageNotFoundError):
        return None
