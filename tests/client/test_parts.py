"""The client's parts by themselves: pauses, rates, the breaker, prices, the account, the cache, and what is read."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from email.utils import formatdate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.client import BudgetExceeded, CircuitOpen, Limits, Price, Retries, Timeouts, load_prices
from outrider.client.account import Account
from outrider.client.answers import InvalidResponse, StreamParser, parse_answer, parse_error
from outrider.client.cache import ResponseCache, digest
from outrider.client.prices import Usage, cost_of, highest_cost, usage_of
from outrider.client.sending import rates as rates_
from outrider.client.sending.backoff import RetryBudget, backoff_s, is_retryable, retry_after_s
from outrider.client.sending.rates import Breaker, TokenBucket
from outrider.client.sending.resources import base_of
from outrider.errors import ConfigError

NOW = 1_700_000_000.0
USED_UP = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m2.5s"}


WISHES = [
        ({}, None), ({"retry-after": "2.5"}, 2.5), ({"retry-after-ms": "30", "retry-after": "2"}, 0.03),
        ({"retry-after-ms": "-1", "retry-after": "2"}, 2.0), ({"retry-after": formatdate(NOW + 7, usegmt=True)}, 7.0),
        ({"retry-after": formatdate(NOW - 7, usegmt=True)}, None), ({"retry-after": "0"}, None),
        ({"retry-after": "nan"}, None), ({"retry-after": "in a moment"}, None), (USED_UP, 62.5),
        (USED_UP | {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1h"}, 3600.0),
        (USED_UP | {"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "1h"}, 62.5),
        (USED_UP | {"retry-after": "1"}, 1.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "120ms"}, 0.12),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "tomorrow"}, None),
]  # fmt: skip


def test_a_server_s_wish_is_read_in_order():
    """Catches a date taken for a number, milliseconds for seconds and a wish of the past."""
    for headers, expected in WISHES:
        assert retry_after_s(headers, NOW) == (None if expected is None else pytest.approx(expected)), headers


def test_what_is_sent_again():
    """Catches a request that can't succeed sent again, and a quota that is used up taken for a rate."""
    for status, headers, codes, expected in (
        *((status, {}, set(), True) for status in (408, 409, 429, 500, 502, 503, 504, 529)),
        *((status, {}, set(), False) for status in (400, 401, 403, 404, 413, 422, 501, 302)),
        (429, {}, {"insufficient_quota"}, False), (429, {"x-should-retry": "true"}, {"insufficient_quota"}, False),
        (429, {}, {"rate_limit_exceeded"}, True), (500, {"x-should-retry": "false"}, set(), False),
        (400, {"x-should-retry": "true"}, set(), True), (400, {"x-should-retry": "perhaps"}, set(), False),
    ):  # fmt: skip
        assert is_retryable(status, headers, frozenset(codes)) is expected, (status, headers, codes)


def test_a_pause_is_drawn_from_a_bound_that_doubles():
    """Catches clients that all come back at the same moment, and a pause without a cap."""
    noise, retries = random.Random(0), Retries(base_s=0.5, cap_s=3.0)
    for attempts, bound in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (9, 3.0)):
        drawn = [backoff_s(retries, attempts, None, noise) or 0.0 for _ in range(400)]
        assert 0 <= min(drawn) < 0.05 * bound and 0.95 * bound < max(drawn) <= bound


def test_a_wish_is_never_shortened_and_a_long_one_is_not_waited_for():
    """Catches a client that comes back before it may, all clients at once, and an hour of silence."""
    noise, retries = random.Random(0), Retries(longest_wait_s=10.0)
    drawn = [backoff_s(retries, 1, 8.0, noise) or 0.0 for _ in range(200)]
    assert 8.0 <= min(drawn) < 8.2 and 9.5 < max(drawn) <= 10.0
    assert backoff_s(retries, 1, 10.5, noise) is None


def test_what_is_sent_again_stays_a_small_part_of_all():
    """Catches a client that asks a broken server four times as much."""
    budget, sent = RetryBudget(share=0.2, spare=3), 0
    for _ in range(100):
        budget.requests += 1
        sent += budget.take() + budget.take()
    assert sent == 3 + 20


def test_a_setting_without_a_meaning_is_refused():
    """Catches a client that never sends, or waits for ever."""
    for kind, wrong in (
        (Retries, {"attempts": 0}), (Retries, {"share": -1}), (Timeouts, {"idle_s": 0}),
        (Timeouts, {"total_s": float("inf")}), (Limits, {"concurrency": 0}), (Limits, {"requests_per_minute": 0}),
        (Limits, {"min_accepted": 2}), (Limits, {"reset_s": -1}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="got"):
            kind(**wrong)


class Time:
    """A clock, and a sleep that moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    clock = Time()
    monkeypatch.setattr(rates_.asyncio, "sleep", clock.sleep)
    return clock


def test_in_no_minute_are_there_more_requests_than_the_limit(time):
    """Catches a bucket that fills while its first burst still counts, and one that never fills."""
    limit = 20
    bucket = TokenBucket(limit, time)
    sent = []

    async def send():
        for _ in range(3 * limit + 3):
            await bucket.take()
            sent.append(time.now)

    asyncio.run(send())
    most = max(sum(at <= other < at + 60 - 1e-3 for other in sent) for at in sent)
    assert most <= limit
    assert sent[-1] <= 60 * 3.6 + 240 / limit


def test_tokens_that_were_not_used_are_given_back_and_others_are_owed(time):
    """Catches a rate that follows estimates alone."""

    async def taken():
        bucket = TokenBucket(6_000, time)
        times = []
        for correction in (-500, 0, 1_200, 0):
            await bucket.take(600)
            bucket.correct(correction)
            times.append(time.now)
        return times

    first, second, third, fourth = asyncio.run(taken())
    assert first == 0.0
    assert second == pytest.approx(100 / 5401 * 60, rel=0.01)  # 500 of 600 came back
    assert third - second == pytest.approx(600 / 5401 * 60, rel=0.01)
    assert fourth - third == pytest.approx(1800 / 5401 * 60, rel=0.01)


def test_a_server_that_fails_is_left_alone_and_tried_by_one_request():
    """Catches a breaker that never closes, one that lets everybody in at once, and one that counts old failures."""
    clock = Time()
    breaker = Breaker(3, 30.0, clock)
    for _ in range(2):
        breaker.enter()
        breaker.failure()
    breaker.success()
    for _ in range(3):
        breaker.enter()
        breaker.failure()
    with pytest.raises(CircuitOpen, match="3 times in a row") as caught:
        breaker.enter(2)
    assert (caught.value.attempts, caught.value.retry_after_s) == (2, 30.0)
    clock.now = 31.0
    breaker.enter()
    with pytest.raises(CircuitOpen):
        breaker.enter()
    breaker.failure()
    with pytest.raises(CircuitOpen):
        breaker.enter()
    clock.now = 62.0
    breaker.enter()
    breaker.leave()
    breaker.enter()
    breaker.success()
    breaker.enter()
    breaker.enter()


def test_a_cost_is_exact_and_cached_tokens_have_their_own_price(tmp_path):
    """Catches binary fractions in sums of money, and a discount that is left out."""
    file = tmp_path / "prices.yaml"
    file.write_text(
        "date: 2026-01-02\ncurrency: EUR\nmodels:\n  m: {input: 0.1, cached_input: 0.01, output: 0.7}\n"
        "  own: {input: 0, output: 0}\n"
    )
    prices = load_prices(file)
    assert (str(prices.date), prices.currency) == ("2026-01-02", "EUR")
    usage = Usage(prompt_tokens=3_000_000, completion_tokens=1_000_000, cached_tokens=2_000_000)
    assert cost_of(usage, prices.models["m"]) == Decimal("0.1") + 2 * Decimal("0.01") + Decimal("0.7")
    assert cost_of(usage, prices.models["own"]) == 0
    each = [cost_of(Usage(1, 0), prices.models["m"]) or Decimal(0) for _ in range(10)]
    assert sum(each, Decimal(0)) == Decimal("1e-6")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("date: 2026-01-02\ncurrency: USD\nmodels: {m: {input: -1, output: 1}}", "line 3.*models.m.input"),
        ("date: 2026-01-02\ncurrency: USD\nmodels: {m: {inputs: 1, output: 1}}", "did you mean 'input'"),
        ("currency: USD", "date"),
        ("[1]", "must contain a mapping"),
    ],
)
def test_a_table_that_is_wrong_is_refused(tmp_path, text, match):
    """Catches a price that is ignored because its name is written wrongly."""
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_prices(file)
    with pytest.raises(ConfigError, match="no table of prices"):
        load_prices(tmp_path / "none.yaml")


@settings(max_examples=25)
@example(prompt="a prediction that is rejected " * 50, tokens=1, n=1, share=1.0, cached=0.0)
@given(
    prompt=st.text(max_size=200), tokens=st.integers(1, 100), n=st.integers(1, 4),
    share=st.floats(0, 1), cached=st.floats(0, 1),
)  # fmt: skip
def test_no_answer_costs_more_than_was_reserved(prompt, tokens, n, share, cached):
    """Catches a bound that forgets answers, rejected predictions or a dearer cache.  A token is at least a byte."""
    price = Price(input=Decimal("0.5"), output=Decimal(3), cached_input=Decimal("0.6"))
    body = {"prompt": prompt, "max_tokens": tokens, "n": n, "prediction": {"type": "content", "content": prompt}}
    size = len(json.dumps(body).encode())
    read = len(prompt.encode(errors="surrogatepass"))
    written = n * (int(tokens * share) + read)
    most = highest_cost(body, size, price)
    assert (cost_of(Usage(read, written, int(read * cached)), price) or 0) <= most


def test_what_has_no_bound_has_no_budget():
    """Catches a budget that is kept only as long as prompts are texts and answers short."""
    image = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "max_tokens": 4}
    for body, match in (({"prompt": "a"}, "max_tokens"), (image, "an image")):
        with pytest.raises(ConfigError, match=match):
            highest_cost(body, 100, Price(input=Decimal(1), output=Decimal(1)))


def test_what_is_under_way_counts_and_is_waited_for():
    """Catches two requests that both get the last of a budget, and one refused while another may leave enough."""

    async def main():
        account, events = Account(Decimal(10)), list[str]()

        async def second():
            await account.reserve(Decimal(6))
            events.append("second")

        await account.reserve(Decimal(6))
        task = asyncio.create_task(second())
        await asyncio.sleep(0.01)
        assert events == []
        account.charge(Decimal(6), Usage(1, 1), Decimal(4))
        await task
        account.mark_uncertain(Decimal(6))
        assert account.totals.uncertain_cost == 6
        with pytest.raises(BudgetExceeded, match="0.000000 of the budget of 10 is left"):
            await account.reserve(Decimal("0.1"))
        await account.reserve(Decimal(0))
        without = Account(Decimal(10))
        await without.reserve(Decimal(8))
        without.charge(Decimal(8), None, None)  # an answer without its cost uses up what was reserved
        assert without.totals.cost is None
        with pytest.raises(BudgetExceeded):
            await without.reserve(Decimal(3))
        return events

    assert asyncio.run(main()) == ["second"]


def test_counts_that_are_none_are_not_counted():
    """Catches a malformed count that ends the program, or counts as 0."""
    for raw in ({}, {"usage": {"prompt_tokens": "3", "completion_tokens": 1}}, {"usage": []}, None):
        assert usage_of(raw) is None


def test_what_is_kept_comes_back_and_what_is_damaged_does_not(tmp_path):
    """Catches a file that a full disk cut short taken for an answer."""
    cache = ResponseCache(tmp_path / "answers")
    key = digest("url", {"a": 1, "b": [2]})
    assert key == digest("url", {"b": [2], "a": 1}) != digest("url", {"a": 1, "b": [3]})
    assert cache.get(key) is None
    cache.put(key, {"choices": ["é"]})
    assert cache.get(key) == {"choices": ["é"]}
    [file] = (tmp_path / "answers").rglob("*.json")
    file.write_text(file.read_text()[:-2])
    assert cache.get(key) is None
    assert [path for path in (tmp_path / "answers").rglob("*") if path.is_file()] == [file]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't create the cache"):
        ResponseCache(tmp_path / "file" / "answers")


def test_an_address_is_completed():
    """Catches /v1/v1, a provider's own path that is thrown away, and an address that fails at the first request."""
    assert base_of("127.0.0.1:8000") == "http://127.0.0.1:8000/v1"
    assert base_of("http://h/v1/") == "http://h/v1"
    assert base_of("https://h/openai/v1beta") == "https://h/openai/v1beta"
    assert base_of("https://h/v1/chat/completions") == "https://h/v1"
    for url in ("ftp://h", "http://", "http://h:x", "http://h/v1?key=a", ""):
        with pytest.raises(ConfigError, match="not the address of a server"):
            base_of(url)


STREAM = (
    '\ufeffdata: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": null}\n\n'
    ': ping\r\n\r\ndata: {"choices":\ndata: [{"index": 0, "delta": {"content": "né日😀"}}]}\n\n'
    "id: 3\revent: message\r"
    'data:{"choices": [{"index": 1, "delta": {"content": "other"}, "finish_reason": "stop"}]}\r\r'
    'data: {"choices": [{"index": 0, "delta": {"content": "data: "}, "finish_reason": "stop"}]}\n\n'
    'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
).encode()


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_is_the_same_however_its_bytes_are_cut(cuts):
    """Catches characters, line ends and events that are lost at the end of a part."""
    parser, cuts_at = StreamParser(), [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(cuts_at):
        list(parser.feed(STREAM[start:end]))
    list(parser.end())
    assert parser.text == "né日😀data: "
    assert parser.usage == Usage(2, 3)


BROKEN = [
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "ended before its text"),
        (b'data: {"choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1}]}\n\n', "ended before"),
        (b"", "ended before"), (b"data: oh\n\n", "not JSON"), (b"data: [1]\n\n", "a list"),
        (b'data: {"error": {"message": "died"}}\n\n', "died"),
        (b'event: error\ndata: {"object": "error", "message": "gone"}\n\n', "gone"),
        (b'data: {"choices": [1]}\n\n', "not an object"),
]  # fmt: skip


def test_a_stream_that_is_not_whole_is_not_taken_for_one():
    """Catches half a text that looks like all of it."""
    for data, match in BROKEN:
        parser = StreamParser()
        with pytest.raises(InvalidResponse, match=match):
            list(parser.feed(data)) + list(parser.end())


def test_a_stream_may_end_without_done_and_without_an_empty_line():
    """Catches an error about servers that end differently, and are whole."""
    parser = StreamParser()
    list(parser.feed(b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}'))
    assert [chunk.finish_reason for chunk in parser.end()] == ["length"]


def test_json_that_is_no_answer_is_none():
    """Catches an exception of Python's in place of one that says what came."""
    for data in (b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"error": "no"}', b"[" * 100_000):
        with pytest.raises(InvalidResponse):
            parse_answer(data)


def test_a_refusal_is_read_in_every_form_there_is():
    """Catches a message that is lost because the server is not OpenAI's."""
    assert parse_error(b'{"error": {"message": "m", "code": "c", "type": "t", "param": "speculative.drafter"}}') == (
        "m", "speculative.drafter", {"c", "t"}
    )  # fmt: skip
    assert parse_error(b'{"detail": "m"}').message == "m"
    assert parse_error(b'{"object": "error", "message": "m", "code": 404}').codes == {"404"}
    assert parse_error(b'{"error": "m"}').message == "m"
    assert parse_error(b"<html>no").message == "<html>no"
    assert parse_error(b'{"error": {"param": "predictions", "message": "m"}}').is_about_speculation is False


def test_a_list_of_parts_in_a_stream_is_text() -> None:
    """Catches a server that sends a delta's content as parts, whose answer would be empty."""
    parts = [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": []}, {"type": "text", "text": "b"}]
    events = [{"choices": [{"index": 0, "delta": {"content": parts}, "finish_reason": "stop"}]}]
    parser = StreamParser()
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    assert [chunk.text for chunk in parser.feed(body)] == ["ab"]
