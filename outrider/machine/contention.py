"""How much other programs slow down a run: time spent waiting for a processor, or stolen by the host.

Linux only; elsewhere nothing is known, and nothing is repeated.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
HIGH = 0.05
"""Share of lost time above which a run is measured again."""
SHORT_S = 30.0
"""Longest run that is measured again."""
HELPS = 0.8
"""Repeating stops if the lost time is above this share of the previous run's."""
TICKS = 3
"""Kernel clock ticks below which a counter is too coarse."""


class Counters(NamedTuple):
    """Counters of this process and its processors at one moment, in seconds since an arbitrary time."""

    at: float
    run_delay_s: dict[int, float]
    """By thread of this process: time in which it was runnable but no processor was free."""
    stolen: float | None
    """Time that the host gave to other guests."""
    busy: float | None
    """Time in which these processors worked, for any process."""
    process: float
    """Time in which they worked for this process."""
    queue: float | None
    """Runnable processes of the whole system."""


class Contention(NamedTuple):
    """The load of other programs during a run.  None if the system does not provide a figure."""

    seconds: float
    waited: float | None
    """Share of the run in which its slowest thread waited for a processor."""
    stolen: float | None
    """Share of the processors' time that the host gave to other guests."""
    others: float | None
    """Processors that worked for other programs, on average."""
    queue: float | None
    """Runnable processes at its end."""

    @property
    def lost(self) -> float | None:
        """Share of the run's time lost to others."""
        shares = [share for share in (self.waited, self.stolen) if share is not None]
        return max(shares, default=None)

    @property
    def is_high(self) -> bool:
        return (self.lost or 0.0) > HIGH


def read(proc: Path = Path("/proc")) -> Counters:
    """The current values of all counters."""
    run_delay_s: dict[int, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in (proc / "self" / "task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the thread has ended
                run_delay_s[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    stolen, busy = _processor_times(proc)
    queue = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        queue = float((proc / "loadavg").read_text().split()[3].partition("/")[0])
    return Counters(time.perf_counter(), run_delay_s, stolen, busy, time.process_time(), queue)


def _processor_times(proc: Path) -> tuple[float | None, float | None]:
    """Stolen and busy seconds of the processors that this process may use."""
    try:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        rows = [[int(ticks) for ticks in line[1:]] for line in lines if line and line[0] in allowed]
        tick = os.sysconf("SC_CLK_TCK")
        # user nice system idle iowait irq softirq steal
        return sum(row[7] for row in rows) / tick, sum(sum(row[:3]) + sum(row[5:7]) for row in rows) / tick
    except (OSError, ValueError, IndexError, AttributeError):
        return None, None


def between(before: Counters, after: Counters) -> Contention:
    """The load of other programs between two readings."""
    seconds = max(after.at - before.at, 1e-9)
    waits = [wait - before.run_delay_s.get(thread, 0.0) for thread, wait in after.run_delay_s.items()]
    waited = min(1.0, max(waits) / seconds) if waits else None
    tick = 1 / os.sysconf("SC_CLK_TCK")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    stolen = others = None
    if before.stolen is not None and after.stolen is not None:
        stolen_s = after.stolen - before.stolen
        stolen = stolen_s / (seconds * processors) if stolen_s >= TICKS * tick else 0.0
    if before.busy is not None and after.busy is not None:
        others_s = after.busy - before.busy - (after.process - before.process)
        others = others_s / seconds if others_s >= TICKS * tick else 0.0
    return Contention(seconds, waited, stolen, others, after.queue)


def watched(work: Callable[[], T]) -> tuple[T, Contention]:
    """Call `work`; returns its value and the load of other programs meanwhile."""
    before = read()
    value = work()
    return value, between(before, read())


def calmest(work: Callable[[], T], repeats: int) -> tuple[list[T], list[Contention]]:
    """Call `work`; if it was short and lost much time, call it again, at most `repeats` times and while that helps.

    Returns the values and contentions of all calls, the calmest first.
    """
    runs = [watched(work)]
    while len(runs) <= repeats and runs[-1][1].is_high and runs[-1][1].seconds < SHORT_S:
        runs.append(watched(work))
        before, now = (each[1].lost or 0.0 for each in runs[-2:])
        if now > HELPS * before:  # the load lasts
            break
    runs.sort(key=lambda each: each[1].lost or 0.0)
    return [result for result, _ in runs], [contention for _, contention in runs]


def mean(all_of: Sequence[Contention]) -> dict[str, float | None]:
    """Means over runs, weighted by their seconds: waited, stolen, others, queue."""
    means: dict[str, float | None] = {}
    for name in ("waited", "stolen", "others", "queue"):
        weighted = [(each.seconds, getattr(each, name)) for each in all_of if getattr(each, name) is not None]
        total = sum(seconds for seconds, _ in weighted)
        means[name] = sum(seconds * value for seconds, value in weighted) / total if total else None
    return means
