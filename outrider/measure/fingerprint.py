"""What times depend on besides the code: machine, libraries, number type.  Two reports with other values are not compared.

The commit of Outrider is not in it: that is what changes between them.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from outrider import machine
from outrider.report.fingerprint import Value

GPU_FACTS = {
    "gpu": "name", "gpu_driver": "driver_version", "gpu_clock_most_mhz": "clocks.max.sm",
    "gpu_clock_chosen_mhz": "clocks.applications.graphics", "gpu_power_limit_w": "power.limit",
}  # fmt: skip
"""What nvidia-smi calls them.  The clock of the moment is not among them: it is never twice the same."""


def fingerprint(target: Any = None, **more: Value) -> dict[str, Value]:
    """Names and values; `target` adds its number type, whether its steps are compiled, and what it is quantised to."""
    device = torch.device("cpu") if target is None else target.device
    found: dict[str, Value] = {
        "cpu": machine.cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_governor": _line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_share": machine.cpu_share(),
        "memory_gb": _memory_gb(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "torchao": _version("torchao"),
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


def _memory_gb() -> int | None:
    """Whole gigabytes: what a kernel keeps for itself moves the rest from boot to boot."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (OSError, ValueError):
        return None


def _gpu(index: int) -> dict[str, Value]:
    """By nvidia-smi, where it is; else nothing."""
    asked = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(GPU_FACTS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(GPU_FACTS)
    return dict(zip(GPU_FACTS, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def _line(path: str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
