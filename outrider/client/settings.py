"""How long a client waits, how often it sends a request again, and how much it sends at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.errors import ConfigError


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number of seconds above 0, got {value}")


@dataclass(frozen=True)
class Timeouts:
    """Seconds of each phase of a request."""

    connect_s: float = 10.0
    write_s: float = 30.0
    """Between two writes of the request."""
    first_byte_s: float = 120.0
    """From the sending of a request to the first byte of its stream.  A whole answer has `total_s`: nothing of it comes
    before all of it is written."""
    idle_s: float = 60.0
    """Between two bytes of an answer; comments in a stream count."""
    total_s: float = 600.0
    """Of a request: waiting for its place, every attempt, and the pauses between them."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "write_s", "first_byte_s", "idle_s", "total_s"):
            _above_zero(f"timeouts.{name}", getattr(self, name))


@dataclass(frozen=True)
class Retries:
    """When a request is sent again, which only happens before its answer began."""

    attempts: int = 4
    """Most of one request; 1 never sends again."""
    base_s: float = 0.5
    cap_s: float = 8.0
    """The n-th pause is drawn between 0 and the smaller of `cap_s` and base_s · 2^(n-1), unless the server says how
    long to wait."""
    longest_wait_s: float = 120.0
    """A server that wants a longer pause is given up at once."""
    share: float = 0.2
    """Of requests that may be sent again: a server that fails on all of them is not asked several times as much."""
    spare: int = 10
    """Requests that may be sent again whatever their share."""
    torn: bool = False
    """Also send a request again whose whole answer broke off: it may be charged twice.  A stream never is."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"retries.attempts must be at least 1, got {self.attempts}")
        for name in ("base_s", "cap_s", "longest_wait_s"):
            _above_zero(f"retries.{name}", getattr(self, name))
        if not self.share >= 0 or self.spare < 0:
            raise ConfigError(f"retries.share and retries.spare must not be below 0, got {self.share} and {self.spare}")


@dataclass(frozen=True)
class Limits:
    """How much is sent at once, and when sending stops."""

    concurrency: int = 64
    """Requests under way at the same time."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Tokens of prompts and answers: estimated when a request is sent, corrected by what the server counted."""
    failures: int = 10
    """Attempts that fail one after another until the server is left alone; then one request tries it."""
    reset_s: float = 30.0
    """How long it is left alone."""
    answer_bytes: int = 64 * 2**20
    """Largest answer."""
    min_accepted: float = 0.2
    """Share of predicted tokens, of the last 2,000 or more, that answers must have accepted; below it, predictions are
    left out, since providers charge for rejected ones."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "failures", "answer_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None and not getattr(self, name) >= 1:
                raise ConfigError(f"limits.{name} must be at least 1, got {getattr(self, name)}; leave it out for none")
        _above_zero("limits.reset_s", self.reset_s)
        if not 0 <= self.min_accepted <= 1:
            raise ConfigError(f"limits.min_accepted must be between 0 and 1, got {self.min_accepted}")


TIMEOUTS, RETRIES, LIMITS = Timeouts(), Retries(), Limits()
"""Of a client that is given none."""
