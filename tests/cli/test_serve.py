"""`outrider serve`: what it says, what it refuses before anything loads, and how it ends."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console
from tiny import write_run_file
from verbs import outrider_with

from outrider import generate
from outrider.cli import console, serve
from outrider.errors import ConfigError
from outrider.serve.config import Config
from outrider.serve.http import keys
from outrider.serve.http.server import bound
from outrider.targets.load import load_target
from tests.runs.forks import fork

LONG = {"prompt": "abcabc", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}


def test_a_server_says_what_it_is_and_drains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a request that SIGTERM cuts off, a new one that is taken then, an exit code of a failure, an option that
    does not reach the server."""
    monkeypatch.setattr(console, "out", Console(width=300))
    log, ring, requests = tmp_path / "log", tmp_path / "keys.json", tmp_path / "requests.jsonl"
    key = {"authorization": f"Bearer {keys.add(ring, 'ann')}"}
    words = ("serve", "--target", str(folder), "--port", "0", "--drafter", "ngram", "--slots", "2", "serve.drain_s=60",
             "--keys", str(ring), "--request-log", str(requests), "--log-prompts")  # fmt: skip
    process = fork(*words, log=log)
    try:
        while not (server := re.search(r"server +(http://\S+),", said := log.read_text() if log.exists() else "")):
            assert process.is_alive(), said
            time.sleep(0.01)
        url = server[1]
        assert "drafter   ngram: at most" in said
        assert re.search(r"engine    2 slots of 256 tokens.*a queue of 256 texts; policy auto", said)
        assert f"model tiny; the keys of {ring}" in said
        wanted = generate(load_target(folder), "abcabc", max_new_tokens=8)[0].text
        asked = {"model": "tiny", "prompt": "abcabc", "max_tokens": 8, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=asked).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=asked, headers=key)
        assert answer.json()["choices"][0]["text"] == wanted
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"n": 4}, headers=key, timeout=60) as stream:
            events = stream.iter_lines()
            next(events)
            os.kill(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + 10
            while (health := httpx.get(f"{url}/ready")).status_code == 200 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert health.json() == {"status": "stopping"}
            assert httpx.get(f"{url}/health").status_code == 200  # a restart would cut the rest off
            refused = httpx.post(f"{url}/v1/completions", json=asked, headers=key)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            rest = [line.removeprefix("data: ") for line in events if line]
        ends = [c["finish_reason"] for line in rest[:-1] for c in json.loads(line)["choices"] if c["finish_reason"]]
        assert rest[-1] == "[DONE]" and ends == ["length"] * 4
        process.join(20)
        assert process.exitcode == 0 and "stopped; all running requests have finished" in log.read_text()
        assert asked["prompt"] in requests.read_text()
    finally:
        process.kill()


def test_a_file_of_requests_is_answered(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a batch that needs a port, and one that begins again from the start."""
    given, to = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "abcabc", "max_tokens": 6, "temperature": 0}
    row = {"method": "POST", "url": "/v1/completions", "body": body}
    given.write_text("".join(json.dumps(row | {"custom_id": f"r{i}"}) + "\n" for i in range(3)))
    words = ("serve", "--target", str(folder), "--batch-in", str(given), "--batch-out", str(to), "--slots", "2")
    assert outrider_with(*words) == 0
    assert "3 requests from" in capsys.readouterr().out
    wanted = generate(load_target(folder), "abcabc", max_new_tokens=6)[0].text
    found = [json.loads(line) for line in to.read_text().splitlines()]
    assert [one["response"]["body"]["choices"][0]["text"] for one in found] == [wanted] * 3
    before = to.read_text()
    assert outrider_with(*words) == 0
    assert "3 already answered" in capsys.readouterr().out
    assert to.read_text() == before


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any, **settings: Any) -> None:
        raise AssertionError("a target is loaded")

    monkeypatch.setattr(serve, "load_target", load)


REFUSED = [
    (("--host", "0.0.0.0"), "no key is required; name a file of keys with --keys"),
    (("--host", "no.such.host.invalid"), "can't listen on no.such.host.invalid"),
    (("--keys", "none.json"), "outrider keys add none.json NAME"),
    (("--slots", "0"), "serve.slots"),
    (("--policy", "greedy"), "--policy"),
    (("--verification", "typical"), "allow_lossy"),
    (("serve.quue=5",), "unknown key 'quue'; did you mean 'queue'"),
    (("train.lr=1",), "settings begin with serve. or target."),
    (("demo",), "'demo' is neither a run file (.yaml) nor a setting"),
    (("--set", "length=3"), "--set length=3 needs a drafter"),
    (("--batch-in", "x.jsonl"), "--batch-in and --batch-out must be given together"),
    (("--batch-in", "none.jsonl", "--batch-out", "out.jsonl"), "can't read none.jsonl"),
    (("--request-log", "none/log.jsonl"), "can't write a log of requests"),
    (("--drafter", "ngrm"), "neither a checkpoint folder nor a drafter; did you mean 'ngram'"),
]


def test_what_can_not_be_served_is_said_first(unloaded, capsys, monkeypatch, tmp_path):
    """Catches minutes of loading before a word that could have been said at once, and a server that is open to all."""
    monkeypatch.chdir(tmp_path)
    for words, wanted in REFUSED:
        assert outrider_with("serve", "--port", "0", *words) in (1, 2)
        assert wanted in " ".join(capsys.readouterr().err.split())


def test_other_machines_need_a_key_or_consent(tmp_path, unloaded, capsys):
    """Catches a server that is open to the network because its address is written in another way, and one that loads
    for minutes and then can't listen."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert outrider_with("serve", "--port", str(taken.getsockname()[1])) == 2
    assert "choose another --port or --host" in " ".join(capsys.readouterr().err.split())
    file = tmp_path / "keys.json"
    keys.add(file, "ann")
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            bound(Config(host=host, port=0))
    for more in ({"keys": str(file)}, {"allow_anonymous": True}, {"host": "localhost"}, {"host": "127.0.0.5"}):
        bound(Config(**({"host": "0.0.0.0", "port": 0} | more))).close()


def test_a_run_file_names_what_is_served(tmp_path, folder, unloaded, monkeypatch, capsys):
    """Catches a run whose untrained drafter is served, a section that is not read, and an option that does not go
    before it."""
    monkeypatch.chdir(tmp_path)
    path = write_run_file(tmp_path / "run.yaml", folder, serve={"slots": 3, "queue": 7})
    assert outrider_with("serve", str(path), "--port", "0") == 2
    assert "run `outrider train" in " ".join(capsys.readouterr().err.split())
    found = serve._served([str(path)], ["serve.slots=5"], "ngram", ["length=3"])
    assert (found.target.name, found.config.slots, found.config.queue) == (str(folder), 5, 7)
    assert found.drafter == {"kind": "ngram", "length": 3}
    values = yaml.safe_load(path.read_text()) | {"drafter": {"kind": "ngram"}}
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if key != "train"}))
    own = serve._served([str(path)], [], None, []).drafter
    assert isinstance(own, dict) and own["kind"] == "ngram"
