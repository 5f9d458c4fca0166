"""Requests from a file: the same answers as over HTTP, and a run that was stopped goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import Sampling, generate
from outrider.errors import ConfigError, DataError
from outrider.serve import batch
from outrider.serve.config import Config
from outrider.serve.service import Post, Service
from outrider.targets.hf.transformers import TransformersTarget
from serve.running import MODEL, engine_of


@pytest.fixture
def service(talker: TransformersTarget) -> Iterator[tuple[Service, Post]]:
    config = Config(slots=2, queue=3, prefix_bytes=0)
    with engine_of(talker, None, config) as (engine, post):
        yield Service(engine, talker, config, name=MODEL), post


def row(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def rows(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "answered twice"
    return {one["custom_id"]: one for one in found}


def test_a_file_is_answered_as_generate_does(tmp_path, service, talker):
    """Catches answers under another request's id and a refusal that ends the run."""
    given, to = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"{'ab' * i} {i}" for i in range(1, 9)]
    lines = [row(f"p{i}", {"prompt": text, "max_tokens": 8, "temperature": 0}) for i, text in enumerate(prompts)]
    chat = [{"role": "user", "content": "abc"}]
    lines.append(row("chat", {"messages": chat, "max_tokens": 8, "temperature": 0}, "/v1/chat/completions"))
    lines += [row("wrong", {"prompt": "a", "temprature": 1}), row("stream", {"prompt": "a", "stream": True}), "\n"]
    given.write_text("".join(lines))
    told = []
    assert batch.check(given, to) == (11, 0)
    assert batch.run(*service, given, to, lambda *counts: told.append(counts)) == 2
    found = rows(to)
    wanted = generate(talker, prompts, max_new_tokens=8, sampling=Sampling())
    for i, one in enumerate(wanted):
        answer = found[f"p{i}"]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["text"] == one.text
    body = found["chat"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == generate(talker, [chat], max_new_tokens=8)[0].text
    assert found["wrong"]["response"]["status_code"] == found["stream"]["response"]["status_code"] == 400
    assert "did you mean 'temperature'" in found["wrong"]["response"]["body"]["error"]["message"]
    assert told[-1] == (11, 2) and [done for done, _ in told] == list(range(1, 12))


def test_a_run_that_was_stopped_goes_on(tmp_path, service):
    """Catches a request that is answered twice and one that is left out."""
    given, to = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [row(f"p{i}", {"prompt": "abc", "max_tokens": 2}) for i in range(6)]
    given.write_text("".join(lines[:3]))
    batch.run(*service, given, to)
    before = to.read_text()
    to.write_text(before + '{"id": "batch_req_x", "custom_id": "p3", "respon')
    given.write_text("".join(lines))
    assert batch.check(given, to) == (6, 3)
    batch.run(*service, given, to)
    assert to.read_text().startswith(before)
    assert rows(to).keys() == {f"p{i}" for i in range(6)}
    after = to.read_text()
    assert batch.check(given, to) == (6, 6)
    batch.run(*service, given, to)
    assert to.read_text() == after


WRONG = [
    ("{\n", "line 2 is not JSON"),
    ("[]\n", "line 2 must be an object with custom_id"),
    (json.dumps({"custom_id": "b", "method": "POST", "url": "/v1/completions"}), "and body, an object"),
    (json.dumps({"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}), "custom_id, a string"),
    (row("b", {"prompt": "a"}, "/v1/embeddings"), "expected POST and /v1/completions or /v1/chat/completions"),
    (row("a", {"prompt": "a"}), "custom_id 'a' is used twice"),
    ('{"custom_id": "\\ud800"}', "line 2 is not JSON"),
]


def test_a_line_that_is_no_request_is_named_before_anything_loads(tmp_path):
    """Catches hours of work that end at a line that could have been read first."""
    given = tmp_path / "in.jsonl"
    for text, wanted in WRONG:
        given.write_text(row("a", {"prompt": "a"}) + text)
        with pytest.raises(DataError, match=wanted):
            batch.check(given, tmp_path / "out.jsonl")


def test_files_that_can_not_be_used_are_refused(tmp_path):
    """Catches requests that are overwritten by their answers, and answers into another file's end."""
    given = tmp_path / "in.jsonl"
    with pytest.raises(DataError, match="can't read"):
        batch.check(given, tmp_path / "out.jsonl")
    given.write_text(row("a", {"prompt": "a"}))
    with pytest.raises(ConfigError, match="would overwrite"):
        batch.check(given, given)
    with pytest.raises(ConfigError, match="does not exist; create it first"):
        batch.check(given, tmp_path / "none" / "out.jsonl")
    other = tmp_path / "notes.txt"
    other.write_text("mine\nand mine\n")
    with pytest.raises(DataError, match="is not a batch answer"):
        batch.check(given, other)
    assert other.read_text() == "mine\nand mine\n"
