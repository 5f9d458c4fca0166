"""Counters of servers: what Prometheus' own writer wrote is read back, and readings are differenced as they can be."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.errors import ConfigError, DataError
from outrider.traffic.counters import NAMES, read, scrape

VLLM = "vllm:spec_decode_num_"


class Engine:
    """The metrics of a server, as its own library writes them: `_created` twins, several engines, strangers between."""

    def __init__(self, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        self.engines = [{"model_name": "demo", "engine": str(engine)} for engine in range(engines)]
        labels = ("model_name", "engine")
        make = lambda name, *more: Counter(f"{VLLM}{name}", name, (*labels, *more), registry=self.registry)
        self.drafts, self.drafted = make("drafts"), make("draft_tokens")
        self.kept, self.places = make("accepted_tokens"), make("accepted_tokens_per_pos", "position")
        self.written = Counter("vllm:generation_tokens", "written", labels, registry=self.registry)
        self.first = Histogram("vllm:time_to_first_token_seconds", "first", labels, registry=self.registry)
        self.gaps = Histogram("vllm:inter_token_latency_seconds", "gaps", labels, registry=self.registry)
        self.running = Gauge("vllm:num_requests_running", "running", labels, registry=self.registry)
        Counter("http_requests", "a stranger", ("path",), registry=self.registry).labels("/v1").inc(9)

    def prefill(self, engine: int = 0) -> None:
        """A request begins: the prefill writes its first token."""
        self.first.labels(**self.engines[engine]).observe(0.1)
        self.written.labels(**self.engines[engine]).inc()

    def step(self, drafted: int, kept: int, engine: int = 0, cut: int = 0) -> None:
        """One step: `drafted` tokens, of which `kept` were right, and the target's own; an answer that ends loses
        `cut`."""
        one = self.engines[engine]
        if drafted:
            self.drafts.labels(**one).inc()
            self.drafted.labels(**one).inc(drafted)
            self.kept.labels(**one).inc(kept)
            for place in range(kept):
                self.places.labels(**one, position=str(place)).inc()
        self.written.labels(**one).inc(kept + 1 - cut)
        self.gaps.labels(**one).observe(0.01)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


@contextmanager
def served(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """A real server on loopback, whose answers `answer(path)` gives."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_what_prometheus_wrote_is_read_back_and_time_stamps_are_not_counted():
    """Catches names matched by their beginning: `_created` twins hold seconds since 1970 and would add 1.7 billion."""
    engine = Engine()
    for drafted, kept in [(5, 0), (5, 2), (3, 3), (0, 0)]:
        engine.step(drafted, kept)
    assert "_created" in engine.text
    counters = read(engine.text)
    since = counters.since()
    assert (counters.server, since.drafts, since.drafted, since.accepted) == ("vLLM", 3, 13, 5)
    assert since.by_position == (2, 2, 1)
    assert since.tokens_per_draft == pytest.approx(1 + 5 / 3)
    assert since.rates == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert sum(since.by_position) == since.accepted
    assert since.draft_acceptance == pytest.approx(5 / 13)


def test_tokens_per_step_counts_steps_without_a_draft_and_no_token_that_a_prefill_wrote():
    """Catches 1 + accepted / drafts taken for it: n-gram drafts seldom, and what it seldom does counts little."""
    engine = Engine()
    for _ in range(2):
        engine.prefill()
        for drafted, kept in [(0, 0), (0, 0), (5, 4)]:
            engine.step(drafted, kept)
        engine.step(5, 3, cut=2)
    stats = read(engine.text).since()
    assert (stats.steps, stats.drafts, stats.generated, stats.first_tokens) == (8, 4, 20, 2)
    assert stats.tokens_per_step == (20 - 2) / 8 and stats.tokens_per_draft == 1 + 14 / 4


def test_engines_are_summed():
    """Catches a reading of the first, or the last, of several engines."""
    engine = Engine(engines=3)
    for which, kept in enumerate([1, 2, 4]):
        engine.step(5, kept, which)
    engine.running.labels(**engine.engines[0]).set(2)
    engine.running.labels(**engine.engines[2]).set(3)
    counters = read(engine.text)
    assert (counters.total.drafts, counters.total.drafted, counters.total.accepted, counters.running) == (3, 15, 7, 5)
    assert counters.total.by_position == (3, 2, 1, 1)


def test_a_restart_is_noticed_and_counts_are_never_negative():
    """Catches -40 drafts after a restart, and a restart that is missed because the new process is already further."""
    old, new = Engine(), Engine()
    for _ in range(10):
        old.step(5, 2)
    for _ in range(4):
        new.step(5, 3)
    before, after = read(old.text), read(new.text)
    stats = after.since(before)
    assert stats.restarted and (stats.drafts, stats.accepted, stats.by_position) == (4, 12, (4, 4, 4))
    further = Engine()
    for _ in range(40):
        further.step(5, 3)
    assert not read(further.text).since(before).restarted  # counts alone can't tell; the start of the process can
    stamped = [read(e.text + f"process_start_time_seconds {at}\n") for e, at in ((old, 100.0), (further, 900.0))]
    assert stamped[1].since(stamped[0]).restarted and stamped[1].since(stamped[0]).drafts == 40


def test_gauges_of_an_interval_are_not_differenced():
    """Catches 3.1 - 2.9 = 0.2 tokens per step and the mean of an engine that stands idle."""
    text = lambda calls, *lengths: "".join(
        [f"sglang:spec_verify_calls_total {calls}\n"]
        + [f'sglang:spec_accept_length{{engine="{i}"}} {length}\n' for i, length in enumerate(lengths)]
    )
    before, after = read(text(100, 2.9)), read(text(150, 3.1, 0.0))
    stats = after.since(before)
    assert after.server == "SGLang" and stats.is_interval
    assert (stats.drafts, stats.tokens_per_step, stats.accepted) == (50, 3.1, None)
    assert after.since(after).tokens_per_step is None
    assert read('sglang:spec_accept_length{engine="0"} 2.5\n').since().tokens_per_step == 2.5


@pytest.mark.parametrize("names", [names for names in NAMES if names.by_position], ids=lambda names: names.server)
def test_every_kind_of_server_is_understood_by_its_own_names(names):
    """Catches a misspelt name or label."""
    text = f"{names.drafts} 10\n{names.drafted} 50\n{names.accepted} 15.0\n"
    text += "".join(f'{names.by_position}{{position="{k}"}} {count}\n' for k, count in enumerate((9, 5, 1)))
    counters = read(text)
    assert counters.server == names.server
    assert counters.since().tokens_per_step == 2.5 and counters.since().by_position == (9, 5, 1)


def test_a_server_without_a_drafter_is_read_and_says_so_when_asked():
    """Catches 1.00 tokens per step reported for a server that never drafts."""
    counters = read("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\n")
    assert counters.server is None
    with pytest.raises(DataError, match="nothing about drafts"):
        counters.since()
    # NaN is what a server writes for what it hasn't measured
    assert read(f'{VLLM}drafts_total{{engine="0"}} NaN\n{VLLM}drafts_total{{engine="1"}} 4\n').since().drafts == 4


def test_the_metrics_are_found_from_any_address_of_the_server(monkeypatch):
    """Catches /v1/metrics, which no server has, and a watch that fills the memory because it leads to a download."""
    engine = Engine()
    engine.step(5, 2)
    with served(lambda path: (200, engine.text.encode()) if path == "/metrics" else (404, b"")) as url:
        for end in ("", "/v1/", "/metrics"):
            assert scrape(url + end).since().accepted == 2
        monkeypatch.setattr("outrider.traffic.counters.LARGEST_BYTES", 1000)
        with pytest.raises(DataError, match="more than"):
            scrape(url)
    for wrong in ("", "file:///etc/passwd", "ftp://host/", "http://"):
        with pytest.raises(ConfigError, match="address of a server"):
            scrape(wrong)


def test_an_answer_that_holds_no_metrics_is_one_clear_sentence():
    """Catches a traceback out of the parser, and a web page read as "no drafts yet"."""
    for status, body, message in (
        (404, b"", "answered 404"), (401, b"", "password"), (200, b"<html>hello</html>", "no metrics"),
        (200, b"", "no metrics"), (200, b"\xff\xfe\x00", "no metrics"),
        (200, f"{VLLM}drafts_total{{engine=".encode(), "Prometheus"),
    ):  # fmt: skip
        with served(lambda _, answer=(status, body): answer) as url, pytest.raises(DataError, match=message):
            scrape(url)


def test_nobody_at_home_is_one_clear_sentence_without_the_password():
    """Catches a password in a message, which ends in logs."""
    with served(lambda _: (200, b"")) as url:
        port = url.rsplit(":", 1)[1]
    with pytest.raises(DataError, match="start the server") as raised:
        scrape(f"http://me:secret@127.0.0.1:{port}")
    assert "secret" not in str(raised.value)
