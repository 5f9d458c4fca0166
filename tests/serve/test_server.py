"""How a server ends: what runs may end, what does not is told so, and what comes is sent away."""

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest
from openai import OpenAI

from outrider import Sampling
from outrider.serve.config import Config
from outrider.serve.http import server
from serve.running import MODEL, Running, running
from serve.test_api import LONG, PROMPT, Slow, alone


def drain(found: Running) -> None:
    found.server.post.loop.call_soon_threadsafe(found.server.drain)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_does_not_end_in_time_is_told_so(stream, talker, monkeypatch):
    """Catches a server that waits for ever, and a text that stops without a word, as if it were whole."""
    said = []
    with running(talker, Slow(), slots=1, drain_s=0.2) as found:
        found.server.say = said.append
        client = httpx.Client(timeout=30)
        request = client.build_request("POST", f"{found.url}/v1/completions", json=LONG | {"stream": stream})
        if stream:
            answer = client.send(request, stream=True)
            events = answer.iter_lines()
            next(events)
            drain(found)
            lines = [line.removeprefix("data: ") for line in events if line]
            assert lines[-1] == "[DONE]"
            error = json.loads(lines[-2])["error"]
        else:
            found.server.post.loop.call_soon_threadsafe(found.server.post.loop.call_later, 0.3, found.server.drain)
            answer = client.send(request)
            assert answer.status_code == 503
            error = answer.json()["error"]
        assert error["code"] == "stopping"
        assert found.settled(lambda: found.server.should_exit, 5)
    assert said == ["stopping: 1 requests have 0.2 s to end; signal again to stop now", "1 requests are cut off"]


def test_a_second_signal_ends_at_once(talker):
    """Catches a server that can only be killed."""
    with running(talker, Slow(), slots=1, drain_s=60.0) as found, httpx.Client(timeout=30) as client:
        with client.stream("POST", f"{found.url}/v1/completions", json=LONG | {"stream": True}) as answer:
            events = answer.iter_lines()
            next(events)
            began = time.monotonic()
            drain(found)
            drain(found)
            assert found.settled(lambda: found.server.should_exit, 5)
        assert time.monotonic() - began < 5


def test_an_engine_that_fails_ends_the_server_with_an_error(talker, monkeypatch):
    """Catches a process that lives on and answers nobody, so that nothing starts it again."""
    failures = []
    serve = server.Server.serve

    async def watched(self, sockets=None):
        try:
            await serve(self, sockets)  # type: ignore[arg-type]
        except server.ServerError as error:
            failures.append(error)

    monkeypatch.setattr(server.Server, "serve", watched)
    with running(talker) as found:
        assert found.client().completions.create(model=MODEL, prompt="a", max_tokens=1).choices
        found.engine.error = "RuntimeError: planted"
        with suppress(httpx.TransportError):  # it may have ended by now
            assert httpx.get(f"{found.url}/health").json() == {"status": "failed"}
        assert found.settled(lambda: bool(failures), 10)
    assert "the engine failed: RuntimeError: planted" in str(failures[0])


def test_a_connection_is_used_again(talker):
    """Catches a connection that is closed, or left half read, after an answer, a stream or a refusal."""
    with running(talker) as found, httpx.Client() as http:
        client = OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0, http_client=http)
        wanted = alone(talker, PROMPT, Sampling(), 6).text
        for stream in (False, True, False, True):
            asked = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, stream=stream)
            text = "".join(c.choices[0].text for c in asked) if stream else asked.choices[0].text
            assert text == wanted
            assert http.post(f"{found.url}/v1/completions", json={"prompt": 5}).status_code == 400
        assert len(found.server.server_state.connections) == 1


def test_small_pieces_leave_at_once():
    """Without the number of its protocol asyncio takes it for no TCP, and each answer waits 40 ms for the last one's
    acknowledgement."""
    with server.bound(Config(port=0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP
