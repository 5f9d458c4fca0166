"""The client against a server that misbehaves: every request is answered once or reported failed once.

    python benchmarks/client.py [--requests 10000] [--out benchmarks/results/client.json]

The server (tests/client/misbehaving.py) is real, on a local socket, in a thread of this process.  It refuses with and
without Retry-After, fails, hangs, cuts connections before, between and inside characters, writes one byte at a time and
sends invalid JSON; and it keeps a ledger of what arrived and what it charges.  Half of the requests are streams.  A
second run has an insufficient budget.  At the end, each rule is broken deliberately, and the check must detect it.
Exits with 1 if a promise is not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.batch_time import promise
from benchmarks.replay import progress_bar, provenance, publish
from outrider.client import AsyncClient, ClientError, Limits, Retries, Timeouts, answers
from outrider.client.account import Account
from outrider.client.sending.events import EventDecoder
from tests.client import misbehaving
from tests.client.misbehaving import MODEL, PRICES, Ledger, text_of

AT_ONCE = 64
MAX_TOKENS = 16
TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=2.0, idle_s=1.0, total_s=6.0)
RETRIES = Retries(attempts=4, base_s=0.02, cap_s=0.2, longest_wait_s=3.0, share=1.0)
LIMITS = Limits(concurrency=AT_ONCE, failures=50)

Wish = Callable[[], dict[str, Any]]
WISHES: dict[str, tuple[int, Wish]] = {
    "429": (6, lambda: {"status": 429}),
    "429, Retry-After in seconds": (4, lambda: {"status": 429, "headers": {"Retry-After": "0.05"}}),
    "429, retry-after-ms": (4, lambda: {"status": 429, "headers": {"retry-after-ms": "30"}}),
    "429, a date": (1, lambda: {"status": 429, "headers": {"Retry-After": "in 1.5 s"}}),
    "429, x-ratelimit-reset": (
        2, lambda: {"status": 429, "headers": {"x-ratelimit-remaining-tokens": "0",
                                               "x-ratelimit-reset-tokens": "40ms"}},
    ),
    "429, an hour": (1, lambda: {"status": 429, "headers": {"Retry-After": "3600"}}),
    "429, no quota": (1, lambda: {"status": 429, "code": "insufficient_quota"}),
    "500": (6, lambda: {"status": 500}), "503": (4, lambda: {"status": 503}), "529": (2, lambda: {"status": 529}),
    "400": (2, lambda: {"status": 400}), "409": (1, lambda: {"status": 409}),
    "cut before a byte": (6, lambda: {"cut": "before"}),
    "cut between pieces": (4, lambda: {"cut": 3}), "cut inside a character": (4, lambda: {"cut": "character"}),
    "torn": (3, lambda: {"torn": True}), "not JSON": (3, lambda: {"wrong": True}),
    "an error inside": (3, lambda: {"error": 2}),
    "empty": (1, lambda: {"empty": True}), "stalls": (1, lambda: {"stall": 2}), "silent": (1, lambda: {"silent": True}),
    "slow bytes": (8, lambda: {"slow": True}),
    "fine": (32, dict),
}  # fmt: skip
"""What may happen to a request each time it is sent: its frequency in percent, and the instruction to the server."""


class Asked(NamedTuple):
    """A request, and what happens to it."""

    prompt: str
    trouble: list[dict[str, Any]]
    is_chat: bool
    is_stream: bool


@dataclass
class Found:
    """The outcome of the requests of one run."""

    texts: dict[str, str] = field(default_factory=dict)
    failures: dict[str, ClientError] = field(default_factory=dict)
    seconds: float = 0.0


def asked(count: int, seed: int = 0) -> list[Asked]:
    noise = random.Random(seed)
    names, weights = list(WISHES), [weight for weight, _ in WISHES.values()]
    found = []
    for number in range(count):
        trouble = [WISHES[name][1]() for name in noise.choices(names, weights, k=noise.randint(1, 4))]
        found.append(Asked(f"prompt {number}", trouble, number % 2 == 0, noise.random() < 0.5))
    return found


async def run(client: AsyncClient, requests: list[Asked], update: Callable[[], None]) -> Found:
    """Send all requests, this many at once."""
    found, several, began = Found(), iter(requests), time.perf_counter()

    async def work() -> None:
        for one in several:
            assert one.prompt not in found.texts and one.prompt not in found.failures
            try:
                found.texts[one.prompt] = await text(client, one)
            except ClientError as error:
                found.failures[one.prompt] = error
            update()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    found.seconds = time.perf_counter() - began
    return found


async def text(client: AsyncClient, one: Asked) -> str:
    settings = {"max_tokens": MAX_TOKENS, "trouble": one.trouble}
    if not one.is_stream:
        return (await (client.chat if one.is_chat else client.complete)(one.prompt, **settings)).text
    chunks = (client.chat_stream if one.is_chat else client.complete_stream)(one.prompt, **settings)
    return "".join([chunk.text async for chunk in chunks])


def violations(requests: list[Asked], found: Found, client: AsyncClient, ledger: Ledger) -> list[str]:
    """Rules that were broken, and how often."""
    usage, budget = client.usage, client.budget
    names = {one.prompt for one in requests}
    wrong = sum(own != text_of(name, MAX_TOKENS) for name, own in found.texts.items())
    more = {
        "requests without an outcome, or with two": len(names ^ found.texts.keys() ^ found.failures.keys()),
        "texts that are not the server's": wrong,
        "answered more than once by the server": sum(count > 1 for count in ledger.completed.values()),
        "answered, and the server did not": sum(ledger.completed[name] != 1 for name in found.texts),
        "sent again after the answer began": len(ledger.sent_again),
        # a request written while the connection closes is counted but never arrives
        "attempts that the client did not count": max(0, sum(ledger.attempts.values()) - usage.attempts),
        "requests or answers that it did not count": abs(usage.requests - len(names))
        + abs(usage.answered - len(found.texts)),
        "charged beyond the budget": int(budget is not None and ledger.charged > budget),
        "charged beyond what the client expects at most": int(ledger.charged > usage.known_cost + usage.uncertain_cost),
        "counted as cost and not charged": int(usage.known_cost > ledger.charged),
        "more under way than allowed": int(ledger.most_at_once > AT_ONCE),
    }
    return [f"{what}: {count}" for what, count in more.items() if count]


def misused(
    count: int, budget: Decimal | None = None, retries: Retries = RETRIES, update: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """One run against a new server: the outcome of the requests, and which rules were broken."""
    requests = asked(count, seed)

    async def main() -> tuple[Found, AsyncClient]:
        client = AsyncClient(
            url, model=MODEL, timeouts=TIMEOUTS, retries=retries, limits=LIMITS, prices=PRICES, budget=budget
        )
        async with client:
            return await run(client, requests, update), client

    with misbehaving.running() as (url, ledger):
        found, client = asyncio.run(main())
    usage = client.usage
    return {
        "requests": count, "answered": len(found.texts), "failed": len(found.failures),
        "failures": dict(Counter(type(error).__name__ for error in found.failures.values())),
        "attempts": usage.attempts, "sent_again": usage.attempts - len(ledger.attempts),
        "broke_off": usage.uncertain, "seconds": round(found.seconds, 2),
        "requests_per_s": round(count / found.seconds, 1),
        "budget": None if budget is None else str(budget), "charged_by_the_server": str(ledger.charged),
        "cost": str(usage.known_cost), "most_of_what_broke_off": str(usage.uncertain_cost),
        "violations": violations(requests, found, client, ledger),
    }  # fmt: skip


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────


class PartByPart(EventDecoder):
    """Decodes every part on its own."""

    def feed(self, part: bytes, is_last: bool = False) -> Iterator[str]:
        return super().feed(part.decode("utf-8", "replace").encode(), is_last)


async def unchecked(self: Account, amount: Decimal, attempts: int = 0) -> None:
    self._reserved += amount


@contextmanager
def budget_is_checked_after_sending() -> Iterator[None]:
    with patch.object(Account, "reserve", unchecked):
        yield


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = {
    "sends again after a partial answer": (nullcontext, {"retries": Retries(
        attempts=4, base_s=0.02, cap_s=0.2, longest_wait_s=3.0, share=1.0, torn=True)}),
    "checks the budget after sending": (budget_is_checked_after_sending, {"budget": Decimal("0.01")}),
    "takes what broke off for free": (
        lambda: patch.object(Account, "mark_uncertain", Account.release), {"budget": Decimal("0.02")},
    ),
    "decodes parts that end inside a character": (lambda: patch.object(answers, "EventDecoder", PartByPart), {}),
}  # fmt: skip
"""What is broken deliberately, and the settings of the run in which it must show."""


def caught(name: str, count: int) -> list[str]:
    """The rules that this fault visibly broke."""
    planted, settings = FAULTS[name]
    with planted():
        return list(misused(count, **settings)["violations"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    wanted, began = parser.parse_args(), time.perf_counter()
    count = wanted.requests
    with progress_bar() as bar:
        task = bar.add_task("without a budget", total=count)
        free = misused(count, update=lambda: bar.advance(task))
        budget = (Decimal(free["charged_by_the_server"]) * 2 / 5).quantize(Decimal("0.0001"))
        more = bar.add_task(f"with {budget}", total=count)
        bound = misused(count, budget, update=lambda: bar.advance(more), seed=1)
    faults = {name: caught(name, 300) for name in FAULTS}
    promises = [
        promise("requests answered once or reported failed once", count, free["answered"] + free["failed"]),
        promise("laws kept without a budget: 1 is all", 1, int(not free["violations"])),
        promise("laws kept with a budget, which is never passed: 1 is all", 1, int(not bound["violations"])),
        promise("requests that the budget refused", 1, bound["failures"].get("BudgetExceeded", 0)),
        promise("planted faults caught", len(FAULTS), sum(map(bool, faults.values()))),
    ]
    found = {
        **provenance(time.perf_counter() - began), "without_budget": free, "with_budget": bound, "faults": faults,
        "promises": promises,
    }  # fmt: skip
    publish(found, wanted.out)
    return 0 if all(one["holds"] for one in promises) else 1


if __name__ == "__main__":
    raise SystemExit(main())
