"""Replays against real servers in processes of their own: every call is accounted for, whatever becomes of the
servers."""

import asyncio
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from outrider.cli.replay import replay as verb
from outrider.errors import ConfigError, DataError
from outrider.traffic.address import address_of
from outrider.traffic.logs import traces
from outrider.traffic.logs.calls import Call
from outrider.traffic.replay import latencies
from outrider.traffic.replay import run as replay
from outrider.traffic.replay.answer import Answer
from outrider.traffic.replay.comparison import first_difference
from outrider.traffic.replay.connection import ConnectionPool
from outrider.traffic.replay.latencies import Endpoint, Gaps
from outrider.traffic.replay.plan import Plan, prepared, schedule
from outrider.traffic.replay.report import ReplayResult
from outrider.traffic.replay.servers import Server, server_at

ROOT = Path(__file__).resolve().parent.parent.parent
FAST = ("--first-ms", "1", "--gap-ms", "1")


class Stub:
    """A server in its own process, that can be killed and started again at the same port."""

    def __init__(self, *options: str) -> None:
        self.options, self.port = options, 0
        self.start()

    def start(self) -> None:
        script = str(Path(__file__).with_name("stub_server.py"))
        command = [sys.executable, script, "--port", str(self.port), *FAST, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def plain() -> Iterator[Stub]:
    stub = Stub("--remember")
    yield stub
    stub.kill()


@pytest.fixture(scope="module")
def other() -> Iterator[Stub]:
    """Its text differs, and it is slower by 40 ms before the first piece."""
    stub = Stub("--other", "--first-ms", "60", "--model", "another")
    yield stub
    stub.kill()


@pytest.fixture(scope="module")
def twin() -> Iterator[Stub]:
    """Another server that answers what `plain` does."""
    stub = Stub()
    yield stub
    stub.kill()


def log(
    folder: Path, count: int, per_s: float = 100.0, wishes: dict[int, dict[str, Any]] | None = None
) -> traces.Trace:
    """Calls at a steady rate, some of which ask the stub for trouble."""
    rows = []
    for number in range(count):
        row = {
            "messages": [{"role": "user", "content": f"secret {number}"}],
            "timestamp": number / per_s,
            "id": f"call{number}",
        }
        rows.append(row | ({"stub": wishes[number]} if wishes and number in wishes else {}))
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return traces.read(path)


def faults(result: ReplayResult, folder: Path) -> list[str]:
    """What does not add up: between the counts, and between them and the lines that were written."""
    faults = []
    lines = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    numbers = [line["call"] for line in lines]
    if len(set(numbers)) != len(numbers) or len(numbers) + result.not_sent != result.calls:
        faults.append(f"{len(numbers)} lines, {result.not_sent} not sent, {result.calls} calls")
    for endpoint in result.endpoints:
        if endpoint.sent != endpoint.answered + sum(endpoint.failed.values()) + sum(endpoint.cut_off.values()):
            faults.append(f"{endpoint.url}: {endpoint.sent} sent")
        rows = [line["servers"][endpoint.url] for line in lines if endpoint.url in line["servers"]]
        if len(rows) != endpoint.sent:
            faults.append(f"{endpoint.url}: {endpoint.sent} sent, {len(rows)} written")
        for kind, count in (("answered", endpoint.answered), ("failed", sum(endpoint.failed.values()))):
            if sum(row["outcome"] == kind for row in rows) != count:
                faults.append(f"{endpoint.url}: {count} {kind}")
    return faults


def test_every_call_is_accounted_for_when_the_server_is_killed_and_started_again(tmp_path):
    """Catches a call that is lost with its connection, and a sender that stops with the server."""
    stub = Stub("--gap-ms", "20", "--remember")
    trace = log(tmp_path, 240, per_s=120)

    def violence():
        while len(httpx.get(stub.url + "/received").json()) < 60:
            time.sleep(0.02)
        stub.kill()
        time.sleep(0.3)
        stub.start()

    thread = threading.Thread(target=violence)
    thread.start()
    try:
        result = replay.replay(trace, [stub.url], Plan(retries=1), folder=tmp_path / "out")
    finally:
        thread.join()
        stub.kill()
    assert faults(result, tmp_path / "out") == []
    (endpoint,) = result.endpoints
    assert endpoint.sent == 240 and endpoint.cut_off and endpoint.answered and endpoint.retried
    assert result.is_whole
    assert any("restarted" in note for note in result.notes)


TROUBLE: dict[int, dict[str, Any]] = {
    1: {"status": 429, "times": 2, "retry_after": 0.01}, 2: {"status": 400}, 3: {"hang": True}, 4: {"cut": 3},
    5: {"cut": 0},
    6: {"stall": 2}, 7: {"error": 2}, 8: {"error": 0}, 9: {"bytes": 1}, 10: {"whole": True}, 11: {"silent": True},
    12: {"pieces": 1}, 13: {"status": 503, "times": 1, "retry_after": 0}, 14: {"status": 429, "retry_after": 1000},
}  # fmt: skip


def test_each_kind_of_trouble_has_its_name(plain, tmp_path):
    """Catches trouble that counts as an answer, a cut answer that counts as a failure, and retries that help nobody."""
    trace, folder = log(tmp_path, 20, wishes=TROUBLE), tmp_path / "out"
    result = replay.replay(trace, [plain.url], Plan(retries=2, timeout_s=0.6, slo={"ttft": 5.0}), folder=folder)
    assert faults(result, folder) == []
    (endpoint,) = result.endpoints
    assert dict(endpoint.cut_off) == {"connection closed": 1, "timeout: silent for 0.6 s": 1, "error in the stream": 1}
    assert dict(endpoint.failed) == {
        "HTTP 400": 1, "HTTP 429": 1, "timeout: silent for 0.6 s": 1, "connection closed": 1, "error in the stream": 1,
    }  # fmt: skip
    assert endpoint.first_messages["HTTP 400"] == "HTTP 400: told to answer 400"
    rows = {line["call"]: line["servers"][endpoint.url] for line in map(json.loads, (folder / "calls.jsonl").open())}
    assert {number: rows[number]["attempts"] for number in (0, 1, 2, 3, 4, 5, 7, 8, 13, 14)} == {
        0: 1, 1: 3, 2: 1, 3: 1, 4: 1, 5: 3, 7: 1, 8: 3, 13: 2, 14: 1,
    }  # fmt: skip
    assert rows[9]["answer"].split()[1::2] == list("01234567") and rows[9]["tokens"] == 16
    assert rows[10]["answer"].split()[1::2] == list("01234567")
    assert "tpot_s" not in rows[11] and any("no token count" in note for note in result.notes)
    assert endpoint.within_limits == endpoint.answered == 20 - 8
    value = json.loads(json.dumps(result.plain(), allow_nan=False))
    assert value["outrider_replay"] == 1 and value["endpoints"][0]["ttft_s"]["p99"] > 0


def test_ctrl_c_stops_and_what_came_is_kept(plain, tmp_path):
    """Catches calls that are lost when the user has had enough."""
    log(tmp_path, 2000, per_s=100, wishes={3: {"hang": True}, 4: {"stall": 2}})
    code = "from outrider.cli.replay import replay; import typer; typer.run(replay)"
    command = [sys.executable, "-c", code, "log.jsonl", "--against", plain.url, "--out", "out"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        # a process that was started in the background ignores Ctrl-C, and so would this one
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    written = tmp_path / "out" / "calls.jsonl.part"
    deadline = time.monotonic() + 20
    while not (written.exists() and written.read_bytes().count(b"\n") > 30) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    kept = json.loads((tmp_path / "out" / "replay.json").read_text())
    lines = (tmp_path / "out" / "calls.jsonl").read_text().splitlines()
    assert not kept["is_whole"] and 0 < kept["not_sent"] < 2000
    assert len(lines) + kept["not_sent"] == 2000
    (endpoint,) = kept["endpoints"]
    failed, cut_off = endpoint["failed"], endpoint["cut_off"]
    assert endpoint["sent"] == endpoint["answered"] + sum(failed.values()) + sum(cut_off.values())
    assert failed["stopped"] >= 1 and cut_off["stopped"] >= 1
    (row,) = next(line for line in map(json.loads, lines) if line["call"] == 4)["servers"].values()
    assert row["outcome"] == "cut off" and row["pieces"] == 2 and row["answer"] and row["ttft_s"] > 0
    assert f"{kept['not_sent']} calls were not sent" in output


@pytest.mark.parametrize("concurrency", [None, 1])
def test_a_fault_stops_the_replay_and_what_came_is_kept(concurrency, plain, tmp_path):
    """Catches a log that changes under the replay and takes the result of an hour with it."""
    trace = log(tmp_path, 30)
    real = trace.parse

    def changed(row, name):
        if name == "20":
            raise ValueError("not JSON any more")
        return real(row, name)

    trace, plan = dataclasses.replace(trace, parse=changed), Plan(concurrency=concurrency)
    with pytest.raises(DataError, match=r"log\.jsonl:20: not JSON any more; .*changed"):
        replay.replay(trace, [plain.url], plan, folder=tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "replay.json").read_text())
    lines = (tmp_path / "out" / "calls.jsonl").read_text().splitlines()
    # the last call before the fault may not have been sent yet
    assert not kept["is_whole"] and kept["not_sent"] in (11, 12)
    assert len(lines) == kept["endpoints"][0]["sent"] == 30 - kept["not_sent"]


def test_a_full_disk_ends_the_replay_with_its_own_error(plain, tmp_path):
    """Catches an error inside a call's task that nobody looks at, while the replay goes on without its file."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "calls.jsonl.part").symlink_to("/dev/full")
    trace = log(tmp_path, 400, per_s=1000)
    run = replay._Run(trace, [server_at(plain.url)], Plan(), open("/dev/full", "w", buffering=1), None, None)  # noqa: SIM115
    with pytest.raises(OSError, match="No space"):
        asyncio.run(run.go())


def misplaced(result: ReplayResult, folder: Path) -> list[str]:
    """Answers that stand under the wrong server: the other one says "other", and is slower by 40 ms or more."""
    first, second, *_ = result.endpoints
    misplaced = []
    for line in map(json.loads, (folder / "calls.jsonl").open()):
        texts = [line["servers"][endpoint.url]["answer"] for endpoint in (first, second)]
        if "other" in texts[0] or "other" not in texts[1]:
            misplaced.append(f"call {line['call']}")
        at = line["servers"][second.url]["first_difference"]
        if at != texts[1].index("other"):
            misplaced.append(f"call {line['call']} differs at {at}")
    if first.ttft_s is None or second.ttft_s is None or not second.ttft_s.p50 > first.ttft_s.p50:
        misplaced.append("the slower server is the faster one")
    return misplaced


def test_each_of_several_servers_is_compared_with_the_first(plain, other, twin, tmp_path):
    """Catches neighbours compared with one another and a third server that is left out."""
    urls = [plain.url, other.url, twin.url]
    result = replay.replay(log(tmp_path, 21), urls, Plan(greedy=True), folder=tmp_path / "out")
    assert faults(result, tmp_path / "out") == misplaced(result, tmp_path / "out") == []
    assert [(one.url, one.answers and (one.answers.compared, one.answers.equal)) for one in result.comparisons] == [
        (other.url, (21, 0)), (twin.url, (21, 21)),
    ]  # fmt: skip
    assert result.comparisons[0].ratios["ttft_s"].low > 1 and not result.comparisons[1].answers.first_differences
    assert result.comparisons[1].ratios["ttft_s"].center < result.comparisons[0].ratios["ttft_s"].center
    lines = [json.loads(line) for line in (tmp_path / "out" / "calls.jsonl").open()]
    assert {(line["call"] % 3, urls.index(next(iter(line["servers"])))) for line in lines} == {(0, 0), (1, 1), (2, 2)}
    assert not any(line["equal"] for line in lines) and not any("sample" in note for note in result.notes)


def test_split_keeps_a_session_with_one_server(plain, other, tmp_path):
    """Catches turns of a conversation that change servers, and with them lose their cached prefix."""
    named = lambda number: {"prompt": f"x {number}", "session_id": f"s{number % 5}", "timestamp": number / 100}
    rows = [named(number) | {"model": "m"} for number in range(25)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = replay.replay(traces.read(path), [plain.url, other.url], Plan(split=True), folder=tmp_path / "out")
    assert faults(result, tmp_path / "out") == []
    assert sum(endpoint.sent for endpoint in result.endpoints) == 25 and all(
        endpoint.sent for endpoint in result.endpoints
    )
    places = {}
    for line in map(json.loads, (tmp_path / "out" / "calls.jsonl").open()):
        places.setdefault(line["call"] % 5, set()).update(line["servers"])
    assert all(len(urls) == 1 for urls in places.values())


@given(st.text(max_size=8), st.text(max_size=8))
def test_the_first_difference_is_where_it_is(one, two):
    at = first_difference(one, two)
    if one == two:
        assert at is None
    else:
        assert at is not None and one[:at] == two[:at] and one[at : at + 1] != two[at : at + 1]


def test_calls_are_due_at_the_logs_times_divided_by_the_speed(tmp_path):
    trace = log(tmp_path, 10, per_s=10)
    assert [at for _, at in schedule(trace, Plan(speed=4))] == pytest.approx([number / 40 for number in range(10)])
    assert len(list(schedule(trace, Plan(limit=3)))) == 3


def test_a_rate_is_a_poisson_process_and_the_same_twice(tmp_path):
    """Catches a steady rate in its place, which hides queues, and times that no seed fixes.  Seeded: no false alarm."""
    trace = log(tmp_path, 3000)
    times = np.array([at for _, at in schedule(trace, Plan(rate=50, seed=3))])
    gaps = np.diff(times)
    assert abs(gaps.mean() * 50 - 1) < 0.06 and abs(gaps.std() * 50 - 1) < 0.1
    assert times.tolist() == [at for _, at in schedule(trace, Plan(rate=50, seed=3))]


def test_nothing_is_sent_before_its_time_and_each_once(plain, tmp_path):
    """Catches a schedule that only the sender believes in."""
    before = set(httpx.get(plain.url + "/received").json())
    result = replay.replay(log(tmp_path, 40), [plain.url], folder=tmp_path / "out")
    came = {name: at for name, at in httpx.get(plain.url + "/received").json().items() if name not in before}
    lines = [json.loads(line) for line in (tmp_path / "out" / "calls.jsonl").open()]
    assert sorted(came) == sorted(line["servers"][plain.url]["request_id"] for line in lines)
    start = min(came.values()) - lines[0]["servers"][plain.url]["late_s"] - 0.05
    for line in lines:
        assert came[line["servers"][plain.url]["request_id"]] - start >= line["at_s"]
        assert line["servers"][plain.url]["late_s"] >= 0
    assert result.schedule_error_s is not None and result.schedule_error_s.samples == 40
    (endpoint,) = result.endpoints
    assert endpoint.reported_acceptance["answers"] == 40
    for name in ("drafts", "drafted", "accepted"):
        assert endpoint.acceptance[name] == endpoint.reported_acceptance[name] > 0
    assert endpoint.acceptance["generated"] == endpoint.tokens == 40 * 16


def test_callers_of_a_closed_loop_never_have_more_calls_under_way_than_there_are_callers(plain, tmp_path):
    """Catches also first calls, slow as they are, among the latencies; or lost for it."""
    out = tmp_path / "out"
    result = replay.replay(log(tmp_path, 30), [plain.url], Plan(concurrency=3, warmup=5), folder=out)
    rows = [json.loads(line)["servers"][plain.url] for line in (out / "calls.jsonl").open()]
    ends = sorted([(row["sent_s"], 1) for row in rows] + [(row["sent_s"] + row["e2e_s"] - 1e-4, -1) for row in rows])
    assert max(np.cumsum([step for _, step in ends])) == 3
    (endpoint,) = result.endpoints
    assert faults(result, out) == [] and endpoint.answered == 30 and result.schedule_error_s is None
    assert (endpoint.e2e_s.samples, endpoint.gap_s.samples) == (25, 25 * 7)


def test_a_pause_doubles_and_does_what_the_server_says():
    """Catches Retry-After that is ignored, and callers that all come back at once."""
    noise = random.Random(0)
    pauses = [[Answer(0.0, attempts=attempt).backoff_s(noise) or 0 for _ in range(200)] for attempt in (1, 2, 3, 20)]
    for attempt, drawn in zip((1, 2, 4, 60), pauses, strict=True):
        assert 0.25 * attempt <= min(drawn) < max(drawn) <= 0.75 * attempt
    assert Answer(0.0, retry_after_s=2.5).backoff_s(noise) == 2.5
    assert Answer(0.0, retry_after_s=3600).backoff_s(noise) is None
    assert Answer(0.0, retry_after_s=30.5).backoff_s(noise) is None
    again = [status for status in range(200, 600) if Answer(0.0, status=status, failure="x").is_retryable]
    assert again == [200, 408, 429, 500, 502, 503, 504]


def test_a_call_is_sent_as_the_plan_says():
    """Catches a limit that makes short answers long and a model that a server does not have."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}]
    call = Call(
        {"messages": messages, "model": "gpt", "max_tokens": 5, "temperature": 1, "tools": []}, "1", synthetic=True
    )
    server = Server(address_of("x"), ("ours", "more"), None, None)
    sent = lambda **plan: (lambda path, body: (path, json.loads(body)))(*prepared(call, server, Plan(**plan)))
    path, body = sent()
    assert path == "/v1/chat/completions" and body["messages"] == messages and body["stream"]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("ours", 5, 1)
    assert body["stream_options"] == {"include_usage": True} and "ignore_eos" not in body
    assert [sent(max_tokens=most)[1]["max_tokens"] for most in (3, 9)] == [3, 5]
    assert sent(greedy=True)[1]["temperature"] == 0 and sent(ignore_eos=True)[1]["ignore_eos"]
    assert sent(model="gpt")[1]["model"] == "gpt"
    path, body = sent(completions=True)
    assert path == "/v1/completions" and body["prompt"] == "S\n\nU" and not {"messages", "tools"} & set(body)
    assert call.body["messages"] == messages and "stream" not in call.body


@contextmanager
def speaking(data: bytes, pieces: int = 1, close: bool = True, heard: list[bytes] | None = None) -> Iterator[str]:
    """A server that says `data` to whoever connects and sends something; what it heard goes to `heard`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def speak() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            request = line.recv(65536)
            if heard is not None:
                heard.append(request)
            size = max(1, len(data) // pieces)
            for start in range(0, len(data), size):
                line.sendall(data[start : start + size])
            if close:
                line.close()

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def asked(url: str, timeout_s: float = 5.0, key: str | None = None, name: str = "1") -> Answer:
    async def ask() -> Answer:
        client = ConnectionPool(address_of(url), timeout_s, key)
        try:
            return await client.post("/v1/completions", b"{}", name)
        finally:
            client.close()

    return asyncio.run(ask())


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b'data: {"choices":[{"text":"hi","finish_reason":"stop"}]}\n\n'


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        (OK + b"\r\n" + EVENT, None), (OK + b"Connection: close\r\n\r\n" + EVENT + b"data: [DONE]\n\n", None),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(EVENT), EVENT), None),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\n" + EVENT, None),
        (OK + b"Content-Length: 999\r\n\r\n" + EVENT, "connection closed"), (OK + b"\r\ndata: {\n\n", "not understood"),
        (OK + b"\r\ndata: [1]\n\n", "not understood: an event that is a list"),
        (OK + b'\r\ndata: {"choices": [1]}\n\n', "not understood"),
        (OK + b"\r\n: nothing\n\n", "the stream ended before the answer did"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "not understood: illegal chunk header"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nfffffff\r\n", "connection closed"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", "not understood: malformed chunk"),
        (OK + b"Content-Length: -3\r\n\r\n", "not understood: bad Content-Length"),
        (OK + b"Content-Encoding: gzip\r\n\r\n", "not understood: the answer is compressed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not understood: illegal status line"),
        (b"A" * 70_000, "not understood: Receive buffer too long"), (b"", "connection closed"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\noops", "HTTP 500: oops"),
        (b'HTTP/1.1 422 X\r\nContent-Length: 17\r\n\r\n{"error": "extra"}'[:-1], "HTTP 422"),
    ],
)  # fmt: skip
def test_whatever_a_server_says_is_an_answer(sent, failure):
    """Catches a server that ends the replay, or that is waited for without an end, by what it says."""
    for pieces in (1, 11):
        with speaking(sent, pieces) as url:
            answer = asked(url)
        if failure is None:
            assert answer.failure is None and answer.text == "hi"
        else:
            assert answer.failure is not None and answer.failure.startswith(failure)
        assert answer.ended_s >= answer.began_s


def test_a_server_that_is_not_there_or_says_nothing_is_an_answer_too():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert asked(f"http://127.0.0.1:{port}").failure == "no connection: Connection refused"
    with speaking(b"", close=False) as url:
        assert asked(url, timeout_s=0.1).failure == "timeout: silent for 0.1 s"
    assert (asked("http://host.invalid:1").failure or "").startswith("no connection: ")


def test_a_key_goes_along_and_no_name_ends_a_header():
    """Catches a key that is left out, and an id from a log that writes headers of its own."""
    heard = []
    with speaking(OK + b"\r\n" + EVENT, heard=heard) as url:
        asked(url, key="k1")
        asked(url.replace("//", "//me:pw%3A1@"), name="a\r\nX-Evil: 1")
    assert b"\r\nAuthorization: Bearer k1\r\n" in heard[0]
    assert b"\r\nAuthorization: Basic bWU6cHc6MQ==\r\n" in heard[1]
    assert b"\r\nX-Request-Id: a__X-Evil:_1\r\n" in heard[1]


def test_addresses_are_understood_and_passwords_not_shown():
    for url in ("127.0.0.1:80/v1", "http://127.0.0.1/v1/chat/completions", "http://me:pw@127.0.0.1/v1/"):
        assert address_of(url).shown == "http://127.0.0.1:80"
    assert address_of("https://host/team/v1").shown == "https://host:443/team"
    for url in ("ftp://x", "http://", "http://x:99999", "http://x/a b"):
        with pytest.raises(ConfigError):
            address_of(url)


def test_gaps_in_bins_have_the_percentiles_of_the_gaps_themselves():
    noise = np.random.default_rng(0).lognormal(-4, 1, 5000)
    gaps = Gaps()
    for gap in (0.0, *noise):
        gaps.take(gap)
    spread = gaps.spread()
    assert spread is not None and spread.samples == 5001 and spread.most == noise.max()
    assert [spread.p50, spread.p95, spread.p99] == pytest.approx(np.quantile(noise, [0.5, 0.95, 0.99]), rel=0.02)
    assert Gaps().spread() is None


def answered(number: int, endpoint: Endpoint, ttft: float, e2e: float, tokens: int) -> None:
    endpoint.sent += 1
    endpoint.take(number, Answer(0.0, ttft, e2e, e2e, tokens=tokens, is_done=True, due_s=0.0))


def test_tpot_and_goodput_are_what_they_are_said_to_be():
    """Catches TPOT over all tokens instead of all but the first, and a limit that is met by half."""
    kept = Endpoint("u", slo={"ttft": 0.5, "tpot": 0.05})
    answered(0, kept, 0.4, 0.8, 11)  # 40 ms a token
    answered(1, kept, 0.4, 1.4, 11)  # 100
    answered(2, kept, 0.6, 0.7, 11)
    answered(3, kept, 0.4, 0.4, 1)  # none
    each = kept.columns["tpot_s"]
    assert each[:2].tolist() == pytest.approx([0.04, 0.1]) and np.isnan(each[3])
    kept.end(0.0)
    assert kept.within_limits == 2
    assert kept.tpot_s is not None and kept.tpot_s.samples == 3 and kept.goodput_per_s == pytest.approx(2 / 1.4)


def test_goodput_is_of_the_time_of_the_calls_that_are_timed():
    """Catches calls of a few seconds divided by the minutes of the warm-up."""
    slo = {"tpot": 0.05}
    kept = Endpoint("u", slo=slo)
    for number, counts in enumerate([False] * 30 + [True] * 10):
        began = 0.1 * number
        kept.sent += 1
        kept.take(number, Answer(began, began + 0.01, began + 0.1, tokens=5, is_done=True), counts)
    kept.end(0.0)
    assert kept.within_limits == 10 and kept.goodput_per_s == pytest.approx(10) == pytest.approx(kept.answers_per_s)
    unknown = Answer(0.0, 0.1, 9.0, is_done=True)
    assert not unknown.meets(slo) and unknown.meets({"ttft": 1})
    unseen = Answer(0.0, None, 9.0, tokens=50, is_done=True)
    assert not unseen.meets(slo)


def test_ratios_are_over_the_calls_that_both_answered_and_blocks_change_little():
    """Catches answers of one call beside those of another, which happens as soon as one server loses a call."""
    noise = np.random.default_rng(1)
    first, second = Endpoint("a"), Endpoint("b")
    for number in range(1500):
        long = float(noise.exponential(1))
        if number % 7:
            answered(number, first, 0.1, 0.1 + long, 5)
        if number % 5:
            answered(number, second, 0.1, 0.1 + long / 2, 5)
    ratio = latencies.ratios(first, second, paired=True)["tpot_s"]
    assert ratio.center == pytest.approx(0.5) and ratio.high - ratio.low < 1e-9
    alone = latencies.ratios(first, second, paired=False)["tpot_s"]
    assert alone.low < 0.5 < alone.high


app = typer.Typer()
app.command()(verb)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_server_that_answers_nothing_is_an_error_and_its_model_is_said(plain, tmp_path):
    """Catches a replay that ends well though nothing was answered, and a log's model that is changed in silence."""
    rows = [{"prompt": "x", "model": "gpt-4", "timestamp": 0, "stub": {"status": 400}}]
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n")
    done = run(path, "--against", plain.url)
    assert done.exit_code == 1 and "no call was answered" in str(done.exception)
    assert f"{plain.url} has no gpt-4: 1 calls went to stub" in done.output


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((), ConfigError, "nothing to do"),
        (("--against", "URL", "--rate", "1", "--concurrency", "1"), ConfigError, "choose one"),
        (("--against", "URL", "--slo", "mood=1"), ConfigError, "no limit 'mood'"),
        (("--against", "URL", "--key-from", "ABSENT_KEY"), ConfigError, "this environment variable is not set"),
        (("--against", "URL", "--slo", "ttft=nan,tpot=5"), ConfigError, "--slo ttft must be above 0 ms, got nan"),
        (("--against", "URL", "--timeout", "0"), ConfigError, "--timeout must be above 0, got 0"),
        (("--against", "URL", "--retries", "-1"), ConfigError, "at least 0, got 0 and -1"),
        (("--against", "URL,URL/v1", "--save", "SAVED"), ConfigError, "URL is named twice, and its counters"),
        (("--against", "URL", "--rate", "0", "--save", "SAVED"), ConfigError, "above 0"),
        (("--against", "URL", "--json", "LOG"), ConfigError, "--json would overwrite LOG, the log"),
        (("--against", "URL", "--json", "absent/x.json"), DataError, "no such folder"),
    ],
)
def test_what_can_not_be_done_is_said_before_anything_is_sent(arguments, kind, message, plain, tmp_path):
    before = len(httpx.get(plain.url + "/received").json())
    path, saved = log(tmp_path, 3).path, tmp_path / "saved.jsonl"
    named = lambda part: part.replace("URL", plain.url).replace("LOG", str(path)).replace("SAVED", str(saved))
    done = run(path, *map(named, arguments), "--out", tmp_path / "out")
    assert isinstance(done.exception, kind) and named(message) in str(done.exception)
    assert not (tmp_path / "out").exists() and not saved.exists()
    assert len(httpx.get(plain.url + "/received").json()) == before


def test_a_file_that_is_there_is_written_over_only_with_over(plain, tmp_path):
    """Catches a --save that takes what somebody kept, and --calls that sends a few and saves all."""
    path, saved = log(tmp_path, 3).path, tmp_path / "saved.jsonl"
    saved.write_text("precious")
    done = run(path, "--save", saved)
    assert isinstance(done.exception, DataError) and "--over" in str(done.exception) and saved.read_text() == "precious"
    done = run(path, "--save", saved, "--over", "--calls", "2")
    assert done.exit_code == 0 and "2 calls written" in done.output
    assert [call.id for call in traces.read(saved).calls()] == ["call0", "call1"]
    path = path.rename(tmp_path / "calls.jsonl")  # named as our own file is
    done = run(path, "--against", plain.url, "--out", tmp_path, "--over")
    assert isinstance(done.exception, ConfigError) and traces.read(path).size == 3


@pytest.mark.parametrize("name", ["link.jsonl", "part"])
def test_the_log_that_is_read_is_never_written_onto(name, tmp_path):
    """Catches a log that its own copy replaces, redacted and cut to one call."""
    path = log(tmp_path, 3).path
    (tmp_path / "link.jsonl").symlink_to(path)
    if name == "part":  # what is written stands there until it is whole
        path = path.rename(tmp_path / "part.part")
    before = path.read_bytes()
    done = run(path, "--save", tmp_path / name, "--redact", "--calls", "1", "--over")
    assert isinstance(done.exception, ConfigError) and "the log being read" in str(done.exception)
    assert path.read_bytes() == before


def test_a_log_without_times_wants_a_rate(plain, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n")
    done = run(path, "--against", plain.url)
    assert isinstance(done.exception, ConfigError) and "--rate" in str(done.exception)


def test_redacted_nothing_of_what_was_asked_or_answered_is_written(plain, other, tmp_path):
    """Catches text that goes into a line, an error's words or an example, and ids, which may be addresses of people;
    and a table that does not say what was found, or what is there written over unasked."""
    trace, out, kept = log(tmp_path, 6, wishes={3: {"status": 400}}), tmp_path / "out", tmp_path / "kept.json"
    both = f"{plain.url},{other.url}"
    for redact in (True, False):
        saved = tmp_path / "saved.jsonl"
        arguments = ("--against", both, "--out", out, "--save", saved, "--slo", "ttft=500, tpot=50ms", "--json", kept)
        done = run(trace.path, *arguments, *(["--redact"] if redact else ["--over"]))
        assert done.exit_code == 0, done.output
        for word in ("6 calls over 0 s (raw)", "TTFT ms, mean", "second / first", "0 of 5 equal", "within ttft 500"):
            assert word in done.output
        value = json.loads(kept.read_text())
        assert value == json.loads((out / "replay.json").read_text())
        assert value["comparisons"][0]["ratios"]["ttft_s"]["low"] > 1
        again = run(trace.path, *arguments)
        assert isinstance(again.exception, DataError) and "--over" in str(again.exception)
        texts = "\n".join(path.read_text() for path in (*(tmp_path / "out").iterdir(), saved))
        for word in ("secret", "told to", " 1 ", "call1"):
            assert (word in texts) != redact, word
