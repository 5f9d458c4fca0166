"""The highest memory in use since the last reset: of the accelerator where there is one, else of this process.

`ru_maxrss` can't be used: it never falls, so every drafter would have the first one's peak.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider import machine

PEAK = "5"
"""Written to clear_refs, it tells Linux to set the peak of resident memory to what is resident now."""


def reset(device: torch.device, process: Path = Path("/proc/self")) -> bool:
    """Reset the peak.  Returns whether that can be done here; where it can't, `peak` has nothing to read."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    machine.release_freed_memory()
    try:
        (process / "clear_refs").write_text(PEAK)
    except OSError:
        return False
    return True


def peak(device: torch.device, process: Path = Path("/proc/self")) -> int | None:
    """The highest number of bytes since `reset`; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
