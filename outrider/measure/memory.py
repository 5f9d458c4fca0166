"""The highest memory in use since it was last asked to forget: of the accelerator where there is one, else of this process.

`ru_maxrss` won't do: it never falls, so the first drafter's peak would be everybody's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider import machine

PEAK = "5"
"""What Linux takes in clear_refs as: set the peak of resident memory to what is resident now."""


def forget(device: torch.device, process: Path = Path("/proc/self")) -> bool:
    """Begin anew.  Returns whether that can be done here; where not, there is nothing to read afterwards."""
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
    """Bytes at the highest since `forget`; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
