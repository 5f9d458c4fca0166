"""Who this process is among those that torchrun or `accelerate launch` started, by the variables that they set."""

from __future__ import annotations

import os


def launched() -> tuple[int, int] | None:
    """Rank and number of processes by a launcher's variables; None for one."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), count) if count > 1 else None


def machines() -> int:
    """Number of machines that the processes are on, as far as the launcher says it."""
    place, here = launched(), os.environ.get("LOCAL_WORLD_SIZE")
    return 1 if place is None or here is None else -(-place[1] // int(here))


def local() -> tuple[int, int]:
    """Rank and number of processes of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
