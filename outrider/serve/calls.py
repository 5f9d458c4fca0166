"""What clients ask of the engine, what they are given, and the queue in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from outrider.decoding.state import FinishReason, Request
from outrider.errors import OutriderError
from outrider.sampling.logprobs import TokenLogprob

Ending = FinishReason | Literal["cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class Output:
    """What one step added to one call, and whether it ended."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """What became final of its text; of several steps that are given out together, with the last."""
    drafted: int = 0
    """How many of the tokens, from the first on, were drafted; the rest is the target's own."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of the tokens, where `Sampling.logprobs` asks for them."""
    finish_reason: Ending | None = None
    error: str = ""
    """Of an ending by error: what the client may be told."""


@dataclass(eq=False, slots=True)
class Call:
    """One text that the engine writes.  Times are seconds of `time.monotonic`, 0.0 until then."""

    request: Request
    receive: Callable[[Output], None]
    """Called for every step's output; where, is the engine's `post`."""
    owner: str = ""
    """Slots are shared fairly among owners, such as the names of API keys."""
    deadline: float | None = None
    """A time of `time.monotonic` at which the call ends, whatever it has written."""
    number: int = -1
    """The scheduler's, once it was admitted."""
    slot: int | None = None
    """Where it is written; None before its first token."""
    arrived: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    """When its first token was written."""
    finished: float = 0.0
    cached: int = 0
    """Prompt tokens that were taken from the store of prefixes."""
    steps: int = 0
    drafted: int = 0
    """Nodes drafted for it."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    written: int = 0
    """Tokens written so far."""
    is_stored: bool = True
    """A drafter may learn from it."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Of each step, where the engine has a listener: depth of its draft, and how many drafted tokens were accepted."""


class Listener(Protocol):
    """Is told of texts by the engine, in its thread, so it returns at once."""

    def ended(self, call: Call, answer: list[int]) -> None:
        """A text ended by itself."""

    def busy(self, is_busy: bool) -> None:
        """There are calls from now on, or none."""


class EngineStopped(OutriderError):
    """The engine takes no more calls."""


class QueueFull(OutriderError):
    """Too many calls are waiting; `retry_after_s` is when the next is likely to be taken."""

    def __init__(self, waiting: int, retry_after_s: float):
        super().__init__(f"{waiting} requests are waiting, which is the limit; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class WaitingCalls:
    """Calls in the order in which they are admitted: owners by turns, each owner's first come, first served.

    most: calls that wait; more only of owners who have less than their share of these places, so that nobody's calls
    keep all others out.
    """

    def __init__(self, most: int):
        self.most = most
        self._by_owner: dict[str, deque[Call]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def __iter__(self) -> Iterator[Call]:
        for calls in self._by_owner.values():
            yield from calls

    def is_full(self, owner: str) -> bool:
        """Whether there is no place for a further call of this owner."""
        owners = len(self._by_owner.keys() | {owner})
        return len(self) >= self.most and len(self._by_owner.get(owner, ())) >= max(1, self.most // owners)

    def push(self, call: Call) -> None:
        call.arrived = time.monotonic()
        self._by_owner.setdefault(call.owner, deque()).append(call)

    def next(self) -> Call:
        """What `pop` would give."""
        return next(iter(self._by_owner.values()))[0]

    def pop(self) -> Call:
        """The next owner's first call; that owner then waits for all others' turns."""
        owner = next(iter(self._by_owner))
        calls = self._by_owner.pop(owner)
        call = calls.popleft()
        if calls:
            self._by_owner[owner] = calls
        return call

    def remove(self, call: Call) -> bool:
        """Whether the call was waiting."""
        calls = self._by_owner.get(call.owner, deque())
        if call not in calls:
            return False
        calls.remove(call)
        if not calls:
            del self._by_owner[call.owner]
        return True


def over_by_now(calls: Sequence[Call], cancelled: Collection[Call]) -> dict[Call, Ending]:
    """Those of them that were cancelled, or whose time is over."""
    now = time.monotonic()
    late: dict[Call, Ending] = {call: "deadline" for call in calls if (call.deadline or now + 1) <= now}
    return late | {call: "cancelled" for call in calls if call in cancelled}


def seconds_to_next(busy: Sequence[Call], slots: int) -> float:
    """When a full queue is likely to have room: the mean time of the calls in the slots, shared by them."""
    now = time.monotonic()
    mean = sum(now - call.admitted for call in busy) / max(1, len(busy))
    return max(1.0, min(60.0, mean / slots))
