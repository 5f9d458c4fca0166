"""Servers with OpenAI's API answer the prompts: many concurrently, turn by turn, each on the first free server.

A server that fails three times in a row is suspended, and probed for its models after 1 s, 2 s, … 60 s.  Once it
answers, it is tried with one prompt before it gets others.  Its unfinished prompts go to the other servers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.client import CircuitOpen, ClientError, RefusedError
from outrider.data.answers.dialogue import Dialogue, HashedConversation
from outrider.data.answers.ledger import Origin
from outrider.data.answers.server import AnswerRequest, Server
from outrider.data.answers.writer import AnswerWriter
from outrider.data.config import Config
from outrider.errors import ConfigError, DataError
from outrider.targets.protocol import Target

PROMPT_STATUSES = frozenset({400, 413, 422})
"""HTTP statuses that reject the prompt; all others are failures of the server."""
CHECK_S = 1.0
"""Seconds between two checks of whether any server answers."""


def answer_all(
    target: Target, tokenizer: Any, unanswered: Iterator[HashedConversation], config: Config, writer: AnswerWriter
) -> None:
    """Let `config.servers` answer these conversations.

    Raises ConfigError for an invalid address, and DataError if the servers have different models, if none can be
    reached, or if none answers for `config.patience_s`.
    """
    asyncio.run(_ServerPool(target, tokenizer, unanswered, config, writer).work())


class _ServerPool:
    """The servers and their conversations in progress."""

    def __init__(
        self, target: Target, tokenizer: Any, unanswered: Iterator[HashedConversation], config: Config,
        writer: AnswerWriter,
    ):  # fmt: skip
        self.target, self.tokenizer, self.config, self.writer = target, tokenizer, config, writer
        key = _key_of(config)
        self.servers = [Server(url, config, target, tokenizer, key) for url in dict.fromkeys(config.servers)]
        self._unanswered, self._requeued = unanswered, deque[Dialogue]()
        self._num_active = 0
        self._changed, self._finished = asyncio.Event(), asyncio.Event()

    async def work(self) -> None:
        """Answer them all.  Raises DataError as `answer_all` does."""
        first = self._take()
        if first is None:
            return
        self._requeue(first)
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
        """Find out which servers answer, and check that they have the same model.  Raises DataError."""
        failures = await asyncio.gather(*(server.find_models() for server in self.servers), return_exceptions=True)
        reached = [server for server, failure in zip(self.servers, failures, strict=True) if failure is None]
        _suspend_failed(self.servers, failures)
        if not reached:
            raise DataError(f"no server can be reached: {self._reasons()}; start one, or correct prepare.servers")
        named = next((server for server in reached if server.models), reached[0])
        model = self.config.model or next(iter(named.models), None)
        for server in self.servers:
            server.model, server.model_of = model, None if self.config.model else named.url
        for server in reached:
            server.check_model()
        failures = await asyncio.gather(*(server.find_id_fields() for server in reached), return_exceptions=True)
        _suspend_failed(reached, failures)

    async def _watch(self) -> None:
        """Raises DataError once no server has answered for `config.patience_s`."""
        patience_s = self.config.patience_s
        while True:
            await asyncio.sleep(min(CHECK_S, patience_s / 4))
            if all(server.is_refused for server in self.servers):
                raise DataError(
                    f"no server is left: {self._reasons()}; the answers so far are kept; run again to resume"
                )
            since = [server.failing_since for server in self.servers if not server.is_refused]
            last = [moment for moment in since if moment is not None]
            if len(last) == len(since) and time.monotonic() - max(last) > patience_s:
                raise DataError(
                    f"no server has answered for {patience_s:g} s: {self._reasons()}; the answers so far are kept; "
                    "start one and run again"
                )

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.reason}" for server in self.servers)

    # ── conversations ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, server: Server) -> None:
        """One of a server's slots: answers one conversation after another, forever."""
        while True:
            await server.is_up.wait()
            if not server.is_tried:
                await self._converse(server, await self._wait_for_dialogue())
                continue
            async with server.trial:  # one at a time until it has answered once
                if server.is_tried and server.is_up.is_set():
                    await self._converse(server, await self._wait_for_dialogue())

    async def _converse(self, server: Server, dialogue: Dialogue) -> None:
        """Send turn by turn until the conversation is over or the server fails."""
        if not server.is_up.is_set():  # it was suspended while this slot waited for work
            self._requeue(dialogue)
            return
        while dialogue.ask(self.tokenizer, self.config, self.target.spec.context):
            try:
                reply = await server.reply(AnswerRequest.of(dialogue, self.config))
            except ClientError as error:
                self._fail(server, dialogue, error)
                return
            server.succeed()
            if reply.prompt is not None:
                dialogue.read(reply.prompt)
            dialogue.retokenised |= not reply.has_ids
            dialogue.add_answer(reply.tokens, reply.text)
            if dialogue.is_over:
                self.writer.answer(dialogue.answer(reply.finish_reason), _origin(server, dialogue))
                break
        else:
            self.writer.no_room(dialogue, self.config, self.target.spec.context, _origin(server, dialogue))
        self._leave()

    def _fail(self, server: Server, dialogue: Dialogue, error: ClientError) -> None:
        """Requeue the conversation; a prompt that is rejected or has failed too often fails for good."""
        is_rejected = isinstance(error, RefusedError) and error.status in PROMPT_STATUSES
        dialogue.attempts += error.attempts > 0  # a suspended server was sent nothing
        if not is_rejected:
            server.fail(str(error), at_once=isinstance(error, RefusedError | CircuitOpen))
        if is_rejected or dialogue.attempts >= self.config.attempts:
            self.writer.fail(dialogue, f"{server.url}: {error}")
            self._leave()
        else:
            self._requeue(dialogue)

    async def _wait_for_dialogue(self) -> Dialogue:
        while (dialogue := self._take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return dialogue

    def _take(self) -> Dialogue | None:
        """The next conversation; None if all are over or in progress."""
        if self._requeued:
            dialogue = self._requeued.popleft()
        elif (prompt := next(self._unanswered, None)) is not None:
            dialogue = Dialogue(prompt)
        else:
            return None
        self._num_active += 1
        return dialogue

    def _requeue(self, dialogue: Dialogue) -> None:
        """Let another slot continue the conversation."""
        self._requeued.append(dialogue)
        self._num_active -= 1
        self._changed.set()

    def _leave(self) -> None:
        """A conversation is over."""
        self._num_active -= 1
        if not self._num_active and not self._requeued:
            prompt = next(self._unanswered, None)
            if prompt is None:
                self._finished.set()
            else:
                self._requeued.append(Dialogue(prompt))
                self._changed.set()


def _suspend_failed(servers: Sequence[Server], failures: Sequence[BaseException | None]) -> None:
    """Suspend the servers that could not be reached; raises all other failures."""
    for server, failure in zip(servers, failures, strict=True):
        if isinstance(failure, ClientError):
            server.suspend(str(failure))
        elif failure is not None:
            raise failure


def _origin(server: Server, dialogue: Dialogue) -> Origin:
    return Origin("text" if dialogue.retokenised else "ids", server.url, server.model, dialogue.attempts + 1)


def _key_of(config: Config) -> str | None:
    """The servers' API key.  Raises ConfigError if the variable is not set."""
    if config.key_from is None:
        return None
    if not (key := os.environ.get(config.key_from)):
        raise ConfigError(f"prepare.key_from: the environment has no {config.key_from}; set it to the servers' key")
    return key
