"""Sends a request until its answer begins, and never again after that."""

from __future__ import annotations

import asyncio
import logging
import random

from outrider.client.sending.attempt import Attempt, Call, Failed, Failure
from outrider.client.sending.pauses import RetryBudget, pause_s
from outrider.client.sending.resources import Resources
from outrider.client.settings import Retries

log = logging.getLogger("outrider.client")


class Sender:
    """Sends calls again where that is worth it and allowed."""

    def __init__(self, resources: Resources, retries: Retries):
        self.resources, self.retries = resources, retries
        self._budget = RetryBudget(retries.share, retries.spare)
        self._noise = random.Random()

    async def open(self, call: Call) -> Attempt:
        """The attempt whose answer began.  Raises a ClientError where none did; ConfigError before the first."""
        self._budget.requests += call.attempts == 0
        while True:
            attempt = Attempt(self.resources, call)
            try:
                await attempt.begin()
                return attempt
            except Failed as failed:
                failure = failed.failure
            log.debug("%s, attempt %d failed: status %s", call.id, call.attempts, failure.status)
            if not self._is_of_the_drafter(failure, call):
                await self.pause(call, failure)

    async def pause(self, call: Call, failure: Failure) -> None:
        """Return when the call is to be sent again.  Raises a ClientError where it is not."""
        if not failure.is_retried or call.attempts >= self.retries.attempts:
            raise failure.final(call)
        seconds = pause_s(self.retries, call.attempts, failure.wanted_s, self._noise)
        if seconds is None or seconds >= call.left_s or not self._budget.has_more():
            raise failure.final(call)
        if failure.status is not None and failure.status >= 500:
            call.make_plain()  # the target may answer where its drafter made the server fail
        await asyncio.sleep(seconds)

    def _is_of_the_drafter(self, failure: Failure, call: Call) -> bool:
        """Whether the server refused the request for its speculation: it is sent once more without."""
        is_so = failure.status in (400, 404, 422) and failure.refused.is_of_speculation and call.make_plain()
        if is_so:
            log.warning("the server refuses speculation (%s); asked again without", failure.refused.param)
        return is_so
