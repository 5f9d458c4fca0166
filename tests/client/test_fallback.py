"""Fallbacks and profiles: what a second server answers, what it costs, and what is never asked twice."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import pytest

from outrider.client import (
    AsyncClient,
    BudgetExceeded,
    Client,
    Fallback,
    Limits,
    Price,
    Prices,
    Profile,
    RefusedError,
    Retries,
    Timeouts,
    TornStream,
    Unavailable,
    load_profiles,
)
from outrider.errors import ConfigError
from tests.client import misbehaving
from tests.client.misbehaving import MODEL, Ledger, text_of

T = TypeVar("T")
PRICES = Prices(
    date="2026-11-25", currency="USD",
    models={MODEL: Price(input=1, output=20), "small": Price(input=1, output=4)},
)  # fmt: skip
ONCE = Retries(attempts=1)
SHORT = Timeouts(connect_s=5.0, first_byte_s=1.5, idle_s=1.5, total_s=2.5)


@pytest.fixture
def servers() -> Iterator[tuple[tuple[str, Ledger], tuple[str, Ledger]]]:
    with misbehaving.running() as first, misbehaving.running() as second:
        yield first, second


def asked(url: str, work: Callable[[AsyncClient], Awaitable[T]], **settings: Any) -> T:
    async def main() -> T:
        common = {"model": MODEL, "retries": ONCE, "timeouts": SHORT, "prices": PRICES}
        async with AsyncClient(url, **common | settings) as client:
            return await work(client)

    return asyncio.run(main())


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wish", [{"silent": True}, {"status": 503}, {"cut": "before"}], ids=["hangs", "503", "cut"])
def test_the_second_server_answers_in_time_and_once(servers, wish: dict[str, Any], is_stream: bool) -> None:
    """Catches a request that waits for a server that hangs, an answer that comes twice, and a cost that forgets what
    the first server may charge, or counts it as spent."""
    (first, first_ledger), (second, ledger) = servers

    async def work(client):
        began = time.monotonic()
        settings = {"max_tokens": 6, "trouble": [wish]}
        # the second server has not seen this prompt: trouble is for the first time that a prompt arrives
        ledger.attempts["hi"] = 1
        if is_stream:
            text = "".join([chunk.text async for chunk in client.chat_stream("hi", **settings)])
        else:
            answer = await client.chat("hi", **settings)
            text = answer.text
            assert (answer.server, answer.attempts) == (f"{second}/v1", 2)
        assert text == text_of("hi", 6) and time.monotonic() - began < 15
        usage = client.usage
        assert (usage.requests, usage.answered, usage.attempts) == (1, 1, 2)
        # 6 tokens at the second model's price, and the prompt
        assert usage.known_cost == Decimal(usage.prompt_tokens) / 10**6 + Decimal(6 * 4) / 10**6
        assert usage.uncertain == (wish != {"status": 503})

    asked(first, work, fallbacks=[Fallback(second, "small")])
    assert (first_ledger.attempts["hi"], ledger.begun["hi"]) == (1, 1)
    assert (first_ledger.bodies[0]["model"], ledger.bodies[0]["model"]) == (MODEL, "small")


def test_a_budget_covers_both_servers(servers) -> None:
    """Catches a fallback that spends beyond the budget, or a cheaper model that is not tried where that is allowed."""
    (first, _), (second, ledger) = servers
    dear = {"max_tokens": 6, "trouble": [{"silent": True}]}
    ledger.attempts["hi"] = 1
    asking = lambda client: client.chat("hi", **dear)
    common = {"fallbacks": [Fallback(second, "small")]}
    # the first server may charge up to 0.000436 for what it did not answer: nothing is left for the second
    with pytest.raises(BudgetExceeded):
        asked(first, asking, budget=Decimal("0.0005"), **common)
    assert asked(first, asking, budget=Decimal("0.002"), **common).text == text_of("hi", 6)
    cheap = common | {"fallback_on": (Unavailable, BudgetExceeded)}
    assert asked(first, lambda client: client.chat("new", max_tokens=6), budget=Decimal("0.00044"), **cheap).server
    with pytest.raises(ConfigError, match="price of 'unknown'"):
        AsyncClient(first, model=MODEL, budget=Decimal(1), prices=PRICES, fallbacks=[Fallback(second, "unknown")])


def test_what_began_is_never_asked_of_another_server(servers) -> None:
    """Catches a stream that begins anew in the middle, a refusal that every server would repeat, and a key that goes to
    a server that it is not for."""
    (first, _), (second, ledger) = servers

    async def torn(client):
        return [chunk async for chunk in client.chat_stream("hi", max_tokens=6, trouble=[{"cut": 2}])]

    with pytest.raises(TornStream):
        asked(first, torn, fallbacks=[Fallback(second)])
    with pytest.raises(RefusedError):
        asked(first, lambda client: client.chat("no", trouble=[{"status": 400}]), fallbacks=[Fallback(second)])
    assert not ledger.attempts
    settings = {"trouble": [{"status": 404}]}
    ledger.attempts["key"] = 1
    answer = asked(
        first, lambda client: client.chat("key", **settings), fallbacks=[Fallback(second)], fallback_on=(RefusedError,),
        api_key="secret",
    )  # fmt: skip
    assert answer.text == text_of("key") and "authorization" not in ledger.headers[-1]


def test_an_open_circuit_asks_the_next_server_at_once(servers) -> None:
    """Catches requests that each wait for a server that is known to be down."""
    (first, first_ledger), (second, ledger) = servers
    with Client(
        first, model=MODEL, retries=ONCE, timeouts=SHORT, limits=Limits(failures=1), fallbacks=[Fallback(second)]
    ) as client:  # fmt: skip
        for name in ("a", "b", "c"):
            ledger.attempts[name] = 1
            assert client.chat(name, trouble=[{"status": 503}]).text == text_of(name)
    assert sum(first_ledger.attempts.values()) == 1
    with pytest.raises(ConfigError, match="needs a base_url or a model"):
        Fallback()


def test_a_profile_is_the_default_of_a_request(servers, tmp_path: Path) -> None:
    """Catches a profile that overrides what a request says, or whose time limits do not apply."""
    (first, ledger), _ = servers
    profile = Profile(settings={"temperature": 0.5, "max_tokens": 4}, timeouts=Timeouts(total_s=0.4))
    with Client(first, model=MODEL, profile=profile, retries=ONCE) as client:
        client.chat("hi", temperature=1.0)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.chat("slow", trouble=[{"silent": True}])
        assert time.monotonic() - began < 15
    assert (ledger.bodies[0]["temperature"], ledger.bodies[0]["max_tokens"]) == (1.0, 4)
    assert load_profiles().keys() == {"chat", "code", "extract", "write"}
    (tmp_path / "mine.yaml").write_text("mine: {settings: {temperature: 0}, timeouts: {first_byte_s: 3}}\n")
    assert load_profiles(tmp_path / "mine.yaml")["mine"].timeouts == Timeouts(first_byte_s=3)
    for wrong in ("mine: {settings: {messages: []}}", "mine: {temperature: 0}", "mine: {timeouts: {first_byte_s: 0}}"):
        (tmp_path / "mine.yaml").write_text(wrong)
        with pytest.raises(ConfigError, match="mine"):
            load_profiles(tmp_path / "mine.yaml")
