"""How much other programs slow a run down: time that it waited for a processor, or that the host took away.

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
"""Share of lost time from which a run is slowed down so much that it is measured again."""
SHORT_S = 30.0
"""Longest run that is measured again."""
HELPS = 0.8
"""Share of the lost time before, above which measuring once more is not worth its time."""
TICKS = 3
"""Clock ticks of the kernel below which a counter of them says nothing."""


class Reading(NamedTuple):
    """Counters of this process and of its processors, at one moment.  Seconds, since some moment in the past."""

    at: float
    run_delay_s: dict[int, float]
    """Of each thread of this process: time in which it could have run and no processor was free."""
    stolen: float | None
    """Time that the host gave to other guests."""
    busy: float | None
    """Time in which these processors worked, whoever it was for."""
    own: float
    """Time in which they worked for this process."""
    queue: float | None
    """Processes that could run, of the whole system."""


class Contention(NamedTuple):
    """What other programs took during a run.  None where the system does not tell."""

    seconds: float
    waited: float | None
    """Share of the run in which its slowest thread waited for a processor."""
    stolen: float | None
    """Share of the processors' time that the host gave to other guests."""
    others: float | None
    """Processors that worked for other programs, on average."""
    queue: float | None
    """Processes that could run, at its end."""

    @property
    def lost(self) -> float | None:
        """Share of the run's time that it lost to others."""
        known = [share for share in (self.waited, self.stolen) if share is not None]
        return max(known, default=None)

    @property
    def is_high(self) -> bool:
        return (self.lost or 0.0) > HIGH


def read(proc: Path = Path("/proc")) -> Reading:
    """The current values of all counters."""
    run_delay_s: dict[int, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in (proc / "self" / "task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has ended
                run_delay_s[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    stolen, busy = _processor_times(proc)
    queue = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        queue = float((proc / "loadavg").read_text().split()[3].partition("/")[0])
    return Reading(time.perf_counter(), run_delay_s, stolen, busy, time.process_time(), queue)


def _processor_times(proc: Path) -> tuple[float | None, float | None]:
    """Seconds stolen from, and worked by, the processors that this process may use."""
    try:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        rows = [[int(ticks) for ticks in line[1:]] for line in lines if line and line[0] in allowed]
        tick = os.sysconf("SC_CLK_TCK")
        # user nice system idle iowait irq softirq steal
        return sum(row[7] for row in rows) / tick, sum(sum(row[:3]) + sum(row[5:7]) for row in rows) / tick
    except (OSError, ValueError, IndexError, AttributeError):
        return None, None


def between(before: Reading, after: Reading) -> Contention:
    """What other programs took between two readings."""
    seconds = max(after.at - before.at, 1e-9)
    waits = [wait - before.run_delay_s.get(thread, 0.0) for thread, wait in after.run_delay_s.items()]
    waited = min(1.0, max(waits) / seconds) if waits else None
    tick, processors = (
        1 / os.sysconf("SC_CLK_TCK"),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    )
    stolen = others = None
    if before.stolen is not None and after.stolen is not None:
        taken = after.stolen - before.stolen
        stolen = taken / (seconds * processors) if taken >= TICKS * tick else 0.0
    if before.busy is not None and after.busy is not None:
        worked = after.busy - before.busy - (after.own - before.own)
        others = worked / seconds if worked >= TICKS * tick else 0.0
    return Contention(seconds, waited, stolen, others, after.queue)


def watched(work: Callable[[], T]) -> tuple[T, Contention]:
    """Call `work`, and say what other programs took meanwhile."""
    before = read()
    found = work()
    return found, between(before, read())


def calmest(work: Callable[[], T], repeats: int) -> tuple[list[T], list[Contention]]:
    """Call `work`; where it was short and lost much time, call it again, at most `repeats` times and while that helps.

    Returns what every call gave, the calmest first, with what each lost.
    """
    found = [watched(work)]
    while len(found) <= repeats and found[-1][1].is_high and found[-1][1].seconds < SHORT_S:
        found.append(watched(work))
        before, now = (each[1].lost or 0.0 for each in found[-2:])
        if now > HELPS * before:  # the load lasts
            break
    found.sort(key=lambda each: each[1].lost or 0.0)
    return [result for result, _ in found], [contention for _, contention in found]


def mean(all_of: Sequence[Contention]) -> dict[str, float | None]:
    """Means over runs, weighted by their seconds: waited, stolen, others, queue."""
    found: dict[str, float | None] = {}
    for name in ("waited", "stolen", "others", "queue"):
        known = [(each.seconds, getattr(each, name)) for each in all_of if getattr(each, name) is not None]
        total = sum(seconds for seconds, _ in known)
        found[name] = sum(seconds * value for seconds, value in known) / total if total else None
    return found
