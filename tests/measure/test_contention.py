"""Other programs that take a run's time are noticed, the run is repeated, and a speed-up of such a moment is not
trusted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.protocols import Drafter
from outrider.measure import contention
from outrider.measure.contention import Contention, Reading, between, calmest, mean, read, watched
from outrider.measure.record import Entry, Measured, Run, Sample
from outrider.measure.tasks import Prompt
from outrider.measure.trust import possible_speedup, trust

log = logging.getLogger(__name__)
BURN = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
needs_schedstat = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waiting")


def work(seconds: float) -> None:
    """Use the processor for so long, by the clock on the wall."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that burn a processor each."""
    started = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        time.sleep(0.3)  # until they run
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@needs_schedstat
def test_a_busy_process_is_noticed() -> None:
    """The planted fault: two more programs than processors.  Without them the same work waits less."""
    with busy(2 * len(os.sched_getaffinity(0))):
        _, loaded = watched(lambda: work(1.0))
    assert loaded.is_high and loaded.lost > 0.2
    assert loaded.others > 0.3
    assert loaded.queue >= 1


@needs_schedstat
def test_a_run_under_load_is_repeated_until_it_is_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slow run that is kept although a calm one was measured, and repeats without an end."""
    calls: list[int] = []

    def once() -> int:
        calls.append(len(calls))
        return calls[-1]

    lost = iter([0.5, 0.2, 0.01, 0.0])
    monkeypatch.setattr(contention, "between", lambda *_: Contention(0.1, next(lost), None, None, None))
    found, shares = calmest(once, 5)
    assert found == [2, 1, 0] and shares[0].lost == 0.01
    calls.clear()
    lost = iter([0.5, 0.2, 0.3])
    found, shares = calmest(once, 2)
    assert found == [1, 2, 0] and shares[0].lost == 0.2


def test_a_load_that_lasts_does_not_triple_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an evaluation on a busy server that takes three times as long and finds nothing calmer."""
    lost = iter([0.5, 0.45, 0.0])
    monkeypatch.setattr(contention, "between", lambda *_: Contention(0.1, next(lost), None, None, None))
    assert len(calmest(lambda: "run", 2)[0]) == 2


def test_a_long_run_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an hour that is measured three times."""
    found = Contention(2 * contention.SHORT_S, 0.5, None, None, None)
    monkeypatch.setattr(contention, "between", lambda *_: found)
    assert calmest(lambda: "run", 2) == (["run"], [found])


def test_counters_become_shares() -> None:
    """Catches units that are mixed up, and a thread that ended or began in between."""
    before = Reading(10.0, {1: 1.0, 2: 5.0}, 2.0, 100.0, 50.0, 1.0)
    processors = len(os.sched_getaffinity(0))
    found = between(before, Reading(12.0, {1: 1.5, 3: 0.2}, 2.0 + 0.2 * processors, 104.0, 51.0, 3.0))
    assert found == (2.0, 0.25, pytest.approx(0.1), 1.5, 3.0)
    assert found.lost == 0.25 and found.is_high
    nothing = between(
        before._replace(run_delay_s={}, stolen=None, busy=None), Reading(11.0, {}, None, None, 51.0, None)
    )
    assert (nothing.waited, nothing.stolen, nothing.others, nothing.lost, nothing.is_high) == (
        None,
        None,
        None,
        None,
        False,
    )
    assert mean([found, nothing])["waited"] == 0.25
    # a tick or two of 10 ms are no measurement
    assert between(before, before._replace(at=10.1, stolen=2.01)).stolen == 0.0


def test_a_system_without_counters_is_not_known(tmp_path: Path) -> None:
    """Catches a zero where nothing was counted."""
    found = read(tmp_path)
    assert (found.run_delay_s, found.stolen, found.busy, found.queue) == ({}, None, None, None)


# ── what a speed-up is worth ──────────────────────────────────────────────────────────────────────────────────────────


def samples(
    plain_step_s: list[float], step_s: float = 0.012, tokens: int = 60, steps: int = 24, **more: Any
) -> list[Sample]:
    """Prompts whose plain steps took so long each; drafted ones write 2.5 tokens a step."""
    found = []
    for number, plain_s in enumerate(plain_step_s):
        text = list(range(tokens))
        plain = Run(
            text, tokens, verify_s=tokens * plain_s, seconds=0.05 + tokens * plain_s, first_s=0.05 + plain_s, **more
        )
        run = Run(
            text, steps, draft_s=steps * step_s / 4, verify_s=steps * step_s * 3 / 4, seconds=0.05 + steps * step_s,
            first_s=0.05 + step_s, **more,
        )  # fmt: skip
        found.append(Sample(Prompt(str(number), ("?",)), run, plain, [text], 1.0))
    return found


def measured(some: list[Sample], processes: int = 1) -> Measured:
    return Measured(Entry("n", Drafter()), "quiz", some, processes=processes)


def speedup(some: list[Sample]) -> float:
    return sum(sample.plain.seconds for sample in some) / sum(sample.run.seconds for sample in some)


def test_what_is_possible_is_tokens_per_step_by_the_times_of_passes() -> None:
    """By hand: 2.5 tokens a step at 12 ms, against 10 ms a token, with 50 ms of reading on both sides."""
    some = samples([0.010] * 8)
    assert possible_speedup(some) == pytest.approx((0.05 + 60 * 0.010) / (0.05 + 24 * 0.012))
    found = trust(measured(some), speedup(some))
    assert found["under_load"] is None and found["possible_speedup"] == pytest.approx(speedup(some))


def test_a_speed_up_above_what_is_possible_is_not_trusted() -> None:
    """The planted fault: load slowed half of the plain runs, and 1.9x became 2.9x at 2.5 tokens a step."""
    some = samples([0.010] * 4 + [0.022] * 4)
    assert speedup(some) > 2.5
    found = trust(measured(some), speedup(some))
    assert found["possible_speedup"] < 2 and "is more than the 1.92×" in found["under_load"]


def test_a_drafted_step_is_never_taken_for_cheaper_than_a_plain_one() -> None:
    """Catches a bound above tokens per step, where load slowed every plain run."""
    some = samples([0.030] * 8)
    assert possible_speedup(some) <= 2.5
    assert trust(measured(some), speedup(some))["under_load"] is not None


def test_a_busy_machine_and_shared_processors_are_reasons() -> None:
    """Catches times that are trusted although other programs, or other processes of the evaluation, took theirs."""
    some = samples([0.010] * 8, lost=0.4)
    found = trust(measured(some), speedup(some))
    assert found["contention"] == pytest.approx(0.4) and "other programs took 40 % of its time" in found["under_load"]
    calm = samples([0.010] * 8, lost=0.01)
    assert trust(measured(calm), speedup(calm))["under_load"] is None
    assert "2 processes shared this machine" in trust(measured(calm, 2), speedup(calm))["under_load"]
