"""Whether a request is sent again, and after how long.

A server's wish comes first: `retry-after-ms`, `Retry-After` in seconds or as a date, and `x-ratelimit-reset-*` of a
limit that is used up.  Otherwise the pause is drawn with full jitter: between 0 and a bound that doubles.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from outrider.client.settings import Retries

RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may be answered; 409 is a lock, 529 an overload."""
USED_UP = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})
"""Codes of errors that last until somebody pays, though their status is 429."""
JITTER = 0.25
"""A pause that the server wants is made longer by up to this share, so that not all clients come back at once."""

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def is_worth_another(status: int, headers: Mapping[str, str], codes: frozenset[str]) -> bool:
    """Whether a refused request may be answered when it is sent again.  codes: `code` and `type` of the error."""
    if codes & USED_UP:
        return False
    wish = headers.get("x-should-retry", "").lower()
    return wish == "true" if wish in ("true", "false") else status in RETRIED


def wanted_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Seconds that the server wants to be left alone for; None where it does not say.  now_s: since 1970."""
    given = (
        _number(headers.get("retry-after-ms"), 1e-3), _number(headers.get("retry-after"), 1.0),
        _until(headers.get("retry-after"), now_s), _reset_s(headers),
    )  # fmt: skip
    return next((seconds for seconds in given if seconds is not None and 0 < seconds < math.inf), None)


def pause_s(retries: Retries, attempts: int, wanted: float | None, noise: random.Random) -> float | None:
    """Seconds until the next attempt, after so many; None where the server wants too long a pause."""
    if wanted is not None:
        return None if wanted > retries.longest_wait_s else wanted * (1 + noise.uniform(0, JITTER))
    return noise.uniform(0, min(retries.cap_s, retries.base_s * 2 ** (attempts - 1)))


class RetryBudget:
    """Keeps what is sent again a small part of all that is sent."""

    def __init__(self, share: float, spare: int):
        self.share, self.spare = share, spare
        self.requests = self.repeated = 0

    def has_more(self) -> bool:
        """Whether one more may be sent again; if so, it is counted."""
        if self.repeated + 1 > self.spare + self.share * self.requests:
            return False
        self.repeated += 1
        return True


def _number(text: str | None, unit: float) -> float | None:
    try:
        return None if text is None else float(text) * unit
    except ValueError:
        return None


def _until(text: str | None, now_s: float) -> float | None:
    """Seconds to a date of HTTP."""
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return None


def _reset_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until all limits that are used up are reset; None where none is."""
    found = [
        _duration_s(headers.get(f"x-ratelimit-reset-{what}", ""))
        for what in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{what}", "").strip() == "0"
    ]
    return max((seconds for seconds in found if seconds is not None), default=None)


def _duration_s(text: str) -> float | None:
    """`6m0s`, `120ms`, or a number of seconds."""
    parts = DURATION.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * UNITS[unit] for number, unit in parts)
    return _number(text, 1.0)
