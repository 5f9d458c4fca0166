"""Isolates drafter failures: if a drafter raises or hangs, decoding continues without drafts.

A step does not need a draft: without one it is plain decoding.  So a failing drafter never changes the text.
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
    """Slots that may have caused a step to fail before its commit: those with grammars or processors if the error is a
    ConfigError, otherwise all."""
    rows = [row for row in state.rows if state.requests[row].sampling.forbids]
    return rows if rows and isinstance(error, ConfigError) else list(state.rows)


class Abandoned(BaseException):
    """Raised in a thread whose drafter returned too late: another thread is decoding by now, so this one must end."""


class GuardedDrafter(Drafter):
    """Wraps a drafter, and switches it off when it raises or hangs."""

    def __init__(self, inner: Drafter, alarm: Callable[[str], None] = lambda kind: None):
        """alarm: called with "drafter_raised" or "drafter_hung"."""
        self.inner, self.alarm = inner, alarm
        self.taps, self.limit, self.hidden = inner.taps, inner.limit, inner.hidden
        self.confidence_before_draw, self.probe_rows = inner.confidence_before_draw, inner.probe_rows
        self.steps, self.learns, self.watches = inner.steps, inner.learns, inner.watches
        self.is_off = False
        self._busy_since: float | None = None
        self._lock = threading.Lock()

    def replace(self, inner: Drafter) -> None:
        """Use this drafter from now on; it takes over the memory of the previous one, see `costs.stored`."""
        self.inner = inner

    def refresh(self) -> None:
        self.inner.refresh()

    def allocate(self, cache: Cache) -> Any:
        return self.inner.allocate(cache)

    def admit(
        self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self._guard(lambda: self.inner.admit(memory, rows, state, scores, lengths), None)

    def static(self, memory: Any, is_greedy: bool) -> StaticDrafter:
        return self.inner.static(memory, is_greedy)

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        slots = len(state.rows)
        propose = lambda: Draft.checked(self.inner.propose(memory, state, budget), slots)
        return self._guard(propose, Draft.empty(slots, state.device))

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe | None:
        return self._guard(lambda: self.inner.probe(memory, state, draft), None)

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        self._guard(lambda: self.inner.observe(memory, state, draft, accepted, scores), None)

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        self._guard(lambda: self.inner.free(memory, rows), None)

    def is_hung(self, seconds: float) -> bool:
        """Whether a call into the drafter has exceeded this; if so, the drafter is switched off, and its thread will
        raise Abandoned."""
        with self._lock:
            since = self._busy_since
            if self.is_off or since is None or time.monotonic() - since <= seconds:
                return False
            self._switch_off("drafter_hung", f"did not return within {seconds:g} s")
            return True

    def _guard(self, call: Callable[[], T], otherwise: T) -> T:
        with self._lock:
            if self.is_off:
                return otherwise
            self._busy_since = time.monotonic()
        error: Exception | None = None
        try:
            value = call()
        except Exception as raised:
            error = raised
        with self._lock:
            if self.is_off:
                raise Abandoned
            self._busy_since = None
            if error is None:
                return value
            self._switch_off("drafter_raised", f"raised {type(error).__name__}: {error}")
            return otherwise

    def _switch_off(self, kind: str, why: str) -> None:
        self.is_off, self.limit = True, 0
        log.error("the drafter %s; it is switched off, and requests are decoded without drafts until a restart", why)
        self.alarm(kind)
