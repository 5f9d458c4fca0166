"""Which of several processes are still alive: each beats, in a thread, into the launcher's store.

Of a process that dies the others learn by a broken connection, which does not say whose; the beats do.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

BEAT_S = 0.5
"""Between two beats."""
STILL_S = 3.0
"""A process whose beat stood still for so long has died, where a connection broke."""
LOST_S = 120.0
"""And also where none did, such as that of a machine which is gone: all others end."""


class Watch:
    """Beats for this process, and looks at the beats of the others."""

    def __init__(self, store: Any, rank: int, count: int):
        """store: of torch.distributed, one for this training."""
        self._store, self._own = store, store.clone()
        """For questions, and for the thread, which must not wait for them."""
        self.rank, self.count = rank, count
        self._beats: dict[int, tuple[bytes, float]] = {}
        """Of each other process, its last beat and when it came."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Beat no more; all processes are done."""
        self._is_over.set()
        self._thread.join(2 * BEAT_S)

    def claim(self) -> bool:
        """Whether this process is the first to say why all end; the others end in silence."""
        try:
            return bool(self._store.add("said", 1) == 1)
        except RuntimeError:  # the store has died with its process
            return True

    def wait_for_lost(self) -> list[int]:
        """The processes that have died, in a few seconds; none where all beat, or one has said why it ends."""
        until = time.monotonic() + 3 * STILL_S
        while time.monotonic() < until:
            if lost := self.lost(STILL_S):
                return lost
            if self._has_spoken():
                return []
            time.sleep(BEAT_S)
        return []

    def lost(self, still_s: float) -> list[int]:
        """Ranks whose beat stood still for so long; the first, where the store went with it."""
        now = time.monotonic()
        return sorted(rank for rank, (_, since) in list(self._beats.items()) if now - since > still_s)

    def obituary(self, lost: Sequence[int]) -> str:
        """What to say of processes that have died."""
        which = f"process {lost[0]}" if len(lost) == 1 else f"processes {', '.join(map(str, lost))}"
        return (
            f"{which} of {self.count} died (killed, out of memory, or its machine is gone), so all stop; the last "
            "checkpoint is intact: start again, with any number of processes"
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
            except RuntimeError:  # the store has died, and the first process with it
                self._beats.setdefault(0, (b"", time.monotonic()))
            if (lost := self.lost(LOST_S)) and not self._is_over.is_set():
                if self.claim():
                    print(f"error {self.obituary(lost)}", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread waits for the lost one, and can't be reached

    def _look(self) -> None:
        now = time.monotonic()
        for rank in range(self.count):
            key = f"beat/{rank}"
            if rank == self.rank or not self._own.check([key]):
                continue
            beat = self._own.get(key)
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
