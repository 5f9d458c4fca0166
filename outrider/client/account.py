"""What a client has used and spent, and the budget that it never exceeds.

Before an attempt is sent, the most that it can cost is reserved.  When it ends, the reservation is replaced by the cost
of the answer, or released if the server refused.  If the attempt broke off, it stays: the server may charge for it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from decimal import Decimal

from outrider.client.failures import BudgetExceeded
from outrider.client.prices import Usage

log = logging.getLogger("outrider.client")
ZERO = Decimal(0)


@dataclass
class Totals:
    """What a client has done since it was created."""

    requests: int = 0
    answered: int = 0
    """All others failed or are in flight."""
    cached: int = 0
    """Answered from the cache, without an attempt."""
    attempts: int = 0
    """Times that a request was sent; more than `requests` if some were retried."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    known_cost: Decimal = ZERO
    """Of all answers whose tokens and price are known."""
    unpriced: int = 0
    """Answers whose cost is not known."""
    uncertain: int = 0
    """Attempts that broke off and may be charged anyway."""
    uncertain_cost: Decimal = ZERO
    """The most that these can cost, if the price is known."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> Decimal | None:
        """Of all answers; None if the cost of one is unknown."""
        return None if self.unpriced else self.known_cost


class Account:
    """Updates `totals`, and keeps what was spent and what may still be charged within `budget`."""

    def __init__(self, budget: Decimal | None = None):
        self.budget, self.totals = budget, Totals()
        self._reserved = ZERO
        self._changed = asyncio.Event()

    async def reserve(self, amount: Decimal, attempts: int = 0) -> None:
        """Wait until `amount` fits into the budget together with everything in flight, and reserve it.

        Raises BudgetExceeded if it never will.  `release`, `charge` or `mark_uncertain` must follow.
        """
        while self.budget is not None and self._spent + self._reserved + amount > self.budget:
            if not self._reserved:
                raise BudgetExceeded(
                    f"another attempt may cost {amount:.6f}, and {self.budget - self._spent:.6f} of the budget of "
                    f"{self.budget} is left; request fewer tokens, or raise the budget", attempts,
                )  # fmt: skip
            self._changed.clear()
            await self._changed.wait()
        self._reserved += amount

    def release(self, amount: Decimal) -> None:
        """The attempt was not sent or was refused: it costs nothing."""
        self._reserved -= amount
        self._changed.set()

    def charge(self, amount: Decimal, usage: Usage | None, cost: Decimal | None) -> None:
        """The attempt was answered.  The reservation stays if the cost is unknown."""
        totals = self.totals
        if cost is None:
            totals.unpriced += 1
            totals.uncertain_cost += amount
        else:
            totals.known_cost += cost
            if self.budget is not None and cost > amount:
                log.warning(
                    "an answer cost %s, over its limit of %s: the server counts tokens differently", cost, amount
                )
        for name, count in ({} if usage is None else usage._asdict()).items():
            setattr(totals, name, getattr(totals, name) + count)
        self.release(amount)

    def mark_uncertain(self, amount: Decimal) -> None:
        """The attempt broke off and may be charged."""
        self.totals.uncertain += 1
        self.totals.uncertain_cost += amount
        self.release(amount)

    @property
    def _spent(self) -> Decimal:
        return self.totals.known_cost + self.totals.uncertain_cost
