"""Servers with OpenAI's API answer the prompts: many at once, turn by turn, each by the server that is free first.

A server that fails three times in a row is set aside, and asked for its models after 1 s, 2 s, … 60 s.  When it
answers, one prompt tries it before others follow.  What was under way there goes to the other servers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from outrider.client import CircuitOpen, ClientError, RefusedError
from outrider.data.answers.ledger import Origin
from outrider.data.answers.record import Record
from outrider.data.answers.server import Question, Server
from outrider.data.answers.talks import Asked, Talk
from outrider.data.config import Config
from outrider.errors import ConfigError, DataError
from outrider.targets.protocol import Target

OF_THE_PROMPT = frozenset({400, 413, 422})
"""Statuses that refuse a prompt; others are the server's."""
CHECK_S = 1.0
"""Seconds between two looks at whether any server answers."""


def answer_all(target: Target, tokenizer: Any, unanswered: Iterator[Asked], config: Config, record: Record) -> None:
    """Let `config.servers` answer these conversations.

    Raises ConfigError for what is no address, and DataError where servers have different models, where none can be
    reached, and where none answers for `config.patience_s`.
    """
    asyncio.run(_Run(target, tokenizer, unanswered, config, record).work())


class _Run:
    """The servers, and the conversations under way on them."""

    def __init__(
        self, target: Target, tokenizer: Any, unanswered: Iterator[Asked], config: Config, record: Record
    ):  # fmt: skip
        self.target, self.tokenizer, self.config, self.record = target, tokenizer, config, record
        key = _key_of(config)
        self.servers = [Server(url, config, target, tokenizer, key) for url in dict.fromkeys(config.servers)]
        self._unanswered, self._returned = unanswered, deque[Talk]()
        self._under_way = 0
        self._changed, self._finished = asyncio.Event(), asyncio.Event()

    async def work(self) -> None:
        """Answer them all.  Raises DataError as `answer_all` does."""
        first = self._take()
        if first is None:
            return
        self._give_back(first)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await self._connect()
            tasks = [asyncio.create_task(self._finished.wait()), asyncio.create_task(self._watch())]
            for server in self.servers:
                tasks += [asyncio.create_task(self._serve(server)) for _ in range(self.config.in_flight)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for server in self.servers:
                await server.close()

    # ── servers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _connect(self) -> None:
        """Find out which servers answer, and that they have one model.  Raises DataError."""
        failures = await asyncio.gather(*(server.find_models() for server in self.servers), return_exceptions=True)
        reached = [one for one, failure in zip(self.servers, failures, strict=True) if failure is None]
        for server, failure in zip(self.servers, failures, strict=True):
            if isinstance(failure, ClientError):
                server.set_aside(str(failure))
            elif failure is not None:
                raise failure
        if not reached:
            raise DataError(f"no server can be reached: {self._reasons()}; start one, or correct prepare.servers")
        named = next((server for server in reached if server.models), reached[0])
        model = self.config.model or next(iter(named.models), None)
        for server in self.servers:
            server.model, server.model_of = model, None if self.config.model else named.url
        for server in reached:
            server.check_model()
        tried = await asyncio.gather(*(server.find_way() for server in reached), return_exceptions=True)
        for server, failure in zip(reached, tried, strict=True):
            if isinstance(failure, ClientError):
                server.set_aside(str(failure))
            elif failure is not None:
                raise failure

    async def _watch(self) -> None:
        """Raises DataError when no server has answered for long enough."""
        patience_s = self.config.patience_s
        while True:
            await asyncio.sleep(min(CHECK_S, patience_s / 4))
            if all(server.is_refused for server in self.servers):
                raise DataError(f"no server is left: {self._reasons()}; what is written stays, run again")
            since = [server.failing_since for server in self.servers if not server.is_refused]
            last = [moment for moment in since if moment is not None]
            if len(last) == len(since) and time.monotonic() - max(last) > patience_s:
                raise DataError(
                    f"no server has answered for {patience_s:g} s: {self._reasons()}; what is written stays, start one "
                    "and run again"
                )

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.reason}" for server in self.servers)

    # ── conversations ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, server: Server) -> None:
        """One place on a server: one conversation after the other, for ever."""
        while True:
            await server.is_up.wait()
            if not server.is_tried:
                await self._converse(server, await self._wait_for_talk())
                continue
            async with server.trial:  # alone, until it has answered once
                if server.is_tried and server.is_up.is_set():
                    await self._converse(server, await self._wait_for_talk())

    async def _converse(self, server: Server, talk: Talk) -> None:
        """Ask turn by turn until the conversation is over, or the server fails."""
        if not server.is_up.is_set():  # it went while this waited for work
            self._give_back(talk)
            return
        while talk.ask(self.tokenizer, self.config, self.target.spec.context):
            try:
                reply = await server.reply(Question.of(talk, self.config))
            except ClientError as error:
                self._fail(server, talk, error)
                return
            server.succeed()
            if reply.prompt is not None:
                talk.read(reply.prompt)
            talk.retokenised |= not reply.has_ids
            talk.add_answer(reply.tokens, reply.text)
            if talk.over:
                self.record.answer(talk.answer(reply.finish_reason), _origin(server, talk))
                break
        else:
            self.record.no_room(talk, self.config, self.target.spec.context, _origin(server, talk))
        self._leave()

    def _fail(self, server: Server, talk: Talk, error: ClientError) -> None:
        """Ask again elsewhere, or later; a prompt that is refused, or failed too often, has failed."""
        is_of_the_prompt = isinstance(error, RefusedError) and error.status in OF_THE_PROMPT
        talk.attempts += error.attempts > 0  # a server that is left alone was sent nothing
        if not is_of_the_prompt:
            server.fail(str(error), at_once=isinstance(error, RefusedError | CircuitOpen))
        if is_of_the_prompt or talk.attempts >= self.config.attempts:
            self.record.fail(talk, f"{server.url}: {error}")
            self._leave()
        else:
            self._give_back(talk)

    async def _wait_for_talk(self) -> Talk:
        while (talk := self._take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return talk

    def _take(self) -> Talk | None:
        """The next conversation; None where all are over or under way."""
        if self._returned:
            talk = self._returned.popleft()
        elif (one := next(self._unanswered, None)) is not None:
            talk = Talk(one)
        else:
            return None
        self._under_way += 1
        return talk

    def _give_back(self, talk: Talk) -> None:
        """Another place takes it."""
        self._returned.append(talk)
        self._under_way -= 1
        self._changed.set()

    def _leave(self) -> None:
        """A conversation is over."""
        self._under_way -= 1
        if not self._under_way and not self._returned:
            one = next(self._unanswered, None)
            if one is None:
                self._finished.set()
            else:
                self._returned.append(Talk(one))
                self._changed.set()


def _origin(server: Server, talk: Talk) -> Origin:
    return Origin("text" if talk.retokenised else "ids", server.url, server.model, talk.attempts + 1)


def _key_of(config: Config) -> str | None:
    """The servers' key.  Raises ConfigError where the variable is not set."""
    if config.key_from is None:
        return None
    if not (key := os.environ.get(config.key_from)):
        raise ConfigError(f"prepare.key_from: the environment has no {config.key_from}; set it to the servers' key")
    return key
