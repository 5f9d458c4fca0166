"""Which processes are still alive: each writes heartbeats, from a thread, to the launcher's store.

When a process dies, the others see only a broken connection, which does not say which process died; the heartbeats do.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

BEAT_S = 0.5
"""Time between heartbeats."""
STILL_S = 3.0
"""After a broken connection, a process without a heartbeat for this long is considered dead."""
LOST_S = 120.0
"""A process without a heartbeat for this long is dead even if no connection broke, for example because its machine is
gone; all others then exit."""


class Watch:
    """Writes this process's heartbeats and watches those of the others."""

    def __init__(self, store: Any, rank: int, count: int):
        """store: a torch.distributed store, used only by this training run."""
        self._store, self._own = store, store.clone()
        """Two connections: one for queries, one for the thread, which must not wait for them."""
        self.rank, self.count = rank, count
        self._beats: dict[int, tuple[bytes, float]] = {}
        """Last heartbeat of each other process, and when it arrived."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats, once all processes are done."""
        self._is_over.set()
        self._thread.join(2 * BEAT_S)

    def claim(self) -> bool:
        """Whether this process is the first to report why all exit; the others exit silently."""
        try:
            return bool(self._store.add("said", 1) == 1)
        except RuntimeError:  # the store died with its process
            return True

    def wait_for_lost(self) -> list[int]:
        """Wait a few seconds for dead processes to show; empty if all are alive, or one has reported why it exits."""
        until = time.monotonic() + 3 * STILL_S
        while time.monotonic() < until:
            if lost := self.lost(STILL_S):
                return lost
            if self._has_spoken():
                return []
            time.sleep(BEAT_S)
        return []

    def lost(self, still_s: float) -> list[int]:
        """Ranks without a heartbeat for `still_s` seconds; rank 0 if the store died with it."""
        now = time.monotonic()
        return sorted(rank for rank, (_, since) in list(self._beats.items()) if now - since > still_s)

    def obituary(self, lost: Sequence[int]) -> str:
        """The error message for processes that have died."""
        which = f"process {lost[0]}" if len(lost) == 1 else f"processes {', '.join(map(str, lost))}"
        return (
            f"{which} of {self.count} died (killed, out of memory, or its machine is gone), so all stop; the last "
            "checkpoint is intact: restart with any number of processes"
        )

    def _has_spoken(self) -> bool:
        try:
            return bool(self._store.check(["said"]))
        except RuntimeError:
            return False

    def _beat(self) -> None:
        number = 0
        while not self._is_over.wait(BEAT_S):
            number += 1
            try:
                self._own.set(f"beat/{self.rank}", str(number))
                self._look()
            except RuntimeError:  # the store has died, and rank 0 with it
                self._beats.setdefault(0, (b"", time.monotonic()))
            if (lost := self.lost(LOST_S)) and not self._is_over.is_set():
                if self.claim():
                    print(f"error {self.obituary(lost)}", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread is blocked on the lost process and can't be interrupted

    def _look(self) -> None:
        now = time.monotonic()
        for rank in range(self.count):
            key = f"beat/{rank}"
            if rank == self.rank or not self._own.check([key]):
                continue
            beat = self._own.get(key)
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
