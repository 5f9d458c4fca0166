"""Peak memory since the last reset, of the accelerator if there is one, else of this process.

`ru_maxrss` can't be used: it never falls, so every drafter would get the first one's peak.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider import machine

PEAK = "5"
"""Written to clear_refs, this makes Linux reset the peak of resident memory to its current value."""


def reset(device: torch.device, process: Path = Path("/proc/self")) -> bool:
    """Reset the peak.  Returns False if the system does not support that; `peak_bytes` is meaningless then."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    machine.release_freed_memory()
    try:
        (process / "clear_refs").write_text(PEAK)
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device, process: Path = Path("/proc/self")) -> int | None:
    """Peak bytes since `reset`; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
