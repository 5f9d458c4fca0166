"""The holder of one key tries to learn what another key's requests said."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import load_drafter
from outrider.serve.http import keys
from outrider.serve.records.request_log import RequestLog
from outrider.targets.hf.transformers import TransformersTarget

from .running import MODEL, Running, running

SECRET = "The vault opens with zebra 77x41. " * 3


class Two:
    """A server with two keys."""

    def __init__(self, server: Running, ann: str, bob: str):
        self.server, self.ann, self.bob = server, ann, bob

    def ask(self, key: str, prompt: str = SECRET, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "include_drafts": True}
        answer = httpx.post(
            f"{self.server.url}/v1/completions",
            json=body | more,
            headers={"authorization": f"Bearer {key}"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(params=["ngram", "suffix", "recycle"])
def two(talker: TransformersTarget, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Two]:
    file = tmp_path / "keys.json"
    ann, bob = keys.add(file, "ann"), keys.add(file, "bob")
    drafter = load_drafter(request.param, talker, shared=True if request.param == "recycle" else "tenant")
    log = RequestLog(tmp_path / "requests.jsonl")
    settings: dict[str, Any] = {"keys": str(file), "prefix_bytes": 1 << 24, "slots": 2}
    with log, running(talker, drafter, (request.param,), log, **settings) as server:
        yield Two(server, ann, bob)


def seen(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What an answer says about what the server knew."""
    counts = answer["outrider"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], counts["drafted"], counts["accepted"]


def test_another_key_finds_nothing_of_a_text(two: Two) -> None:
    """Catches caches and indexes of text that serve more than the key that filled them: a guess that is right would be
    cached, or drafted."""
    cold = two.ask(two.ann)
    for _ in range(3):
        warm = two.ask(two.ann)
    assert seen(warm) != seen(cold)  # there is something to find
    assert seen(warm)[0] > 0
    other = two.ask(two.bob)
    assert seen(other) == seen(cold)
    assert other["choices"] == cold["choices"]


def test_another_key_finds_nothing_of_a_text_that_is_being_generated(two: Two) -> None:
    """Catches what is shared between the slots of one batch, before anything is stored."""
    cold = two.ask(two.bob, max_tokens=8)
    file = Path(two.server.service.config.keys or "")
    for attempt in range(3):
        key = keys.add(file, f"eve{attempt}")
        running_text = threading.Thread(target=lambda: [two.ask(two.ann, max_tokens=60) for _ in range(2)])
        running_text.start()
        answer = two.ask(key, max_tokens=8)
        running_text.join()
        assert seen(answer) == seen(cold)


def test_a_prediction_is_of_one_request(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a prediction that stays in its slot, for the next key's request."""
    file = tmp_path / "keys.json"
    ann, bob = keys.add(file, "ann"), keys.add(file, "bob")
    with running(talker, keys=str(file), slots=1) as server:
        two = Two(server, ann, bob)
        text = two.ask(ann)["choices"][0]["text"]
        assert two.ask(ann, prediction={"type": "content", "content": text})["outrider"]["drafted"] > 0
        answer = two.ask(bob)
        assert answer["choices"][0]["text"] == text
        assert answer["outrider"]["drafted"] == 0


def test_no_page_and_no_log_says_what_a_key_asked(two: Two, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches metrics, pages, log lines and errors with a piece of a prompt, of an answer, or of a key."""
    caplog.set_level(logging.DEBUG)
    unknown = "outrider-" + "Q" * 40
    answers = [two.ask(two.ann)["choices"][0]["text"], two.ask(two.bob, "zebra " * 9)["choices"][0]["text"]]
    wrong: list[dict[str, Any]] = [
        {"prompt": SECRET, "max_tokens": 10**6}, {"prompt": SECRET, "zebra": 7}, {"prompt": SECRET, "model": "zebra"},
        {"prompt": SECRET, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "zebra"}}}},
        {"prompt": SECRET * 50},
    ]  # fmt: skip
    url = two.server.url
    for body in wrong:
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {two.ann}"})
        assert answer.status_code in (400, 404), answer.text
    assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {unknown}"}).status_code == 401
    assert httpx.get(f"{url}/zebra77x41").status_code == 401
    two.server.settled(lambda: not two.server.service.jobs)
    assert two.server.service.log is not None
    two.server.service.log.stop()
    open_pages = [httpx.get(url + path).text for path in ("/metrics", "/stats", "/health", "/openapi.json", "/")]
    own_loggers = [one.getMessage() for one in caplog.records if one.name.startswith(("outrider", "uvicorn"))]
    places = [*open_pages, *own_loggers, (tmp_path / "requests.jsonl").read_text()]
    for hidden in ("zebra", "77x41", "vault", two.ann, two.bob, unknown, *answers):
        assert not [place for place in places if hidden in place or json.dumps(hidden)[1:-1] in place], hidden


def test_a_key_that_is_made_anew_finds_nothing(two: Two) -> None:
    """Catches a name that is given to somebody else, who inherits the former owner's texts."""
    cold = two.ask(two.ann)
    file = Path(two.server.service.config.keys or "")
    keys.revoke(file, "ann")
    heir = keys.add(file, "ann")
    answer = two.ask(heir)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["outrider"]["accepted"] == cold["outrider"]["accepted"]
