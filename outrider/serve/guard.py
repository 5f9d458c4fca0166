"""A drafter that can't break a request: where it raises or does not return, decoding goes on plainly.

A step only asks a drafter for what it does not need: without a draft, it is plain decoding.  So whatever happens inside
one, the target's text is not touched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import ConfigError
from outrider.fast.static.step import StaticDrafter

T = TypeVar("T")
log = logging.getLogger(__name__)


def suspects(state: DecodeState, error: Exception) -> Sequence[int]:
    """Slots that may be the reason why a step failed before its commit: those with code or grammars of their own, or
    else all."""
    own = [row for row in state.rows if state.requests[row].sampling.forbids]
    return own if own and isinstance(error, ConfigError) else list(state.rows)


class Abandoned(BaseException):
    """Raised in a thread whose drafter came back too late: another thread decodes by now, so this one must end."""


class GuardedDrafter(Drafter):
    """Another drafter until that raises or hangs, then none.  `alarm` is told which: drafter_raised, drafter_hung."""

    def __init__(self, inner: Drafter, alarm: Callable[[str], None] = lambda kind: None):
        self.inner, self.alarm = inner, alarm
        self.taps, self.limit, self.hidden = inner.taps, inner.limit, inner.hidden
        self.confidence_before_draw, self.probe_rows = inner.confidence_before_draw, inner.probe_rows
        self.steps, self.learns, self.watches = inner.steps, inner.learns, inner.watches
        self.is_off = False
        self._busy_since: float | None = None
        self._lock = threading.Lock()

    def replace(self, inner: Drafter) -> None:
        """Ask this one from now on; it takes over the memory of the one before, see `costs.stored`."""
        self.inner = inner

    def refresh(self) -> None:
        self.inner.refresh()

    def allocate(self, cache: Cache) -> Any:
        return self.inner.allocate(cache)

    def admit(
        self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self._ask(lambda: self.inner.admit(memory, rows, state, scores, lengths), None)

    def static(self, memory: Any, is_greedy: bool) -> StaticDrafter:
        return self.inner.static(memory, is_greedy)

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        slots = len(state.rows)
        ask = lambda: Draft.checked(self.inner.propose(memory, state, budget), slots)
        return self._ask(ask, Draft.empty(slots, state.device))

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe | None:
        return self._ask(lambda: self.inner.probe(memory, state, draft), None)

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        self._ask(lambda: self.inner.observe(memory, state, draft, accepted, scores), None)

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        self._ask(lambda: self.inner.free(memory, rows), None)

    def is_hung(self, seconds: float) -> bool:
        """Whether a call into the drafter has taken longer; it is then switched off, and its thread will raise
        Abandoned."""
        with self._lock:
            since = self._busy_since
            if self.is_off or since is None or time.monotonic() - since <= seconds:
                return False
            self._switch_off("drafter_hung", f"did not return within {seconds:g} s")
            return True

    def _ask(self, ask: Callable[[], T], otherwise: T) -> T:
        with self._lock:
            if self.is_off:
                return otherwise
            self._busy_since = time.monotonic()
        error: Exception | None = None
        try:
            found = ask()
        except Exception as raised:
            error = raised
        with self._lock:
            if self.is_off:
                raise Abandoned
            self._busy_since = None
            if error is None:
                return found
            self._switch_off("drafter_raised", f"raised {type(error).__name__}: {error}")
            return otherwise

    def _switch_off(self, kind: str, why: str) -> None:
        self.is_off, self.limit = True, 0
        log.error("the drafter %s; it is switched off, and all requests are decoded plainly until a restart", why)
        self.alarm(kind)
