"""Sends a request until its answer begins, and never again after that."""

from __future__ import annotations

import asyncio
import logging
import random

from outrider.client.sending.attempt import Attempt, Call, Failure
from outrider.client.sending.backoff import RetryBudget, backoff_s
from outrider.client.sending.resources import Resources
from outrider.client.settings import Retries

log = logging.getLogger("outrider.client")


class Sender:
    """Retries calls where that is useful and allowed."""

    def __init__(self, resources: Resources, retries: Retries):
        self.resources, self.retries = resources, retries
        self._budget = RetryBudget(retries.share, retries.spare)
        self._noise = random.Random()

    async def open(self, call: Call) -> Attempt:
        """The attempt whose answer began.  Raises ClientError if none did, ConfigError before the first attempt."""
        self._budget.requests += call.attempts == 0
        while True:
            attempt = Attempt(self.resources, call)
            failure = await attempt.start()
            if failure is None:
                return attempt
            log.debug("%s, attempt %d failed: status %s", call.id, call.attempts, failure.status)
            if not self._drops_speculation(failure, call):
                await self.back_off(call, failure)

    async def back_off(self, call: Call, failure: Failure) -> None:
        """Wait until the call is to be retried.  Raises ClientError if it is not."""
        if not failure.is_retryable or call.attempts >= self.retries.attempts:
            raise failure.final(call)
        delay_s = backoff_s(self.retries, call.attempts, failure.retry_after_s, self._noise)
        if delay_s is None or delay_s >= call.left_s or not self._budget.take():
            raise failure.final(call)
        if failure.status is not None and failure.status >= 500:
            call.drop_speculation()  # the drafter may have crashed where the target alone works
        await asyncio.sleep(delay_s)

    def _drops_speculation(self, failure: Failure, call: Call) -> bool:
        """Whether the server refused the request because of speculation, and it is resent without."""
        drops = failure.status in (400, 404, 422) and failure.error.is_about_speculation and call.drop_speculation()
        if drops:
            log.warning("the server refuses speculation (%s); the request is resent without it", failure.error.param)
        return drops
