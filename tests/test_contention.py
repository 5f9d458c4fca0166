"""Other programs that take a run's time are noticed, the run is repeated, and a speed-up of such a moment is not
trusted."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.protocols import Drafter
from outrider.machine import contention
from outrider.machine.contention import Contention, Counters, between, calmest, mean, read
from outrider.measure.record import Entry, Measured, Run, Sample
from outrider.measure.tasks.names import Prompt
from outrider.measure.trust import possible_speedup, trust


@pytest.mark.parametrize(
    ("seconds", "lost", "repeats", "order"),
    [
        (0.1, [0.5, 0.2, 0.01, 0.0], 5, [2, 1, 0]),
        (0.1, [0.5, 0.2, 0.3], 2, [1, 2, 0]),
        (0.1, [0.5, 0.45, 0.0], 2, [1, 0]),
        (2 * contention.SHORT_S, [0.5, 0.0], 2, [0]),
    ],
)
def test_a_run_under_load_is_repeated_until_it_is_calm(seconds, lost, repeats, order, monkeypatch) -> None:
    """Catches a slow run that is kept although a calm one was measured; repeats without an end, under a load that
    lasts, or of a long run."""
    calls, left = itertools.count(), iter(lost)
    monkeypatch.setattr(contention, "between", lambda *_: Contention(seconds, next(left), None, None, None))
    found, shares = calmest(lambda: next(calls), repeats)
    assert found == order and [share.lost for share in shares] == [lost[n] for n in order]


def test_counters_become_shares() -> None:
    """Catches units that are mixed up, and a thread that ended or began in between."""
    before = Counters(10.0, {1: 1.0, 2: 5.0}, 2.0, 100.0, 50.0, 1.0)
    processors = len(os.sched_getaffinity(0))
    found = between(before, Counters(12.0, {1: 1.5, 3: 0.2}, 2.0 + 0.2 * processors, 104.0, 51.0, 3.0))
    assert found == (2.0, 0.25, pytest.approx(0.1), 1.5, 3.0)
    assert found.lost == 0.25 and found.is_high
    nothing = between(
        before._replace(run_delay_s={}, stolen=None, busy=None), Counters(11.0, {}, None, None, 51.0, None)
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
    # load slowed half of the plain runs, and 1.9x became 2.9x
    half = samples([0.010] * 4 + [0.022] * 4)
    found = trust(measured(half), speedup(half))
    assert speedup(half) > 2.5 and found["possible_speedup"] < 2 and "exceeds the 1.92×" in found["under_load"]
    assert found["speedup"] is None and found["speedup_range"] is None, "what can not be true is no figure"
    assert trust(measured(some), speedup(some)).get("speedup", "kept") == "kept"
    # it slowed all of them: a drafted step is never taken for cheaper than a plain one
    slow = samples([0.030] * 8)
    assert possible_speedup(slow) <= 2.5 and trust(measured(slow), speedup(slow))["under_load"] is not None


def test_a_busy_machine_and_shared_processors_are_reasons() -> None:
    """Catches times that are trusted although other programs, or other processes of the evaluation, took theirs."""
    some = samples([0.010] * 8, lost=0.4)
    found = trust(measured(some), speedup(some))
    assert found["contention"] == pytest.approx(0.4) and "other programs took 40 % of its time" in found["under_load"]
    calm = samples([0.010] * 8, lost=0.01)
    assert trust(measured(calm), speedup(calm))["under_load"] is None
    assert "2 processes shared this machine" in trust(measured(calm, 2), speedup(calm))["under_load"]


def test_counters_are_read_where_the_system_has_them(tmp_path: Path) -> None:
    """Catches a column of another counter, other processors than ours, and a zero where nothing was counted."""
    found = read(tmp_path)
    assert (found.run_delay_s, found.stolen, found.busy, found.queue) == ({}, None, None, None)
    thread, own, tick = tmp_path / "self/task/7", min(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    thread.mkdir(parents=True)
    (thread / "schedstat").write_text("9 2500000000 4")
    columns = "100 200 300 4000 5000 600 700 800 900 1000"
    (tmp_path / "stat").write_text(f"cpu {columns}\ncpu{own} {columns}\ncpu99999 {columns}\n")
    (tmp_path / "loadavg").write_text("0.1 0.2 0.3 5/600 1234")
    found = read(tmp_path)
    assert (found.run_delay_s, found.stolen, found.busy, found.queue) == ({7: 2.5}, 800 / tick, 1900 / tick, 5.0)
