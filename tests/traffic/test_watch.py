"""A watch: it sees a drop, does not cry wolf, and outlives the server."""

import itertools
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.watch import _standing_text, _status_text, watch
from outrider.errors import ConfigError, DataError
from outrider.report.bootstrap import Interval
from outrider.report.schema import Report, Row
from outrider.traffic.counters import Counters, SpeculationStats, read
from outrider.traffic.drift import Drift
from outrider.traffic.release import Release, release_of
from outrider.traffic.watch import Watch, Window, combined, side_of

EVERY_S = 5
DAY = 86_400 // EVERY_S
TRUTH = 2.499
"""Tokens per step over four million of the prompts below."""
STEPS = 40
"""Steps of one request between two readings."""


def prompts(noise: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Readings that each prompt lasts, and its tokens per step: unlike each other, some far above the rest."""
    rates = 1 + 1.5 * np.exp(noise.normal(-0.08, 0.4, count))
    return 1 + noise.geometric(0.4, count), np.minimum(rates, 6)


def report(count: int, seed: int = 0, **more: Any) -> Report:
    """A report on `count` prompts of that population."""
    noise = np.random.default_rng(seed)
    lasting, rates = prompts(noise, count)
    steps = lasting * STEPS
    tokens = np.round(steps * rates + noise.normal(0, 1.3, count) * np.sqrt(steps))
    pairs = zip(tokens.tolist(), steps.tolist(), strict=True)
    per_prompt = [{"id": str(k), "tokens": int(written), "steps": taken} for k, (written, taken) in enumerate(pairs)]
    return Report(target="t", rows=(row(per_prompt, **more),))


def row(per_prompt: list[dict[str, Any]], **more: Any) -> Row:
    values: dict[str, Any] = dict.fromkeys(Row.model_fields) | {
        "drafter": "ngram", "task": "code", "prompts": len(per_prompt), "temperature": 0, "per_prompt": per_prompt,
        "tokens_per_step": sum(p["tokens"] for p in per_prompt) / max(1, sum(p["steps"] for p in per_prompt)),
    }  # fmt: skip
    return Row.model_validate(values | more)


def traffic(noise: np.random.Generator, readings: int, running: int = 2, factor: float = 1.0) -> np.ndarray:
    """Tokens of each reading while `running` requests are served, prompts of the same population after each other."""
    total = noise.normal(0, 1.3, readings) * math.sqrt(STEPS * running)
    for _ in range(running):
        lasting, rates = prompts(noise, readings)
        begun = int(noise.integers(0, 20))
        total += np.repeat(rates, lasting)[begun : begun + readings] * factor * STEPS
    return total


def test_traffic_at_the_very_edge_of_the_interval_brings_no_alarm():
    """Catches bets that cost too little for how much prompts differ, which an interval with room to spare would hide.
    A day of ten series with the truth as both ends of the interval; seeded, the promise is one alarm in 100 such
    runs."""
    release = release_of(report(400, seed=0))
    drift = Drift(release._replace(tokens_per_step=Interval(TRUTH, TRUTH, TRUTH)), EVERY_S, series=10)
    noise = np.random.default_rng(11)
    tokens = np.stack([traffic(noise, DAY) for _ in range(10)], axis=1)
    assert not any(drift.add(reading, np.full(10, 2 * STEPS)).any() for reading in tokens)
    assert drift.evidence.max() > 0


def test_the_release_interval_holds_the_truth_for_nearly_every_release():
    """Catches an interval of independent steps, ten times too narrow, which makes every release a false alarm.  15
    releases, of which 1 in 100 misses: 2 or more do so in 1 of 100 runs, were they not seeded."""
    intervals = [release_of(report(100, seed)).tokens_per_step for seed in range(15, 30)]
    assert sum(not low < TRUTH < high for _, low, high in intervals) <= 1
    assert max(high - low for _, low, high in intervals) < 0.6


@pytest.mark.parametrize(("drop", "most"), [(0.1, 160_000), (0.3, 20_000)])
def test_a_drop_is_noticed_within_the_steps_that_were_said(drop, most):
    """Catches a bet on the wrong side, stakes too small to ever win, and a promise that is not kept.  95 of 100 series
    within twice the steps said; seeded."""
    release = release_of(report(400, seed=0))
    drift = Drift(release, EVERY_S, series=100)
    expected_steps = drift.steps_to_notice(drop)
    assert expected_steps is not None and expected_steps < most
    readings = int(2 * expected_steps / (8 * STEPS))
    noise = np.random.default_rng(3)
    tokens = np.stack([traffic(noise, readings, running=8, factor=1 - drop) for _ in range(100)], axis=1)
    noticed = np.zeros(100, bool)
    for reading in tokens:
        sides = drift.add(reading, np.full(100, 8 * STEPS))
        assert (sides <= 0).all()
        noticed |= sides < 0
    assert noticed.sum() >= 95
    assert Drift(release_of(report(20)), EVERY_S).steps_to_notice(0.05) is None


def test_the_release_is_read_from_all_tasks_of_the_drafter():
    """Catches the first row taken for the whole, another temperature mixed in, or a mean of ratios."""
    short = [{"id": str(k), "tokens": 30, "steps": 10} for k in range(6)]
    long = [{"id": str(k), "tokens": 90, "steps": 60} for k in range(6)]
    hot = row([{"id": "0", "tokens": 900, "steps": 10}] * 9, temperature=1, speedup=0.5)
    rows = (row(short, speedup=2.0), row(long, task="chat", speedup=1.5), hot, row(short, drafter="other"))
    release = release_of(Report(target="t", rows=rows))
    assert (release.drafter, release.prompts) == ("ngram", 12)
    assert release.tokens_per_step.center == pytest.approx(6 * 120 / (6 * 70))
    assert release.tokens_per_step.low < release.tokens_per_step.center < release.tokens_per_step.high
    with pytest.raises(DataError, match="6 prompts.*at least 8"):
        release_of(Report(target="t", rows=rows), "other")
    with pytest.raises(DataError, match="no measured rows of medusa; choose from ngram, other"):
        release_of(Report(target="t", rows=rows), "medusa")
    with pytest.raises(DataError, match="has no rows"):
        release_of(Report(target="t"))


HOT = dict(temperature=1, speedup=0.5)


def test_the_temperature_says_which_rows_are_the_promise():
    """Catches traffic that samples and is judged by greedy rows for ever: those are shown exact, so they come first."""
    cold, hot = ([{"id": str(k), "tokens": tokens, "steps": 10} for k in range(9)] for tokens in (30, 20))
    rows = (row(cold, exact=True), row(hot, **HOT), row(cold, drafter="other", temperature=0.7, speedup=3.0))
    both = Report(target="t", rows=rows)
    for requested, temperature, center in ((None, 0, 3), (0, 0, 3), (1, 1, 2)):
        release = release_of(both, "ngram", requested)
        assert (release.temperature, release.tokens_per_step.center) == (temperature, center)
        assert release.other_temperatures == (1 - temperature,)
    assert release_of(both).description == "ngram at temperature 0, 9 prompts; the report also has temperature 1"
    assert release_of(both, temperature=0.7).description == "other at temperature 0.7, 9 prompts"
    with pytest.raises(DataError, match=r"no row of ngram at temperature 0.7; choose from 0, 1"):
        release_of(both, "ngram", 0.7)
    with pytest.raises(DataError, match=r"no row at temperature 2; choose from 0, 0.7, 1"):
        release_of(both, temperature=2)


def test_depths_of_the_release_are_counted_as_servers_count_them():
    """Catches steps without a draft in the denominator, and short drafts left out of it."""
    histogram = ((50,), (3, 2), (1, 2, 2))
    intervals = release_of(report(50, accepted_histogram=histogram)).by_depth
    assert [interval.center for interval in intervals] == pytest.approx([0.6, 0.2])
    assert all(0 <= interval.low < interval.center < interval.high <= 1 for interval in intervals)
    assert release_of(report(50)).by_depth == ()


def counters(steps: int, kept: int, started: float = 1.0) -> Counters:
    """Of a server that drafted 5 at every step."""
    total = SpeculationStats(steps, 5 * steps, kept, (kept,), steps=steps, generated=steps + kept, first_tokens=0)
    return Counters("vLLM", total, running=1, waiting=0, started=started)


LLAMA = "llamacpp:spec_decode_num_drafts_total {}\nllamacpp:spec_decode_num_accepted_tokens_total {}\n"
SELDOM, ALWAYS = ((180_000,), (2_000, 18_000)), ((100,), (2_000, 18_000))
"""Drafters that draft at one step in ten, and at nearly all."""


def test_a_server_that_counts_no_steps_is_compared_only_with_a_drafter_that_always_drafts():
    """Catches an alarm for ever: 1.9 tokens a step with a draft are 1.09 a step."""
    stats = read(LLAMA.format(100_000, 90_000)).since()
    assert stats.tokens_per_step == stats.tokens_per_draft == 1.9 and not stats.covers_every_step
    for histogram, alarms in ((SELDOM, False), (ALWAYS, True), ((), False)):
        released = release_of(report(400, accepted_histogram=histogram))
        assert side_of(Window(1.0, stats), released) == (-1 if alarms else None)
        state = Watch(released, EVERY_S)
        views = [state.add(EVERY_S * look, read(LLAMA.format(look * 10_000, look * 9_000))) for look in range(60)]
        assert any(view.alarmed for view in views) == alarms
        assert views[-1].side == (-1 if alarms else None)
        if histogram == SELDOM:
            texts = _standing_text(None, Window(1.0, stats), released), _status_text(views[-1], released)
            assert all("can't be compared" in text.plain for text in texts) and views[-1].json()["side"] is None


def test_stretches_together_are_the_whole():
    """Catches a mean of means, and a stretch left out."""
    readings = [counters(0, 0), counters(10, 5), counters(100, 200), counters(101, 201)]
    parts = [Window(5.0, now.since(then)) for then, now in itertools.pairwise(readings)]
    assert combined(parts) == Window(15.0, readings[-1].since(readings[0]))
    assert combined([]).stats.tokens_per_step is None


def feed(state: Watch, at_s: float, rate: float, count: int, total: list[int], steps: int = 400) -> list[Any]:
    """`count` readings of `steps` steps with `rate` tokens a step, on top of `total`."""
    views = []
    for k in range(count):
        total[0] += steps
        total[1] += round(steps * (rate - 1))
        views.append(state.add(at_s + EVERY_S * k, counters(*total)))
    return views


@pytest.fixture
def release() -> Release:
    return release_of(report(400))


def test_an_alarm_is_raised_once_stays_and_ends_when_the_rate_is_back(release):
    """Catches an alarm at every look, one that is forgotten while nothing got better, and one that never ends."""
    state, total = Watch(release, EVERY_S), [0, 0]
    good, bad = release.tokens_per_step.center, release.tokens_per_step.center * 0.7
    assert not any(view.side for view in feed(state, 0, good, 400, total))
    views = feed(state, 2000, bad, 400, total)
    assert sum(view.alarmed for view in views) == 1
    first = next(k for k, view in enumerate(views) if view.alarmed)
    assert first * 400 < 20_000 and all(view.side == -1 for view in views[first:])
    views = feed(state, 4000, good, 400, total)
    assert not any(view.alarmed for view in views) and views[0].side and not views[-1].side
    assert next(k for k, view in enumerate(views) if not view.side) * EVERY_S <= 900


def test_an_alarm_does_not_end_because_the_minutes_before_it_were_good(release):
    """Catches an alarm that goes out at the next look."""
    state, total = Watch(release, EVERY_S), [0, 0]
    feed(state, 0, release.tokens_per_step.center, 200, total, steps=10_000)
    views = feed(state, 1000, 1.8, 60, total, steps=10_000)
    assert [view.alarmed for view in views[:5]].count(True) == 1
    first = next(k for k, view in enumerate(views) if view.alarmed)
    assert all(view.side for view in views[first:])


def test_a_minute_and_ten_are_what_they_say_and_nothing_older_is_kept(release):
    """Catches memory that grows as long as one watches."""
    state, total = Watch(release, EVERY_S), [0, 0]
    view = feed(state, 0, 2.5, 300, total)[-1]
    assert (view.minute.seconds, view.ten_minutes.seconds) == (60, 600)
    assert (view.minute.steps, view.ten_minutes.steps) == (12 * 400, 120 * 400)
    assert len(state._parts) == 120
    assert view.counters.since().steps == 120_000


def test_a_server_that_begins_anew_is_noticed_and_counted_on(release):
    """Catches negative counts after a restart, and an alarm out of them."""
    state, total = Watch(release, EVERY_S), [0, 0]
    feed(state, 0, 2.5, 10, total)
    view = state.away(60, "connection refused")
    assert view.away and view.minute.stats.drafts > 0
    view = state.add(65, counters(100, 150, started=60.0))
    assert view.restarts == 1 and view.away is None and not view.alarmed
    assert view.minute.stats.drafts == 8 * 400 + 100
    assert view.counters.since().drafts == 100


def test_one_look_says_outside_only_beyond_its_own_noise(release):
    """Catches 3 steps of bad luck sold as a broken drafter."""
    at = lambda steps, rate: side_of(Window(1.0, counters(steps, round(steps * (rate - 1))).since()), release)
    assert at(3, 1.0) == 0
    assert at(300_000, 1.5) == -1
    assert at(300_000, 4.0) == 1
    assert at(300_000, 2.5) == 0
    assert at(0, 1.0) is None


SERVER = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
began, rate = time.time(), float(sys.argv[2])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        steps = 1_000_000 + int((time.time() - began) * 100_000)
        kept = int(steps * (rate - 1))
        body = "".join([
            f"process_start_time_seconds {began}\\n",
            f"vllm:spec_decode_num_drafts_total {steps}\\nvllm:spec_decode_num_draft_tokens_total {5 * steps}\\n",
            f"vllm:spec_decode_num_accepted_tokens_total {kept}\\n",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {kept // 4}\\n',
            f"vllm:inter_token_latency_seconds_count {steps}\\nvllm:generation_tokens_total {steps + kept}\\n",
            "vllm:num_requests_running 3\\n",
        ]).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): ...
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Served:
    """A server in its own process, which writes `rate` tokens a step and can be killed."""

    def __init__(self, rate: float, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port), str(rate)], stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Any]:
    """start(rate, port) starts a server; all are gone after the test."""
    started: list[Served] = []

    def start(rate: float, port: int = 0) -> Served:
        started.append(Served(rate, port))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def run(*words: str) -> tuple[int, str]:
    """The verb in an app of the test; its exit code and what it printed."""
    app = typer.Typer()
    app.command()(watch)
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_one_look_exits_with_one_when_outside_and_zero_inside(start, tmp_path):
    """Catches a cron job that never fails, or always; and a JSON that doesn't say what the table says."""
    hot = report(400, seed=1, temperature=1, speedup=0.5).rows[0]
    per_prompt = [prompt.model_dump() | {"tokens": round(prompt.steps * 1.6)} for prompt in hot.per_prompt]
    place = Report(target="t", rows=(*report(400, exact=True).rows, row(per_prompt, **HOT))).save(tmp_path)
    for rate, code, verdict in ((2.45, 0, "inside"), (1.9, 1, "below")):
        url = start(rate).url
        exit_code, _ = run(url, "--once", "--release", str(place), "--json", str(tmp_path / "found.json"))
        value = json.loads((tmp_path / "found.json").read_text())
        assert (exit_code, value["side"]) == (code, verdict)
        assert value["window"]["tokens_per_step"] == pytest.approx(rate, abs=0.01)
    exit_code, output = run(start(1.6).url, "--once", "--release", str(place), "--temperature", "1")
    assert exit_code == 0 and "release   ngram at temperature 1, 400 prompts" in output
    assert run(url, "--once")[0] == 0  # nothing to compare with
    over = json.loads((tmp_path / "found.json").read_text())["window"]
    assert run(url, "--once", "--for", "0.3", "--json", str(tmp_path / "found.json"))[0] == 0
    assert json.loads((tmp_path / "found.json").read_text())["window"]["steps"] < over["steps"] / 2


def test_a_reading_is_taken_by_the_end_however_seldom_they_are(start, tmp_path):
    """Catches a watch that ends well and never looked, and one that goes on beyond its time."""
    log, kept = tmp_path / "log.jsonl", tmp_path / "found.json"
    began, for_s = time.monotonic(), 0.3
    words = ("--every", "10", "--for", str(for_s), "--log", str(log), "--json", str(kept))
    assert run(start(2.0).url, *words)[0] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 1 and lines[-1]["minute"]["steps"] > 0
    assert json.loads(kept.read_text())["minute"] == lines[-1]["minute"]
    assert lines[-1]["minute"]["seconds"] == pytest.approx(for_s, abs=0.15)
    assert time.monotonic() - began < for_s + 5


def test_a_watch_outlives_the_server_and_goes_on_when_it_is_back(start, tmp_path):
    """Catches a dashboard that dies with what it watches; and a drop after the restart must still be noticed."""
    place, log = report(400).save(tmp_path), tmp_path / "log.jsonl"
    served = start(2.45)
    words = [served.url, "--release", str(place), "--every", "0.1", "--for", "60", "--log", str(log)]
    code = (
        f"import typer; from outrider.cli.watch import watch; app = typer.Typer(); app.command()(watch); app({words!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a process that was started in the background ignores Ctrl-C, and so would this one
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    lines = lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def wait_for(what):
        end = time.monotonic() + 30
        while not any(what(line) for line in lines()):
            assert time.monotonic() < end and process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)

    wait_for(lambda line: line["minute"]["drafts"])
    served.kill()
    wait_for(lambda line: line["away"])
    start(1.8, served.port)
    wait_for(lambda line: line["alarm"])
    process.send_signal(2)  # Ctrl-C: what was found counts
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "OUTSIDE" in output
    views = lines()
    assert views[-1]["restarts"] == 1 and views[-1]["side"] == "below" and views[-1]["away"] is None
    assert sum(line["alarm"] for line in views) == 1
    assert not any(line["alarm"] for line in views[: next(k for k, line in enumerate(views) if line["away"])])


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [(["--every", "0"], ConfigError, "at least 0.1 s"), (["--once", "--log", "x"], ConfigError, "no effect"),
     (["--drafter", "ngram"], ConfigError, "without --release"),
     (["--temperature", "1"], ConfigError, "--temperature 1 has no effect without --release"),
     (["--release", "nowhere"], DataError, "no report"),
     (["--log", "/nowhere/x"], DataError, "can't write"), ([], DataError, "start the server")],
)  # fmt: skip
def test_wrong_use_is_one_clear_sentence(words, kind, message):
    """Catches a traceback, and a setting that is ignored in silence."""
    with pytest.raises(kind, match=message):
        run("http://127.0.0.1:9", *words)
