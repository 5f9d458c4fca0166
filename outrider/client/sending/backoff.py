"""Whether a request is retried, and after how long.

What the server requests comes first: `retry-after-ms`, `Retry-After` in seconds or as a date, and `x-ratelimit-reset-*`
of an exhausted limit.  Otherwise full jitter: uniform between 0 and a bound that doubles with every attempt.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from outrider.client.settings import Retries

RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed; 409 is a lock, 529 an overload."""
QUOTA_EXHAUSTED = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})
"""Error codes with status 429 that last until somebody pays."""
JITTER = 0.25
"""A delay requested by the server is extended by up to this share, so that clients do not all return at once."""

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def is_retryable(status: int, headers: Mapping[str, str], codes: frozenset[str]) -> bool:
    """Whether a refused request may succeed on a retry.  codes: `code` and `type` of the error."""
    if codes & QUOTA_EXHAUSTED:
        return False
    should_retry = headers.get("x-should-retry", "").lower()
    return should_retry == "true" if should_retry in ("true", "false") else status in RETRIED


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Seconds that the server asks the client to wait; None if it does not.  now_s: since 1970."""
    delays = (
        _number(headers.get("retry-after-ms"), 1e-3), _number(headers.get("retry-after"), 1.0),
        _until(headers.get("retry-after"), now_s), _reset_s(headers),
    )  # fmt: skip
    return next((delay_s for delay_s in delays if delay_s is not None and 0 < delay_s < math.inf), None)


def backoff_s(retries: Retries, attempts: int, requested_s: float | None, noise: random.Random) -> float | None:
    """Seconds until the next attempt, after `attempts`.  requested_s: by the server; None if that is too long."""
    if requested_s is not None:
        return None if requested_s > retries.longest_wait_s else requested_s * (1 + noise.uniform(0, JITTER))
    return noise.uniform(0, min(retries.cap_s, retries.base_s * 2 ** (attempts - 1)))


class RetryBudget:
    """Limits retries to a small share of all requests."""

    def __init__(self, share: float, spare: int):
        self.share, self.spare = share, spare
        self.requests = self.retried = 0

    def take(self) -> bool:
        """Whether one more retry is allowed; if so, it is counted."""
        if self.retried + 1 > self.spare + self.share * self.requests:
            return False
        self.retried += 1
        return True


def _number(text: str | None, unit: float) -> float | None:
    try:
        return None if text is None else float(text) * unit
    except ValueError:
        return None


def _until(text: str | None, now_s: float) -> float | None:
    """Seconds until an HTTP date."""
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return None


def _reset_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until all exhausted limits are reset; None if none is exhausted."""
    resets = [
        _duration_s(headers.get(f"x-ratelimit-reset-{limit}", ""))
        for limit in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{limit}", "").strip() == "0"
    ]
    return max((reset_s for reset_s in resets if reset_s is not None), default=None)


def _duration_s(text: str) -> float | None:
    """`6m0s`, `120ms`, or a number of seconds."""
    parts = DURATION.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * UNITS[unit] for number, unit in parts)
    return _number(text, 1.0)
