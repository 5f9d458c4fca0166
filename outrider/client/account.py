"""What a client has used and spent, and the budget that it never passes.

Before an attempt is sent, the most that it can cost is reserved.  When it ends, the reservation becomes what the answer
cost; nothing, where the server refused; or stays, where an attempt broke off: nobody knows what is charged for it.
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
    """What a client has done since it was made."""

    requests: int = 0
    answered: int = 0
    """All others failed, or are under way."""
    cached: int = 0
    """Answered from the cache, without an attempt."""
    attempts: int = 0
    """Requests as they were sent; more than `requests` where some were sent again."""
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
    """Attempts that broke off, and may be charged all the same."""
    uncertain_cost: Decimal = ZERO
    """The most that these can cost, where the price is known."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> Decimal | None:
        """Of all answers; None where that of one is not known."""
        return None if self.unpriced else self.known_cost


class Account:
    """Counts into `totals`, and keeps what was spent and what may be charged within `budget`."""

    def __init__(self, budget: Decimal | None = None):
        self.budget, self.totals = budget, Totals()
        self._reserved = ZERO
        self._changed = asyncio.Event()

    async def reserve(self, most: Decimal, attempts: int = 0) -> None:
        """Return once `most` fits into the budget beside all that is under way.  Raises BudgetExceeded where it never
        will; `free`, `charge` or `doubt` must follow."""
        while self.budget is not None and self._spent + self._reserved + most > self.budget:
            if not self._reserved:
                raise BudgetExceeded(
                    f"another attempt may cost {most:.6f}, and {self.budget - self._spent:.6f} of the budget of "
                    f"{self.budget} is left; ask for fewer tokens, or raise the budget", attempts,
                )  # fmt: skip
            self._changed.clear()
            await self._changed.wait()
        self._reserved += most

    def free(self, most: Decimal) -> None:
        """The attempt was not sent, or refused: it costs nothing."""
        self._reserved -= most
        self._changed.set()

    def charge(self, most: Decimal, usage: Usage | None, cost: Decimal | None) -> None:
        """The attempt was answered.  Without its cost, what was reserved stays."""
        totals = self.totals
        if cost is None:
            totals.unpriced += 1
            totals.uncertain_cost += most
        else:
            totals.known_cost += cost
            if self.budget is not None and cost > most:
                log.warning("an answer cost %s, and could cost %s at most: the server counts other tokens", cost, most)
        for name, count in ({} if usage is None else usage._asdict()).items():
            setattr(totals, name, getattr(totals, name) + count)
        self.free(most)

    def doubt(self, most: Decimal) -> None:
        """The attempt broke off, and may be charged."""
        self.totals.uncertain += 1
        self.totals.uncertain_cost += most
        self.free(most)

    @property
    def _spent(self) -> Decimal:
        return self.totals.known_cost + self.totals.uncertain_cost
