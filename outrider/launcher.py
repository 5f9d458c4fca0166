"""Rank of this process among those started by torchrun or `accelerate launch`, from their environment variables."""

from __future__ import annotations

import os


def launched() -> tuple[int, int] | None:
    """Rank and number of processes; None for a single process."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), count) if count > 1 else None


def machines() -> int:
    """Number of machines, if the launcher sets LOCAL_WORLD_SIZE; otherwise 1."""
    rank_and_count = launched()
    per_machine = os.environ.get("LOCAL_WORLD_SIZE")
    return 1 if rank_and_count is None or per_machine is None else -(-rank_and_count[1] // int(per_machine))


def local() -> tuple[int, int]:
    """Rank and number of processes on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
