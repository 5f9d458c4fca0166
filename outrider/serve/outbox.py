"""What callers are owed: the outputs of an engine's steps, until they are sent."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from outrider.serve.calls import Call, Output

STREAMS = 8
"""Streams whose pieces are `interval_s` apart.  To more streams, as many pieces are sent in a second as to these."""

Post = Callable[[Callable[[], None]], None]


class Outbox:
    """Outputs by call, sent once a step, or once every `interval_s` seconds where steps are shorter.

    post: runs callbacks elsewhere.  text: what became final of a call's text since this was last asked.
    """

    def __init__(self, post: Post, interval_s: float, text: Callable[[Call], str]):
        self.post, self.interval_s, self.text = post, interval_s, text
        self._unsent: dict[Call, list[Output]] = {}
        self._sent = 0.0

    def put(self, call: Call, output: Output) -> None:
        self._unsent.setdefault(call, []).append(output)

    def send_due(self, now: float, streams: int, urgent: Iterable[Call]) -> None:
        """Send everything if its time has come at `now`, in seconds, with so many streams; else what is urgent."""
        if now - self._sent < self.interval_s * max(1.0, streams / STREAMS):
            self.send(urgent)
        elif self._unsent:
            self.send(list(self._unsent))
            self._sent = time.monotonic()

    def send(self, calls: Iterable[Call]) -> None:
        """What these calls have not been given; a text is decoded once for all those steps, and comes with the last."""
        found: list[tuple[Call, Output]] = []
        for call in calls:
            *earlier, last = self._unsent.pop(call)
            found += [(call, output) for output in earlier]
            found.append((call, replace(last, text=last.text + self.text(call))))
        if found:
            self.post(functools.partial(_deliver, found))


def _deliver(outputs: Sequence[tuple[Call, Output]]) -> None:
    for call, output in outputs:
        call.receive(output)
