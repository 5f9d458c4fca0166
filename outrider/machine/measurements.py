"""Figures that are measured once and stored: the shortest times of the first processes, in quiet moments."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.machine.contention import watched
from outrider.storage import cache

log = logging.getLogger(__name__)

Figures = dict[str, dict[str, float]]
"""By way, then by column."""
MIN_REPEATS, MAX_REPEATS, ENOUGH_S = 3, 12, 0.015
"""Alternatives are timed in turn until ENOUGH_S seconds are spent on each; the fastest run counts."""
PROCESSES = 3
"""Number of processes that measure, the first ones."""
TRIES, LONG_S = 3, 5.0
"""Maximum number of attempts of a process while other programs disturb it; a longer attempt is the last."""
OTHERS = 0.3
"""Processors in use by other programs, from which on a measurement counts as disturbed."""
BUSY = 1.5
"""Running programs per thread, including this one, above which times are not stored."""

_memory: dict[Path, Figures] = {}


class Record(NamedTuple):
    """The stored content of one file."""

    ms: Figures
    """By way, then by column: the shortest of all measurements, since load only adds."""
    processes: int
    """Number of processes that have measured."""


def timed(path: Path, measure: Callable[[], Figures], processes: int = PROCESSES) -> Figures:
    """The times stored in this file.  Each of the first processes measures, which corrects for moments of load."""
    if path not in _memory:
        stored = _read(path)
        if stored is None or stored.processes < processes:
            stored = _measured(path, stored, measure)
        _memory[path] = stored.ms
    return _memory[path]


def _measured(path: Path, stored: Record | None, measure: Callable[[], Figures]) -> Record:
    """Measure, again if other programs disturbed it; stored only if one attempt was quiet."""
    times, count = {} if stored is None else stored.ms, 1 if stored is None else stored.processes + 1
    for _ in range(TRIES):
        new_times, contention = watched(measure)
        times = _least(times, new_times) if times else new_times
        if not contention.is_high and (contention.others or 0.0) < OTHERS and not is_busy():
            _write(path, Record(times, count))
            return Record(times, count)
        if contention.seconds > LONG_S:
            break
    log.info("other programs are busy: these times are not stored, and the next process measures again")
    return Record(times, count)


def _least(one: Figures, other: Figures) -> Figures:
    """The shorter time of each way and column that both have."""
    if {way: columns.keys() for way, columns in one.items()} != {way: columns.keys() for way, columns in other.items()}:
        return other
    return {
        way: {column: min(ms, other[way][column]) for column, ms in columns.items()} for way, columns in one.items()
    }


def remembered(path: Path, measure: Callable[[], Figures]) -> Figures:
    """The figures stored in this file, which do not depend on load.  Empty ones, which can't be measured now, are not
    stored."""
    if path not in _memory:
        stored = _read(path)
        if stored is None:
            stored = Record(measure(), 1)
            if stored.ms:
                _write(path, stored)
        _memory[path] = stored.ms
    return _memory[path]


def forget(folder: Path) -> None:
    """Delete everything stored in this folder."""
    _memory.clear()
    for path in folder.glob("*.json"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> Record | None:
    """None for a file that is missing, damaged, or was written by another version."""
    try:
        record = json.loads(cache.read(path))
        ms = {way: {column: float(ms) for column, ms in columns.items()} for way, columns in record["ms"].items()}
        return Record(ms, int(record["processes"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _write(path: Path, record: Record) -> None:
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with suppress(OSError), cache.keeping(path) as part:  # if the folder is not writable, every process measures
        part.write_text(json.dumps(about | record._asdict()))


def is_busy() -> bool:
    """Whether other programs used most of the cores in the last minute, so that times may be wrong."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * torch.get_num_threads()


def best_times(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each way's fastest run, without the first, which pages in memory and wakes threads.

    The ways run in turn, so that other load slows all of them; long ones run fewer times.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for run in ways.values():
        run()
    for repeat in range(MAX_REPEATS):
        for way, run in ways.items():
            spent = sum(seconds[way])
            if spent < ENOUGH_S or (repeat < MIN_REPEATS and spent < LONG_S):
                began = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - began)
    return {way: 1e3 * min(runs) for way, runs in seconds.items()}
