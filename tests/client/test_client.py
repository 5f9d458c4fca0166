"""The client against a server that does what it is told, and against our own."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from decimal import Decimal
from typing import Any, TypeVar

import pytest

from outrider import generate
from outrider.client import (
    Answer,
    AsyncClient,
    BudgetExceeded,
    Chunk,
    CircuitOpen,
    Client,
    Limits,
    RefusedError,
    Retries,
    Timeouts,
    TornStream,
    Unavailable,
)
from outrider.errors import ConfigError
from tests.client import misbehaving
from tests.client.misbehaving import MODEL, PRICES, Ledger, pieces_of, text_of
from tests.serve.running import running

T = TypeVar("T")
FAST = Retries(attempts=3, base_s=0.01, cap_s=0.02, longest_wait_s=2.0)
SHORT = Timeouts(connect_s=2.0, first_byte_s=0.3, idle_s=0.3, total_s=5.0)


@pytest.fixture
def stub() -> Iterator[tuple[str, Ledger]]:
    with misbehaving.running() as server:
        yield server


def asked(url: str, work: Callable[[AsyncClient], Awaitable[T]], **settings: Any) -> T:
    """What `work` returns with a client of this server."""

    async def main() -> T:
        async with AsyncClient(url, **{"model": MODEL, "retries": FAST, "timeouts": SHORT, **settings}) as client:
            return await work(client)

    return asyncio.run(main())


def chat(prompt: str, **settings: Any) -> Callable[[AsyncClient], Awaitable[Answer]]:
    return lambda client: client.chat(prompt, **settings)


async def joined(chunks: Any) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def test_a_chat_and_a_text_are_answered_whole_and_as_streams(stub):
    """Catches a setting that does not reach the server, and texts that differ between the four ways to ask."""
    url, ledger = stub

    async def work(client):
        whole = await client.chat([{"role": "user", "content": "hi"}], max_tokens=6, unknown_field=[1])
        assert whole.text == text_of("hi", 6)
        assert (whole.finish_reason, whole.attempts, whole.request_id) == ("stop", 1, "answer")
        assert whole.usage is not None and whole.usage.completion_tokens == 6
        assert whole.cost == Decimal("0.000121") == client.usage.cost
        assert whole.raw["choices"][0]["message"]["role"] == "assistant"
        assert (await client.complete("hi", max_tokens=6)).text == whole.text
        assert (await client.complete([1, 2], temperature=None)).text == text_of("[1, 2]")
        chunks = await joined(client.chat_stream("hi", max_tokens=6))
        assert [chunk.text for chunk in chunks] == [*pieces_of("hi", 6), ""]
        assert chunks[-2].finish_reason == "stop"
        assert chunks[-1].raw["usage"]["completion_tokens"] == 6
        assert "".join(chunk.text for chunk in await joined(client.complete_stream("hi"))) == text_of("hi")
        assert await client.models() == [MODEL]
        assert (client.usage.requests, client.usage.answered, client.usage.attempts) == (5, 5, 5)
        assert client.usage.tokens == 3 * (1 + 6) + 2 * 16 + 1 + 2

    asked(url, work, prices=PRICES, api_key="secret")
    assert ledger.bodies[0]["unknown_field"] == [1]
    assert ledger.bodies[3]["stream_options"] == {"include_usage": True}
    assert "temperature" not in ledger.bodies[2]
    assert all(body["model"] == MODEL for body in ledger.bodies)
    assert all(headers["authorization"] == "Bearer secret" for headers in ledger.headers)


def test_a_program_without_an_event_loop_is_answered_too(stub):
    """Catches a thread that is left behind, and a stream that holds its connection after its caller went away."""
    url, _ledger = stub
    before = threading.active_count()
    with Client(url, model=MODEL, prices=PRICES) as client:
        assert client.chat("hi").text == client.complete("hi").text == text_of("hi")
        assert "".join(chunk.text for chunk in client.chat_stream("hi")) == text_of("hi")
        for chunk in client.complete_stream("hi"):
            assert chunk.text == pieces_of("hi", None)[0]
            break
        assert client.models() == [MODEL]
        with pytest.raises(RefusedError):
            client.chat("no", trouble=[{"status": 400}])
        assert client.usage.uncertain == 1
    client.close()
    assert threading.active_count() == before


def test_what_may_succeed_is_sent_again(stub):
    """Catches a request that is given up at the first trouble; all attempts have one idempotency key."""
    url, ledger = stub
    answer = asked(url, chat("hi", trouble=[{"status": 503}, {"cut": "before"}]))
    assert (answer.text, answer.attempts) == (text_of("hi"), 3)
    assert len({headers["idempotency-key"] for headers in ledger.headers}) == 1
    assert len({headers["x-client-request-id"] for headers in ledger.headers}) == 3


def test_a_server_s_pause_is_kept(stub):
    """Catches a client that comes back before it may, and one that waits for an hour."""
    url, _ = stub
    began = time.monotonic()
    asked(url, chat("hi", trouble=[{"status": 429, "headers": {"Retry-After": "0.3"}}]))
    assert 0.3 <= time.monotonic() - began < 1.5
    for wish in ({"Retry-After": "3600"}, {"Retry-After": "1.9"}):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="sent once.*asks for a pause of"):
            asked(url, chat(str(wish), trouble=[{"status": 503, "headers": wish}]), timeouts=Timeouts(total_s=1.0))
        assert time.monotonic() - began < 1.0


def test_attempts_and_the_share_of_them_are_limited(stub):
    """Catches a request that is sent for ever, and one whose last failure is not told."""
    url, ledger = stub
    with pytest.raises(Unavailable, match="sent 3 times, last: HTTP 500: told"):
        asked(url, chat("hi", trouble=[{"status": 500}] * 9))
    assert ledger.attempts["hi"] == 3
    with pytest.raises(Unavailable, match="sent once, last"):
        asked(url, chat("ho", trouble=[{"status": 500}] * 9), retries=Retries(share=0.0, spare=0))


TORN: list[tuple[dict[str, Any], bool]] = [
    ({"cut": "character"}, True), ({"torn": True}, True), ({"error": 2}, True), ({"stall": 2}, True),
    ({"cut": 2}, False), ({"empty": True}, False),
]  # fmt: skip


@pytest.mark.parametrize(("wish", "is_stream"), TORN, ids=str)
def test_an_answer_that_began_is_never_asked_for_again(stub, wish, is_stream):
    """Catches an answer that is paid twice, and half a text taken for all of it.  What arrived is in the error."""
    url, ledger = stub
    pieces = []

    async def read(client):
        async for chunk in client.chat_stream("hi", trouble=[wish]):
            pieces.append(chunk.text)

    async def work(client):
        with pytest.raises(TornStream, match="can't be used") as caught:
            await (read(client) if is_stream else client.chat("hi", trouble=[wish]))
        assert (client.usage.requests, client.usage.answered, client.usage.uncertain) == (1, 0, 1)
        return caught.value.text

    received = asked(url, work)
    assert (ledger.attempts["hi"], ledger.sent_again) == (1, [])
    assert received == "".join(pieces) and text_of("hi").startswith(received)
    if is_stream and wish in ({"error": 2}, {"stall": 2}):
        assert received == "".join(pieces_of("hi", None)[:2])


def test_a_caller_may_ask_for_torn_answers_again(stub):
    """Catches an option without an effect, and a server that fills the memory."""
    url, ledger = stub
    answer = asked(url, chat("hi", trouble=[{"cut": 2}]), retries=Retries(base_s=0.01, torn=True))
    assert (answer.text, answer.attempts, ledger.sent_again) == (text_of("hi"), 2, ["hi"])
    with pytest.raises(TornStream, match="more than 100 bytes"):
        asked(url, chat("ho"), limits=Limits(answer_bytes=100))


def test_slow_bytes_are_waited_for_and_silence_is_not(stub):
    """Catches a time-out that counts from the beginning, and one that never comes."""
    url, ledger = stub
    slow = asked(url, lambda client: joined(client.chat_stream("hi", trouble=[{"slow": True}])))
    assert "".join(chunk.text for chunk in slow) == text_of("hi")
    assert asked(url, chat("ho", trouble=[{"slow": True}])).text == text_of("ho")
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no byte of an answer within 0.3 s"):
        asked(url, lambda client: joined(client.chat_stream("he", trouble=[{"silent": True}])))
    with pytest.raises(Unavailable, match="no byte of an answer within"):
        asked(url, chat("ha", trouble=[{"silent": True}]), timeouts=Timeouts(total_s=0.3))
    assert time.monotonic() - began < 3
    assert (ledger.attempts["he"], ledger.attempts["ha"]) == (1, 1)


def test_a_server_that_is_not_there_is_left_alone_after_some_failures():
    """Catches thousands of requests that each try for themselves."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    async def work(client):
        with pytest.raises(Unavailable, match="sent 3 times"):
            await client.chat("hi")
        assert client.usage.uncertain == 0
        with pytest.raises(CircuitOpen, match="4 times in a row") as caught:
            await client.chat("hi")
        assert caught.value.retry_after_s > 20

    asked(url, work, limits=Limits(failures=4))


def test_no_more_are_under_way_than_allowed(stub):
    """Catches a limit that streams don't keep, and a place that a failure never gives back."""
    url, ledger = stub

    async def work(client):
        wishes = [{}, {"cut": 2}, {"status": 400}, {"cut": "before"}, {"slow": True}]
        whole = [client.chat(f"a{i}", trouble=[wishes[i % 5]]) for i in range(12)]
        streams = [joined(client.chat_stream(f"b{i}", trouble=[wishes[i % 5]])) for i in range(12)]
        await asyncio.gather(*whole, *streams, return_exceptions=True)

    asked(url, work, limits=Limits(concurrency=3), retries=Retries(base_s=0.01, spare=100))
    assert ledger.most_at_once == 3


def test_a_cancelled_request_ends_at_once_and_is_counted(stub):
    """Catches a connection that stays open, a place that stays taken, and a cost that is forgotten."""
    url, ledger = stub

    async def work(client):
        task = asyncio.create_task(client.chat("hi", max_tokens=8, trouble=[{"silent": True}]))
        while not ledger.at_once:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.usage.uncertain == 1 and client.usage.uncertain_cost > 0
        for _ in range(100):
            if not ledger.at_once:
                break
            await asyncio.sleep(0.01)
        assert ledger.at_once == 0
        assert (await client.chat("ho")).text == text_of("ho")

    asked(url, work, limits=Limits(concurrency=1), prices=PRICES)


def test_a_budget_is_kept_before_anything_is_sent(stub):
    """Catches a request that goes out and is refused afterwards."""
    url, ledger = stub

    async def work(client):
        await client.chat("hi", max_tokens=8)
        with pytest.raises(BudgetExceeded, match="raise the budget"):
            await client.chat("ho", max_tokens=10_000)
        with pytest.raises(ConfigError, match="a budget needs max_tokens"):
            await client.chat("he")
        with pytest.raises(ConfigError, match="needs the price of 'other'"):
            await client.chat("he", max_tokens=8, model="other")

    asked(url, work, prices=PRICES, budget=Decimal("0.01"))
    assert set(ledger.attempts) == {"hi"}


def test_a_budget_that_can_t_be_kept_is_refused_at_once():
    """Catches a budget that fails after the first thousand requests, and a stream that is read as JSON."""
    for settings, match in (
        ({"budget": Decimal(1)}, "prices=load_prices"),
        ({"budget": Decimal(1), "prices": PRICES, "model": "other"}, "price of 'other'"),
        ({"budget": 1.5, "prices": PRICES}, r"write Decimal\('5.00'\)"),
        ({"budget": Decimal("NaN"), "prices": PRICES}, "at least 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            AsyncClient("http://127.0.0.1:1", **settings)

    async def work(client):
        with pytest.raises(ConfigError, match="call chat_stream"):
            await client.chat("hi", stream=True)
        with pytest.raises(ConfigError, match="messages is empty"):
            client.chat_stream([])

    asked("http://127.0.0.1:1", work)


def test_what_was_asked_before_is_answered_from_disk(stub, tmp_path):
    """Catches an answer to another request, a failure that is kept, and a cost for what was not sent."""
    url, ledger = stub

    async def work(client):
        with pytest.raises(TornStream):
            await client.chat("hi", max_tokens=4, trouble=[{"wrong": True}])
        first = await client.chat("hi", max_tokens=4)
        again = await client.chat("hi", max_tokens=4)
        assert (again.text, again.usage, again.is_cached) == (first.text, first.usage, True)
        assert (again.cost, again.attempts, client.usage.cached) == (0, 0, 1)
        assert (await client.chat("hi", max_tokens=6)).text == text_of("hi", 6)
        assert not (await client.complete("hi", max_tokens=4)).is_cached

    asked(url, work, cache=tmp_path)
    asked(url, chat("hi", max_tokens=4), cache=tmp_path)
    assert ledger.attempts["hi"] == 4


def test_predictions_that_are_rejected_are_left_out(stub, caplog):
    """Catches a client that goes on to pay for rejected tokens.  The server says that it rejects 1,500 each time."""
    url, ledger = stub

    async def work(client):
        for number in range(4):
            await client.chat(f"p{number}", prediction="what may come")
        assert client.usage.rejected_prediction_tokens == 3000

    with caplog.at_level(logging.WARNING, "outrider.client"):
        asked(url, work)
    assert ledger.bodies[0]["prediction"] == {"type": "content", "content": "what may come"}
    assert ["prediction" in body for body in ledger.bodies] == [True, True, False, False]
    assert caplog.text.count("0 of 3000 predicted tokens were accepted") == 1


@pytest.mark.parametrize(
    ("wish", "settings", "expected"),
    [
        ({"status": 400, "param": "speculative.drafter"}, {"speculative": {"drafter": "x"}}, {"speculative": False}),
        ({"status": 400, "param": "prediction"}, {"prediction": "a"}, {}),
        ({"status": 500}, {"speculative": True, "prediction": "a"}, {"speculative": False}),
    ],
)
def test_a_request_that_fails_for_its_drafter_is_asked_of_the_target_alone(stub, wish, settings, expected):
    """Catches an answer that is lost for a draft, which never changes a text; and the same mistake sent again."""
    url, ledger = stub
    answer = asked(url, chat("hi", trouble=[wish, {}], **settings))
    assert (answer.text, answer.attempts, answer.is_plain) == (text_of("hi"), 2, True)
    sent = {name: ledger.bodies[1][name] for name in ("speculative", "prediction") if name in ledger.bodies[1]}
    assert sent == expected
    with pytest.raises(RefusedError, match="HTTP 400"):
        asked(url, chat("ho", trouble=[wish, {"status": 400, "param": "speculative"}], **settings))
    assert ledger.attempts["ho"] == 2


def test_nothing_that_was_said_is_logged_and_the_key_is_not_repeated(stub, caplog):
    """Catches prompts, answers and keys in logs, and a key in an error."""
    url, _ = stub
    with caplog.at_level(logging.DEBUG, "outrider"):
        asked(url, chat("a secret prompt", trouble=[{"status": 500}]), api_key="k-123")
        asked(url, lambda client: joined(client.chat_stream("a secret prompt")), api_key="k-123")
    assert "attempt 2: 200" in caplog.text
    for word in ("secret", "k-123", text_of("a secret prompt")[:10]):
        assert word not in caplog.text

    async def work(client):
        assert client._routes[0].resources.redacted("wrong key k-123") == "wrong key ***"

    asked(url, work, api_key="k-123")


def test_our_own_server_answers_as_generate_does(talker):
    """Catches a client that only its own test server understands."""
    expected = generate(talker, "abcabc", max_new_tokens=12)[0].text
    with running(talker) as server, Client(server.url, model="tiny", prices=PRICES) as client:
        settings = {"max_tokens": 12, "temperature": 0}
        answer = client.complete("abcabc", return_token_ids=True, **settings)
        assert answer.text == expected
        assert answer.usage is not None and answer.usage.completion_tokens == len(answer.raw["choices"][0]["token_ids"])
        assert (answer.cost, client.usage.cost) == (None, None)
        assert "".join(chunk.text for chunk in client.complete_stream("abcabc", **settings)) == expected
        plain = client.complete("abcabc", speculative={"depth": 2}, prediction="abc", **settings)
        assert (plain.text, plain.is_plain, plain.attempts) == (expected, True, 2)
        assert client.complete("abcabc", prediction=expected, **settings).text == expected
        chat = client.chat("abc", max_tokens=8, temperature=0).text
        assert "".join(chunk.text for chunk in client.chat_stream("abc", max_tokens=8, temperature=0)) == chat
        with pytest.raises(RefusedError, match="unknown model 'other'"):
            client.chat("abc", model="other")
        assert client.models() == ["tiny"]
