"""Pending output: the outputs of an engine's steps, until they are sent to the callers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from outrider.serve.calls import Call, Output

STREAMS = 8
"""Streams whose chunks are `interval_s` apart.  Total chunks per second stay the same with more streams."""

Post = Callable[[Callable[[], None]], None]


class PendingOutput:
    """Outputs by call, sent once per step, or every `interval_s` seconds if steps are shorter.

    post: runs callbacks elsewhere.  take_text: returns the text of a call that has become final since the last call.
    """

    def __init__(self, post: Post, interval_s: float, take_text: Callable[[Call], str]):
        self.post, self.interval_s, self.take_text = post, interval_s, take_text
        self._unsent: dict[Call, list[Output]] = {}
        self._last_sent = 0.0

    def put(self, call: Call, output: Output) -> None:
        self._unsent.setdefault(call, []).append(output)

    def send_due(self, now: float, streams: int, urgent: Iterable[Call]) -> None:
        """Send everything if `interval_s` is over at `now`, in seconds, for this number of streams; else only the
        urgent calls' outputs."""
        if now - self._last_sent < self.interval_s * max(1.0, streams / STREAMS):
            self.send(urgent)
        elif self._unsent:
            self.send(list(self._unsent))
            self._last_sent = time.monotonic()

    def send(self, calls: Iterable[Call]) -> None:
        """Send these calls' unsent outputs.  The text of several steps is decoded once and comes with the last one."""
        outputs: list[tuple[Call, Output]] = []
        for call in calls:
            *earlier, last = self._unsent.pop(call)
            outputs += [(call, output) for output in earlier]
            outputs.append((call, replace(last, text=last.text + self.take_text(call))))
        if outputs:
            self.post(functools.partial(_deliver, outputs))


def _deliver(outputs: Sequence[tuple[Call, Output]]) -> None:
    for call, output in outputs:
        call.receive(output)
