"""The engine's counters: they say what it did, never fall, and are read by those who watch other servers."""

import bisect
import json
import math
import random
import threading
from types import SimpleNamespace

import pytest
from conftest import Case
from prometheus_client.parser import text_string_to_metric_families

from outrider.decoding.state import Request
from outrider.sampling.settings import Sampling
from outrider.serve.calls import Call
from outrider.serve.engine import Engine
from outrider.serve.records import counts, metrics
from outrider.serve.records.counts import DEEPEST, HISTORY_S
from outrider.serve.records.metrics import StepRecord, Telemetry
from outrider.traffic.counters import read
from tests.serve.test_engine import mixed, served


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=found, time=lambda: 1.7e9))
    return found


def call(clock: Clock | None = None, prompt: int = 3) -> Call:
    found = Call(Request(list(range(prompt)), 9, Sampling()), lambda output: None)
    found.arrived = clock.now if clock else 0.0
    return found


def admitted(telemetry: Telemetry, count: int = 1, clock: Clock | None = None) -> list[Call]:
    calls = [call(clock) for _ in range(count)]
    for one in calls:
        telemetry.arrived(one)
        telemetry.admitted(one)
    return calls


def step(
    calls: list[Call], accepted: list[int], drafted: list[int], seconds: float = 0.0, read_tokens: int = 0,
    parts: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> StepRecord:  # fmt: skip
    """One step of chains: each call gets its accepted tokens and one more."""
    tokens = [count + 1 for count in accepted]
    return StepRecord(calls, tokens, accepted, drafted, drafted, seconds, *parts, read_tokens)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values by name and labels, as Prometheus reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[f"outrider:{name}", tuple(sorted(({"model_name": "tiny"} | labels).items()))]


def test_counters_are_the_sums_over_all_calls(target, prompts, drafter_of):
    """Catches a step that is counted twice, for the wrong slot, or not at all."""
    telemetry = Telemetry("tiny", 4, length=128)
    with Engine(target, drafter_of(Case("dspark")), slots=4, length=128, policy="fixed", telemetry=telemetry) as engine:
        callers = served(engine, mixed(prompts, 10, seed=4))
    calls = [caller.call for caller in callers]
    text = telemetry.text()
    found = read(text)
    whole = found.since()
    assert (found.server, found.running, found.waiting) == ("Outrider", 0, 0)
    assert whole.steps == sum(one.steps for one in calls)
    assert whole.generated == sum(one.written for one in calls)
    assert whole.drafted == sum(one.drafted for one in calls)
    assert whole.accepted == sum(one.accepted for one in calls) == sum(whole.by_position) > 0
    assert whole.tokens_per_step == whole.generated / whole.steps and whole.covers_every_step
    assert 0 <= whole.steps + whole.accepted - whole.generated <= len(calls)
    assert 0 < whole.drafts < whole.steps  # some of these requests want no drafts
    reached = [
        value(text, "spec_decode_num_drafts_per_pos_total", position=str(k)) for k in range(len(whole.by_position))
    ]
    assert reached[0] == whole.drafts
    assert all(accepted <= drafts for accepted, drafts in zip(whole.by_position, reached, strict=True))
    assert value(text, "prompt_tokens_total") == sum(len(one.request.prompt) for one in calls)
    assert value(text, "time_to_first_token_seconds_count") == len(calls)
    assert value(text, "inter_token_latency_seconds_count") == whole.steps - len(calls)
    assert value(text, "e2e_request_latency_seconds_count") == len(calls)
    assert value(text, "e2e_request_latency_seconds_sum") == pytest.approx(sum(c.finished - c.arrived for c in calls))
    reasons = [caller.reason for caller in callers]
    for reason in ("stop", "length", "context", "error"):
        assert value(text, "request_success_total", finished_reason=reason) == reasons.count(reason)
    assert value(text, "kv_cache_usage_perc") == 0
    assert value(text, "engine_steps_total") < whole.steps
    assert set(json.loads(json.dumps(telemetry.snapshot()))) >= {"tokens_per_s", "time", "accepted_by_depth"}


def test_what_is_not_an_answer_is_counted_as_that(clock):
    """Catches a cancelled request that still counts as running or waiting."""
    telemetry = Telemetry("tiny", 2)
    waits, runs = call(clock), call(clock)
    for one in (waits, runs):
        telemetry.arrived(one)
    telemetry.admitted(runs)
    clock.now += 1
    assert (read(telemetry.text()).running, read(telemetry.text()).waiting) == (1, 1)
    telemetry.ended(waits, "deadline")
    telemetry.ended(runs, "cancelled")
    text = telemetry.text()
    assert (read(text).running, read(text).waiting) == (0, 0)
    assert value(text, "e2e_request_latency_seconds_count") == 0
    assert value(text, "request_success_total", finished_reason="deadline") == 1
    assert telemetry.snapshot()["finished"]["cancelled"] == 1


def test_no_counter_falls_while_another_thread_counts():
    """Catches a reading that mixes two moments: more accepted than drafted, or a count that is lower than before."""
    telemetry, is_over, draw = Telemetry("tiny", 16), threading.Event(), random.Random(0)

    def count():
        while not is_over.is_set():
            calls = admitted(telemetry, 16)
            for _ in range(20):
                drafted = [draw.randrange(6) for _ in calls]
                telemetry.stepped(step(calls, [draw.randint(0, n) for n in drafted], drafted, 0.001))
            for one in calls:
                telemetry.ended(one, "stop")

    def refuse():
        for _ in range(2000):
            telemetry.refused("unauthorized")
            telemetry.alarm("drafter_hung")

    threads = [threading.Thread(target=act) for act in (count, refuse, refuse, refuse)]
    for thread in threads:
        thread.start()
    try:
        before = {}
        for _ in range(15):
            text = telemetry.text()
            telemetry.snapshot()
            now = samples(text)
            assert not [key for key, was in before.items() if _only_grows(key[0]) and now[key] < was]
            whole = read(text).total
            assert whole.accepted <= whole.drafted and whole.drafts <= whole.steps
            assert sum(whole.by_position) <= whole.accepted
            before = now
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert whole.steps > 0 and telemetry.snapshot()["alarms"]["drafter_hung"] == 6000
    assert value(telemetry.text(), "requests_refused_total", reason="unauthorized") == 6000


def _only_grows(name: str) -> bool:
    return name.startswith("outrider:") and name.endswith(("_total", "_bucket", "_count", "_sum"))


def test_a_name_of_a_model_is_text_and_nothing_more():
    """Catches a quote or a line's end in a name, which would end the label, or the line."""
    name = 'a"b\\c\nd{x="1"} 7'
    telemetry = Telemetry(name, 1)
    telemetry.stepped(step(admitted(telemetry), [1], [2]))
    found = samples(telemetry.text())
    assert found["outrider:generation_tokens_total", (("model_name", name),)] == 2
    assert read(telemetry.text()).total.by_position == (1, 0)


def test_a_very_deep_draft_is_counted():
    """Catches a place beyond the list, which would be another counter's."""
    telemetry = Telemetry("tiny", 1)
    telemetry.stepped(step(admitted(telemetry), [DEEPEST + 70], [DEEPEST + 72]))
    found = read(telemetry.text()).since()
    assert (found.accepted, found.drafted, found.drafts) == (DEEPEST + 70, DEEPEST + 72, 1)
    assert found.by_position == (1,) * DEEPEST


def test_before_anything_happened_nothing_is_claimed():
    """Catches 0 tokens per step, or 0 ms, of a server that was never asked."""
    found = Telemetry("tiny", 3).snapshot()
    assert (found["tokens_per_step"], found["draft_acceptance"], found["is_speculating"]) == (None, None, None)
    assert found["first_token_s"] == found["gap_s"] == {"count": 0, "p50": None, "p99": None}
    assert (found["accepted_by_depth"], found["batch"], found["tokens_per_s"]) == ([], None, 0)
    assert found["time"]["idle"] == 1
    json.dumps(found)


def test_rates_are_those_of_the_last_seconds(clock):
    """Catches a mean since the start and a second that is lost or counted twice between two readings."""
    draw = random.Random(2)
    for _ in range(25):
        telemetry, written = Telemetry("tiny", 1), []
        clock.now += 10
        calls = admitted(telemetry, clock=clock)
        for _ in range(draw.randrange(1, 40)):
            clock.now += draw.choice([0.01, 0.1, 0.3, 1.0, 2.5, 30.0]) * draw.random()
            accepted = draw.randrange(5)
            telemetry.stepped(step(calls, [accepted], [4]))
            written.append((clock.now, accepted + 1))
        clock.now += draw.choice([0.0, 0.5, 3.0, 20.0, 100.0])
        found = telemetry.snapshot()
        fewest, most = (tokens_since(written, clock.now - counts.NOW_S - early) for early in (0, counts.READING_S))
        assert fewest / (counts.NOW_S + counts.READING_S) - 0.01 <= found["tokens_per_s"]
        assert found["tokens_per_s"] <= most / counts.NOW_S + 0.01
        history = found["history"]["tokens_per_s"]
        assert len(history) == HISTORY_S and min(history) >= 0
        rounding = 0.05 * HISTORY_S
        assert tokens_since(written, clock.now - HISTORY_S + 1) - rounding <= sum(history)
        assert sum(history) <= tokens_since(written, clock.now - HISTORY_S - 1) + rounding


def tokens_since(written: list[tuple[float, int]], at: float) -> int:
    return sum(tokens for when, tokens in written if when > at)


def test_shares_of_time_are_where_it_went(clock):
    """Catches prompts that are read between two steps and seen nowhere, and idle time that counts as work."""
    telemetry = Telemetry("tiny", 1)
    clock.now += 100
    calls = admitted(telemetry, clock=clock)
    for _ in range(5):
        clock.now += 0.5  # 0.1 s between steps, in which a prompt is read
        telemetry.stepped(step(calls, [1], [4], 0.4, read_tokens=64, parts=(0.1, 0.25, 0.05)))
    telemetry.ended(calls[0], "stop")
    clock.now += 2.5
    found = telemetry.snapshot()["time"]
    assert found == pytest.approx({"draft": 0.1, "verify": 0.25, "other": 0.05, "prompts": 0.1, "idle": 0.5}, abs=1e-3)
    text = telemetry.text()
    assert value(text, "step_seconds_total", part="prompts") == pytest.approx(0.5)
    assert value(text, "step_seconds_total", part="verify") == pytest.approx(1.25)
    clock.now += 60  # a request that comes after a pause does not make the pause work
    calls = admitted(telemetry, clock=clock)
    clock.now += 1
    telemetry.stepped(step(calls, [1], [4], 1.0, parts=(0.2, 0.7, 0.1)))
    assert value(telemetry.text(), "step_seconds_total", part="other") == pytest.approx(0.35)


def test_latencies_are_those_of_each_request(clock):
    """Catches the gap of a new request, which has none, and quantiles of another order."""
    draw, telemetry = random.Random(5), Telemetry("tiny", 1)
    first, gaps = [], []
    for _ in range(200):
        [one] = admitted(telemetry, clock=clock)
        clock.now += (wait := draw.lognormvariate(-3, 1))
        first.append(wait)
        telemetry.stepped(step([one], [0], [0]))
        for _ in range(draw.randrange(4)):
            clock.now += (gap := draw.lognormvariate(-5, 0.7))
            gaps.append(gap)
            telemetry.stepped(step([one], [0], [0]))
        telemetry.ended(one, "stop")
    found = telemetry.snapshot()
    for name, values in (("first_token_s", first), ("gap_s", gaps)):
        assert found[name]["count"] == len(values)
        ordered = sorted(values)
        for share, key in ((0.5, "p50"), (0.99, "p99")):
            exact = ordered[math.ceil(share * len(ordered)) - 1]
            assert found[name][key] == pytest.approx(exact, rel=0.065)
    text = telemetry.text()
    for limit in counts.BUCKETS:
        wanted = bisect.bisect_right(sorted(first), limit)
        assert value(text, "time_to_first_token_seconds_bucket", le=str(limit)) == wanted
    assert value(text, "inter_token_latency_seconds_sum") == pytest.approx(sum(gaps))
    assert value(text, "inter_token_latency_seconds_bucket", le="+Inf") == len(gaps)
    clock.now += counts.LATENCY_S + 2
    assert telemetry.snapshot()["first_token_s"]["count"] == 0


def test_acceptance_by_depth_is_of_the_drafts_that_reach_it(clock):
    """Catches short drafts counted as rejections of tokens that they did not have."""
    telemetry = Telemetry("tiny", 3)
    calls = admitted(telemetry, 3, clock)
    telemetry.stepped(step(calls, [2, 0, 1], [3, 0, 1]))
    found = telemetry.snapshot()
    assert found["accepted_by_depth"] == [1.0, 1.0, 0.0]
    assert (found["draft_acceptance"], found["tokens_per_draft"], found["tokens_per_step"]) == (0.75, 2.5, 2.0)
    assert found["is_speculating"] is True
    clock.now += counts.RECENT_S + counts.READING_S
    telemetry.stepped(step(calls, [0, 0, 0], [0, 0, 0]))
    found = telemetry.snapshot()
    assert (found["is_speculating"], found["accepted_by_depth"], found["tokens_per_step"]) == (False, [], 1.0)


def test_the_cache_that_is_in_use_is_shown(clock):
    """Catches slots counted instead of tokens."""
    telemetry = Telemetry("tiny", 2, length=10)
    [one] = admitted(telemetry, clock=clock)
    one.written = 2
    assert value(telemetry.text(), "kv_cache_usage_perc") == telemetry.snapshot()["kv_cache_usage"] == 0.25
    telemetry.ended(one, "stop")
    assert telemetry.snapshot()["kv_cache_usage"] == 0
    assert Telemetry("tiny", 2).snapshot()["kv_cache_usage"] is None
