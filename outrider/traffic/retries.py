"""Whether a call that failed is sent again, and when.  No torch."""

from __future__ import annotations

import random

from outrider.traffic.answer import Answer

PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""A Retry-After beyond it is a refusal."""


def is_worth_another(answer: Answer) -> bool:
    """Whether the call may succeed when it is sent again.  One that was silent too long would only make the queue longer."""
    if answer.is_whole or answer.is_cut or (answer.failure or "").startswith(("timeout", "stopped", "not understood")):
        return False
    return answer.status is None or answer.status in (200, 408, 429, 500, 502, 503, 504)


def pause_s(answer: Answer, attempt: int, noise: random.Random) -> float | None:
    """How long to wait before the next attempt; None where the server wants too long."""
    if answer.retry_after_s is not None:
        return answer.retry_after_s if answer.retry_after_s <= LONGEST_PAUSE_S else None
    return min(PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S) * noise.uniform(0.5, 1.5)
