"""Calls to the engine, their outputs, and the queue of waiting calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from outrider.decoding.state import FinishReason, Request
from outrider.errors import OutriderError
from outrider.sampling.logprobs import TokenLogprob

Ending = FinishReason | Literal["cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class Output:
    """What one step added to a call, and whether the call ended."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """Text that became final; if several steps are sent together, it comes with the last one."""
    drafted: int = 0
    """How many of the tokens, counted from the first, were drafted; the target generated the rest."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if `Sampling.logprobs` is set."""
    finish_reason: Ending | None = None
    error: str = ""
    """The message for the client if the call ended by an error."""


@dataclass(eq=False, slots=True)
class Call:
    """One text that the engine generates.  Times are seconds of `time.monotonic`, 0.0 until set."""

    request: Request
    receive: Callable[[Output], None]
    """Called with every step's output, through the engine's `post`."""
    owner: str = ""
    """Slots are shared fairly among owners, such as API keys."""
    deadline: float | None = None
    """Time of `time.monotonic` at which the call is ended."""
    number: int = -1
    """The scheduler's number for it, from admission on."""
    slot: int | None = None
    """None before its first token."""
    arrived: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    """When its first token was generated."""
    finished: float = 0.0
    cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    steps: int = 0
    drafted: int = 0
    """Nodes drafted for it."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    written: int = 0
    """Tokens generated so far."""
    is_stored: bool = True
    """Whether a drafter may learn from it."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Depth of the draft and number of accepted tokens, per step; only if the engine has a listener."""


class Listener(Protocol):
    """Called by the engine in its own thread; must return at once."""

    def ended(self, call: Call, answer: list[int]) -> None:
        """A text is complete: it was neither cancelled nor failed."""

    def busy(self, is_busy: bool) -> None:
        """The engine now has calls, or none are left."""


class EngineStopped(OutriderError):
    """The engine no longer accepts calls."""


class QueueFull(OutriderError):
    """Too many calls are waiting; the queue is likely to have room after `retry_after_s`."""

    def __init__(self, waiting: int, retry_after_s: float):
        super().__init__(f"{waiting} requests are waiting, which is the limit; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


RECENT_S = 1.0
"""Seconds for which an owner without calls keeps its share of the slots."""


class WaitingCalls:
    """Calls in the order of admission: round-robin by owner, first come, first served within an owner.

    most: size of the queue; beyond it, only owners with less than their share of it may add calls, so that no owner can
    lock the others out.
    """

    def __init__(self, most: int):
        self.most = most
        self._by_owner: dict[str, deque[Call]] = {}
        self._seen: dict[str, float] = {}
        """When each recent owner last had a call, by `time.monotonic`."""

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def __iter__(self) -> Iterator[Call]:
        for calls in self._by_owner.values():
            yield from calls

    def is_full(self, owner: str) -> bool:
        """Whether another call from this owner would be refused."""
        owners = len(self._by_owner.keys() | {owner})
        return len(self) >= self.most and len(self._by_owner.get(owner, ())) >= max(1, self.most // owners)

    def push(self, call: Call) -> None:
        call.arrived = time.monotonic()
        self._by_owner.setdefault(call.owner, deque()).append(call)

    def next(self, running: Mapping[str, int], slots: int) -> Call | None:
        """The next owner's first call; None if no call is waiting, or only owners that already have their share of the
        slots are.

        running: calls in slots, by owner.  Recent owners share equally: a text can take long, and an owner that had all
        slots would make the others wait until one of its texts ends.
        """
        now = time.monotonic()
        recent = {owner: seen for owner, seen in self._seen.items() if now - seen < RECENT_S}
        self._seen = recent | dict.fromkeys([*running, *self._by_owner], now)
        share = -(-slots // max(1, len(self._seen)))
        return next((calls[0] for owner, calls in self._by_owner.items() if running.get(owner, 0) < share), None)

    def take(self, call: Call) -> Call:
        """Remove the first call of its owner, who moves to the end of the round."""
        calls = self._by_owner.pop(call.owner)
        calls.popleft()
        if calls:
            self._by_owner[call.owner] = calls
        return call

    def remove(self, call: Call) -> bool:
        """Remove a call; returns whether it was waiting."""
        calls = self._by_owner.get(call.owner, deque())
        if call not in calls:
            return False
        calls.remove(call)
        if not calls:
            del self._by_owner[call.owner]
        return True


def over_by_now(calls: Sequence[Call], cancelled: Collection[Call]) -> dict[Call, Ending]:
    """The calls that were cancelled or are past their deadline, with the reason."""
    now = time.monotonic()
    late: dict[Call, Ending] = {call: "deadline" for call in calls if (call.deadline or now + 1) <= now}
    return late | {call: "cancelled" for call in calls if call in cancelled}


def seconds_to_next(busy: Sequence[Call], slots: int) -> float:
    """Estimated time until a full queue has room: the mean age of the running calls, divided by the slots."""
    now = time.monotonic()
    mean = sum(now - call.admitted for call in busy) / max(1, len(busy))
    return max(1.0, min(60.0, mean / slots))
