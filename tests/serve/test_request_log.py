"""The log of requests: replay reads it, it holds no text without consent, and no fault of the disk reaches a client."""

import json
import logging
import os
import resource
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.state import Request
from outrider.drafters import ngram
from outrider.errors import ConfigError
from outrider.sampling.settings import Sampling
from outrider.serve.calls import Call
from outrider.serve.records import request_log
from outrider.serve.records.request_log import Ended, RequestLog
from outrider.serve.records.traces import Traces
from outrider.traffic.logs.traces import read
from outrider.traffic.replay.plan import Plan
from outrider.traffic.replay.run import replay
from outrider.traffic.watch import glance
from tests.serve.running import running

SECRET = "the cormorant dives at noon"


def ended(
    name: str = "a", body: Mapping[str, Any] | None = None, written: int = 7, prompt: int = 5, answer: str = ""
) -> Ended:
    call = Call(Request(list(range(prompt)), 20, Sampling()), lambda output: None, owner="bird")
    call.arrived = time.monotonic() - 2
    call.admitted, call.first, call.finished = call.arrived + 0.5, call.arrived + 0.75, call.arrived + 1.5
    call.steps, call.drafted, call.accepted, call.written = 4, 9, 3, written
    asked = {"prompt": SECRET, "max_tokens": 20, "temperature": 0} if body is None else body
    return Ended(name, asked, [call], ["length"], [answer])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_of_a_server_can_be_sent_to_it_again(talker, tmp_path):
    """Catches a row that replay can't read, a time that is not the arrival's, texts that came back changed,
    and names that `watch`, `replay` and the server do not share."""
    path = tmp_path / "requests.jsonl"
    with (
        RequestLog(path, log_prompts=True) as log,
        running(talker, ngram.build(ngram.Config(), talker), log=log) as there,
    ):
        client = there.client()
        began = time.time()
        for n in range(3):
            asked = [{"role": "user", "content": f"héron {n}"}]
            client.chat.completions.create(model="tiny", messages=asked, max_tokens=9 + n, temperature=0)
        client.completions.create(model="tiny", prompt="abcabcabcabc", max_tokens=40, temperature=0)
        assert there.settled(lambda: path.exists() and len(rows(path)) == 4)
        trace = read(path)
        assert (trace.format, trace.size, trace.has_times, trace.num_synthetic) == ("outrider", 4, True, 0)
        calls = list(trace.calls())
        assert [call.body.get("messages", [{}])[0].get("content") for call in calls[:3]] == [
            f"héron {n}" for n in range(3)
        ]
        assert calls[3].body["prompt"] == "abcabcabcabc" and calls[3].expected_tokens == 40
        assert [call.body["max_tokens"] for call in calls] == [9, 10, 11, 40]
        assert began - 1 < trace.start_s < time.time()
        assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
        again = replay(trace, [there.url], Plan(speed=10))
        [endpoint] = again.endpoints
        assert endpoint.answered == 4 and endpoint.acceptance["generated"] == endpoint.tokens
        counters, window = glance(there.url)
        assert counters.server == "Outrider" and window.stats.generated == 2 * endpoint.tokens
        assert window.stats.by_position[0] > 0 and 0 < counters.age_s(time.time()) < 60
        [same] = again.log_answers.values()
        assert (same.equal, same.compared) == (4, 4)  # greedy answers are the log's own
    row = rows(path)[0]["meta"]
    assert row["prompt_tokens"] > 8 and 0 < row["first_token_s"] <= row["seconds"] < 60
    assert row["tokens"] <= row["steps"] + row["accepted"] and row["finish_reason"] in ("length", "stop")


def test_figures_are_those_of_the_request(tmp_path):
    path = tmp_path / "log.jsonl"
    with RequestLog(path) as log:
        log.add(ended(written=7, prompt=5))
    [row] = rows(path)
    assert abs(row["t"] - (time.time() - 2)) < 1 and row["expected_output_tokens"] == 7
    assert row["meta"] == {
        "id": "a", "owner": "bird", "finish_reason": "length", "prompt_tokens": 5, "cached_tokens": 0, "tokens": 7,
        "steps": 4, "drafted": 9, "accepted": 3, "queue_s": 0.5, "first_token_s": 0.75, "seconds": 1.5,
    }  # fmt: skip


def test_several_answers_are_one_request(tmp_path):
    """Catches a prompt that counts once for each answer, and the last answer's times for all."""
    first, second = ended(written=3).calls[0], ended(written=9).calls[0]
    second.finished += 1
    with RequestLog(tmp_path / "log.jsonl") as log:
        log.add(Ended("n", {"prompt": "x", "n": 2}, [first, second], ["stop", "cancelled"]))
    [row] = rows(tmp_path / "log.jsonl")
    found = row["meta"]
    assert (found["prompt_tokens"], found["tokens"], row["expected_output_tokens"]) == (5, 12, 9)
    assert found["finish_reason"] == ["stop", "cancelled"] and found["seconds"] == pytest.approx(2.5, abs=0.1)


def texts_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, each in value.items() if key != "role" for text in texts_in(each)]
    return [text for each in value for text in texts_in(each)] if isinstance(value, list) else [str(value)]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_without_consent_no_text_is_in_the_log(tmp_path_factory, data):
    """Catches a text that is logged otherwise than as the prompt: as a part, a tool, a name, a stop string, a user."""
    word = "cormorant" + data.draw(st.text(max_size=20))
    content = data.draw(st.sampled_from([word, [{"type": "text", "text": word}], {"odd": word}, None]), label="content")
    body = data.draw(
        st.sampled_from([
            {"prompt": content or word}, {"prompt": [word, word]},
            {"messages": [{"role": "user", "content": content, "name": word}, {"role": word, "content": word}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": word}}]}]},
        ])
    )  # fmt: skip
    extra = {"stop": [word], "user": word, "metadata": {"a": word}, "tools": [{"function": {"name": word}}]}
    extra |= {"response_format": {"schema": word}, "prediction": {"content": word}, "logit_bias": {word: 1}, word: True}
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    with RequestLog(path) as log:
        log.add(ended(body=body | extra | {"temperature": 0.5, "api_key": word}, answer=word))
    text = path.read_text()
    assert "cormorant" not in text and "cormorant" not in text.lower()
    trace = read(path)
    [call] = trace.calls()
    assert call.synthetic and call.body["temperature"] == 0.5
    if body == {"prompt": word}:
        assert len(call.body["prompt"]) == len(word)


def test_equal_texts_stay_equal_and_nobody_can_look_them_up(tmp_path):
    """Catches a hash without a key, which shared beginnings would not need: anybody could try texts."""
    for name in ("a", "b"):
        with RequestLog(tmp_path / name) as log:
            for content in ("one", "two", "one"):
                log.add(ended(body={"messages": [{"role": "user", "content": content}]}))
    hidden = {
        name: [row["body"]["messages"][0]["content"]["hidden"] for row in rows(tmp_path / name)] for name in ("a", "b")
    }
    assert hidden["a"][0] == hidden["a"][2] != hidden["a"][1]
    assert not {*hidden["a"]} & {*hidden["b"]}


def test_a_key_is_never_logged(tmp_path):
    body = {"prompt": "x", "api_key": SECRET, "extra_headers": {"Authorization": SECRET}, "max_tokens": 3}
    with RequestLog(tmp_path / "log.jsonl", log_prompts=True) as log:
        log.add(ended(body=body))
    [row] = rows(tmp_path / "log.jsonl")
    assert row["body"] == {"prompt": "x", "max_tokens": 3}
    assert (tmp_path / "log.jsonl").stat().st_mode & 0o077 == 0  # nobody else may read it


def test_the_logger_gets_a_line_a_request_and_no_text(caplog, tmp_path):
    """With consent too: a log of a process goes to more places than a file that was asked for."""
    with caplog.at_level(logging.INFO, "outrider.serve"), RequestLog(tmp_path / "log", log_prompts=True) as log:
        for name in "ab":
            log.add(ended(name, answer=SECRET))
    found = [json.loads(record.message) for record in caplog.records]
    assert [one["request"] for one in found] == ["a", "b"]
    assert found[0]["tokens"] == 7 and found[0]["finish_reason"] == "length"
    assert SECRET not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "outrider.serve"), RequestLog() as log:
        log.add(ended("c"))
    assert [json.loads(record.message)["request"] for record in caplog.records] == ["c"]


def test_files_are_rotated_and_each_can_be_read(tmp_path):
    """Catches a row cut in two, a file larger than promised, and more files than asked for."""
    path = tmp_path / "log.jsonl"
    with RequestLog(path, largest_bytes=3000, files=3) as log:
        for n in range(40):
            log.add(ended(str(n)))
            log.add(ended(str(n) + "b"))
            while log._ended.qsize():
                time.sleep(0.001)
    found = sorted(tmp_path.iterdir())
    assert [one.name for one in found] == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert all(one.stat().st_size <= 3000 for one in found)
    names = [row["meta"]["id"] for one in reversed(found) for row in rows(one)]
    written = [f"{n}{end}" for n in range(40) for end in ("", "b")]
    assert names == written[-len(names) :] and len(names) > 10
    for one in found:
        assert read(one).size == len(rows(one))


def test_a_row_that_was_cut_off_stays_out_of_the_way(tmp_path):
    """Catches a machine that lost its power, after which nothing of the log could be read."""
    (tmp_path / "log").write_text('{"t": 1, "bo')
    for name in "ab":  # a new server goes on with the file
        with RequestLog(tmp_path / "log") as log:
            log.add(ended(name))
    assert [row["meta"]["id"] for row in rows(tmp_path / "log")] == ["a", "b"]
    assert (tmp_path / "log.1").read_text() == '{"t": 1, "bo'


def test_a_full_disk_costs_the_log_and_nothing_else(tmp_path, caplog):
    """The kernel refuses what lies beyond a size, as a full disk does.  Catches half a row at the end of the file, a
    warning for every request, and a thread that ends."""
    path = tmp_path / "log"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
    try:
        with RequestLog(path) as log:
            for n in range(30):
                log.add(ended(str(n)))
                while log._ended.qsize():
                    time.sleep(0.001)
            assert log._thread.is_alive() and log.is_off
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = [row["meta"]["id"] for row in rows(path)]
    assert found == [str(n) for n in range(len(found))] and 2 < len(found) < 30
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "File too large" in record.message and "not logged there" in record.message


def test_a_file_that_was_moved_is_begun_anew(tmp_path):
    """Catches a log that goes on in the old file after a tool has rotated it."""
    path = tmp_path / "log"
    with RequestLog(path) as log:
        log.add(ended("a"))
        while not path.stat().st_size:
            time.sleep(0.001)
        path.rename(tmp_path / "old")
        log.add(ended("b"))
    assert [row["meta"]["id"] for row in rows(tmp_path / "old")] == ["a"]
    assert [row["meta"]["id"] for row in rows(path)] == ["b"]


def test_nobody_waits_for_a_disk_that_hangs(tmp_path, caplog, monkeypatch):
    """A pipe that nobody reads stands for the disk.  Catches a client that waits for it, and memory without a limit."""
    monkeypatch.setattr(request_log, "MOST_WAITING", 300)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = RequestLog(path)
    adds = threading.Thread(target=lambda: [log.add(ended(str(n))) for n in range(2000)])
    adds.start()
    adds.join(60)
    assert not adds.is_alive() and log._ended.qsize() <= 300
    assert sum("too slow" in record.message for record in caplog.records) == 1
    with path.open("rb") as pipe:  # the disk is back
        drained = threading.Thread(target=pipe.read)
        drained.start()
        log.stop()
        drained.join(60)
    assert not drained.is_alive()


@pytest.mark.parametrize("place", ["missing/log", "."])
def test_a_file_that_can_not_be_written_is_refused_at_the_start(tmp_path, place):
    with pytest.raises(ConfigError, match="can't write a log of requests"):
        RequestLog(tmp_path / place)


def test_a_strange_body_loses_its_own_row_only(tmp_path):
    loop = {}
    loop["loop"] = loop
    with RequestLog(tmp_path / "log", log_prompts=True) as log:
        log.add(ended("a", body={"prompt": loop}))
        log.add(ended("b"))
    assert [row["meta"]["id"] for row in rows(tmp_path / "log")] == ["b"]


def test_a_collector_gets_a_span_of_each_request_and_no_text(tmp_path, caplog):
    """Catches a text in a trace, times or counts that are not the request's, and a collector that is away and stops
    the log."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with RequestLog(tmp_path / "log", traces=Traces(url)) as log:
            log.add(ended("one", answer=SECRET))
        collector.shutdown()
    assert SECRET.encode() not in b"".join(bodies)
    [span] = json.loads(bodies[0])["resourceSpans"][0]["scopeSpans"][0]["spans"]
    values = {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}
    assert (values["gen_ai.response.id"], values["gen_ai.response.finish_reasons"]) == ("one", "length")
    assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == ("5", "7")
    assert (values["outrider.accepted"], round(values["outrider.first_token_s"], 2)) == ("3", 0.75)
    began, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    assert end - began == 1.5e9 and abs(time.time_ns() - began - 2e9) < 20e9
    assert (len(span["traceId"]), len(span["spanId"]), span["kind"]) == (32, 16, 2)

    with RequestLog(tmp_path / "log", traces=Traces(url)) as log:  # the collector is gone
        log.add(ended("two"))
    assert [row["meta"]["id"] for row in rows(tmp_path / "log")] == ["one", "two"]
    assert "traces can't be sent" in caplog.text
    with pytest.raises(ConfigError, match=r"serve\.traces must be a URL"):
        Traces("collector:4318")
