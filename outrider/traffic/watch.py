"""Is the drafter in production as good as at its release?  Compares a server's counters with the release's interval.

No torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx

from outrider.errors import DataError
from outrider.traffic.counters import Counters, SpeculationStats, merged, scrape
from outrider.traffic.drift import Drift
from outrider.traffic.release import Release

MINUTE_S, TEN_MINUTES_S = 60.0, 600.0
ONCE_SIGMAS = 3.29
"""For a single reading: 1 false alarm in 1000."""
SIDES = {None: None, -1: "below", 0: "inside", 1: "above"}
"""The name of a side in JSON."""
COUNTS = ("tokens_per_step", "tokens_per_draft", "steps", "drafts", "drafted", "accepted", "by_position", "generated")
"""The fields of a window in JSON."""


class Window(NamedTuple):
    """Counts over a period."""

    seconds: float
    stats: SpeculationStats

    @property
    def tokens_per_s(self) -> float | None:
        return self.stats.generated / self.seconds if self.stats.generated is not None and self.seconds > 0 else None

    @property
    def steps(self) -> int:
        """All steps if the server counts them, otherwise those with a draft."""
        return self.stats.drafts if self.stats.steps is None else self.stats.steps

    def json(self) -> dict[str, Any]:
        counts = {name: getattr(self.stats, name) for name in COUNTS}
        return {"seconds": round(self.seconds, 3), **counts, "tokens_per_s": self.tokens_per_s}


def combined(parts: Sequence[Window]) -> Window:
    """Several periods as one: counts are added, gauges weighted by their drafts."""
    return Window(sum(part.seconds for part in parts), merged([part.stats for part in parts]))


def is_comparable(stats: SpeculationStats, release: Release) -> bool:
    """Whether tokens per step mean the same as in the release: over all steps, or every step has a draft."""
    return stats.covers_every_step or release.always_drafts


class View(NamedTuple):
    """What a watch shows after a reading."""

    at_s: float
    counters: Counters
    """The latest ones."""
    minute: Window
    ten_minutes: Window
    away: str | None
    """Why the server could not be read; None if it could."""
    side: int | None
    """-1: tokens per step are below the release's interval, 1: above, 0: neither is certain; None without a comparable
    release."""
    side_since_s: float
    evidence: float
    """How close an alarm is; 1 is an alarm."""
    alarmed: bool
    """Whether this reading raised an alarm."""
    restarts: int
    steps_to_notice: float | None
    """Approximate steps until a drop of 10 % is detected; None if it lies within the release's interval."""

    def json(self) -> dict[str, Any]:
        """One log line."""
        return {
            "at": self.at_s, "server": self.counters.server, "away": self.away, "side": SIDES[self.side],
            "alarm": self.alarmed, "evidence": round(self.evidence, 4), "restarts": self.restarts,
            "running": self.counters.running, "waiting": self.counters.waiting,
            "minute": self.minute.json(), "ten_minutes": self.ten_minutes.json(),
        }  # fmt: skip


class Watch:
    """Turns readings into views.  Keeps at most ten minutes of differences."""

    def __init__(self, release: Release | None, every_s: float) -> None:
        self.drift = Drift(release, every_s) if release else None
        self.counters = Counters(None)
        self._read_at_s: float | None = None
        self._parts: deque[tuple[float, Window]] = deque()
        self._side, self._side_since_s = 0, 0.0
        self._restarts = 0

    def add(self, at_s: float, counters: Counters) -> View:
        """Add a reading of the server.  Raises DataError if it has no counters of drafts."""
        alarmed = False
        if self._read_at_s is None:
            counters.since()
        else:
            part = Window(at_s - self._read_at_s, counters.since(self.counters))
            self._restarts += part.stats.restarted
            self._parts.append((at_s, part))
            alarmed = self._judge(at_s, part)
        self.counters, self._read_at_s = counters, at_s
        while self._parts and self._parts[0][0] <= at_s - TEN_MINUTES_S:
            self._parts.popleft()
        if self._side and at_s - self._side_since_s >= TEN_MINUTES_S:
            # at least ten minutes after the alarm: a minute with little traffic may be within the interval by chance
            assert self.drift is not None
            if side_of(self.window(at_s, TEN_MINUTES_S), self.drift.release, sigmas=0) == 0:
                self._side = 0
        return self._view(at_s, None, alarmed)

    def away(self, at_s: float, why: str) -> View:
        """Records that the server could not be read."""
        return self._view(at_s, why, False)

    def window(self, at_s: float, seconds: float) -> Window:
        return combined([part for read_at_s, part in self._parts if read_at_s > at_s - seconds])

    def _judge(self, at_s: float, part: Window) -> bool:
        """Whether this period raises an alarm."""
        reached = part.stats.tokens_per_step
        if self.drift is None or reached is None or not is_comparable(part.stats, self.drift.release):
            return False
        side = int(self.drift.add(reached * part.steps, part.steps)[0])
        if not side or side == self._side:
            return False
        self._side, self._side_since_s = side, at_s
        return True

    def _view(self, at_s: float, why: str | None, alarmed: bool) -> View:
        drift = self.drift
        is_judged = drift is not None and is_comparable(self.counters.total, drift.release)
        return View(
            at_s, self.counters, self.window(at_s, MINUTE_S), self.window(at_s, TEN_MINUTES_S), why,
            self._side if is_judged else None, self._side_since_s, float(drift.evidence.max()) if drift else 0.0,
            alarmed,
            self._restarts, drift.steps_to_notice() if drift else None,
        )  # fmt: skip


def side_of(window: Window, release: Release, sigmas: float = ONCE_SIGMAS) -> int | None:
    """-1 if a single reading is below the release's interval by more than its noise, 1 if above, otherwise 0; None
    without steps, or if the server counts steps differently from the release.
    """
    reached = window.stats.tokens_per_step
    if reached is None or window.steps <= 0 or not is_comparable(window.stats, release):
        return None
    noise = sigmas * math.sqrt(release.spread / window.steps)
    _, low, high = release.tokens_per_step
    return -1 if reached + noise < low else 1 if reached - noise > high else 0


def glance(url: str, seconds: float | None = None) -> tuple[Counters, Window]:
    """Counts of the server at `url` over the next `seconds`, or since it started if that is None.

    Raises DataError if it can't be read, or has no counters of drafts.
    """
    began, before = time.monotonic(), scrape(url)
    if seconds is None:
        return before, Window(before.age_s(time.time()), before.since())
    time.sleep(seconds)
    now = scrape(url)
    return now, Window(time.monotonic() - began, now.since(before))


def watch_server(url: str, release: Release | None, every_s: float, for_s: float | None = None) -> Iterator[View]:
    """A view of the server now and after every `every_s` seconds, for `for_s` seconds.

    Raises DataError if the first reading fails; later failures are part of the view.
    """
    watch, epoch_s = Watch(release, every_s), time.time() - time.monotonic()
    now = lambda: epoch_s + time.monotonic()  # never jumps, unlike the machine's clock
    with httpx.Client(timeout=max(2.0, min(every_s, 10.0))) as client:
        yield watch.add(now(), scrape(url, client))
        began, readings = time.monotonic(), 0
        while True:
            readings += 1
            due = began + readings * every_s
            if for_s is not None:
                if due > began + for_s + every_s / 2 and readings > 1:
                    return
                due = min(due, began + for_s)  # the last reading, or the only one if for_s < every_s
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                view = watch.add(now(), scrape(url, client))
            except DataError as error:
                view = watch.away(now(), str(error))
            yield view
            readings = max(readings, int((time.monotonic() - began) / every_s))  # skips what a slow server delayed
