"""One server that answers prompts: whether it answers, which model it has, and how it gives token ids."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.client import AsyncClient, ClientError, Limits, RefusedError, Retries, Timeouts
from outrider.client.sending.resources import base_of
from outrider.data.answers.store import check_tokens
from outrider.data.answers.talks import Talk
from outrider.data.config import Config
from outrider.data.rendering import prompt_tokens
from outrider.decoding.state import Request
from outrider.errors import DataError
from outrider.sampling.settings import Sampling
from outrider.targets.protocol import Target
from outrider.targets.remote.rows import settings_of
from outrider.targets.text.control import text_tokens

log = logging.getLogger("outrider.data.answers.servers")
FAILURES = 3
"""Failures in a row after which a server is set aside."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Until it is looked for again; doubled each time."""
RETRIES = Retries(attempts=3, base_s=0.25, cap_s=2.0, share=1.0)
"""Of one request: more is the pool's matter, which has other servers."""
COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
"""Where servers put what a model thinks before its answer."""
SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""The order in which settings cut a distribution here, and in vLLM and SGLang; llama.cpp's own has temperature last."""
WAYS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "tokens": ({"return_token_ids": True}, {"return_tokens": True}, {"logprobs": 1, "samplers": SAMPLERS}, {}),
    "chat": ({"return_token_ids": True}, {"return_tokens": True}, {"logprobs": True, "samplers": SAMPLERS}, {}),
}
"""How servers are asked for the ids of their answers: vLLM, SGLang and outrider serve; others; llama.cpp; and not at
all."""


class Unusable(ClientError):
    """An answer that can't be trained on."""

    def __init__(self, message: str):
        super().__init__(message, attempts=1)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its settings, as a server is asked it."""

    request: Request
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, talk: Talk, config: Config) -> Question:
        return cls(talk.request(config), list(talk.messages), talk.asked.conversation.tools)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of the request.  All of them: a server takes others from the model's generation_config."""
        sampling = self.request.sampling
        found = settings_of(sampling) | {"max_tokens": self.request.max_new_tokens, "seed": sampling.seed}
        return found | ({} if sampling.top_k else {"top_k": -1})  # SGLang knows no 0


class Reply(NamedTuple):
    """A server's answer."""

    tokens: list[int]
    """With the token that ends the text, where it ended by itself."""
    text: str
    finish_reason: str
    """stop or length."""
    has_ids: bool
    """Whether the server gave the ids, or they are the tokenizer's here."""
    prompt: list[int] | None
    """The prompt as the server's template renders it, where it says so."""


class Server:
    """A server, and what became of the requests to it."""

    def __init__(self, url: str, config: Config, target: Target, tokenizer: Any, key: str | None):
        """Raises ConfigError for what is no address."""
        self.url, self._config, self._target, self._tokenizer = base_of(url), config, target, tokenizer
        self._client = AsyncClient(
            url, api_key=key, retries=RETRIES, timeouts=Timeouts(total_s=config.timeout_s),
            limits=Limits(concurrency=config.in_flight + 1, reset_s=FIRST_PAUSE_S),
        )  # fmt: skip
        self.models: list[str] = []
        """As it lists them; none where it has no list."""
        self.model: str | None = None
        self.model_of: str | None = None
        """The server that named the model; None where the settings do."""
        self._way: Mapping[str, Any] = {}
        self.is_up, self.is_tried, self.is_refused = asyncio.Event(), False, False
        """Whether it is asked at all, by one prompt at a time, and never again."""
        self.trial = asyncio.Lock()
        self.failing_since: float | None = None
        self.reason = "not tried yet"
        """Of its last failure."""
        self._failures, self._pause_s = 0, FIRST_PAUSE_S
        self._return: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._return is not None:
            self._return.cancel()
        await self._client.aclose()

    # ── what it is ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find_models(self) -> None:
        """Ask for its models.  Raises ClientError."""
        try:
            self.models = await self._client.models()
        except RefusedError as error:
            if error.status != 404:
                raise
            self.models = []  # it has no list; its answers say more

    def check_model(self) -> None:
        """Raises DataError where it has another model than the one that is asked for."""
        if self.model is None:
            raise DataError(f"{self.url} does not say which model it has; name it with prepare.model")
        if self.models and self.model not in self.models:
            theirs = f"{self.url} serves {', '.join(self.models)}"
            if self.model_of is None:
                raise DataError(f"{theirs}, and prepare.model asks for {self.model}; correct one of them")
            raise DataError(
                f"{theirs}, but {self.model_of} serves {self.model}; give servers of one model, or name the model that "
                "all of them have with prepare.model"
            )

    async def find_way(self) -> None:
        """Find out how it gives token ids, by answers of one token; it is up then.

        Raises ClientError where it does not answer, DataError where it refuses the request.
        """
        messages = [{"role": "user", "content": "a"}]
        tokens = prompt_tokens(self._tokenizer, messages, self._config.enable_thinking)
        sampling = Sampling(self._config.temperature, self._config.top_k, self._config.top_p, self._config.seed)
        question, refusal = Question(Request(tokens, 1, sampling), messages), ""
        for way in WAYS[self._config.ask]:
            try:
                raw = await self._raw(question, way)
            except RefusedError as error:
                refusal = str(error)
                continue
            if not way or ids_in(raw) is not None:
                self._way = way
                self.is_up.set()
                return
        hint = "; if it takes no token ids, set prepare.ask to chat" if self._config.ask == "tokens" else ""
        raise DataError(f"{self.url} refuses the request: {refusal}{hint}")

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def reply(self, question: Question) -> Reply:
        """The answer to a prompt.  Raises ClientError where there is none, Unusable for one that can't be trained
        on."""
        raw = await self._raw(question, self._way)
        choice, ids = first_of(raw), ids_in(raw)
        reason, text = choice.get("finish_reason"), _text_of(choice)
        if reason not in COMPLETE and reason != "length":
            raise Unusable(f"an answer that ended with {reason!r}, not with stop or length")
        if ids is None and _calls_tools(choice):
            raise Unusable("a call of a tool without its text or token ids; set prepare.ask: tokens")
        if ids is None and _thinks_apart(choice):
            raise Unusable(
                "an answer whose reasoning stands apart from its text, without token ids: which text the "
                "target wrote is not known; set prepare.ask: tokens"
            )
        tokens = text_tokens(self._tokenizer, text, add_special_tokens=False) if ids is None else ids
        try:
            check_tokens(tokens, self._target.spec.vocabulary)
        except ValueError as error:
            raise Unusable(
                f"an answer whose ids can't be the target's: {error}; does it serve another model?"
            ) from None
        most, ends = question.request.max_new_tokens, self._target.ends
        if (first := next((i for i, token in enumerate(tokens) if token in ends), None)) is not None:
            tokens, reason = tokens[: first + 1], "stop"  # the server went on after the end of the turn
        if reason in COMPLETE and not (tokens and tokens[-1] in ends) and (end := self._end) is not None:
            tokens = [*tokens, end]
        if not tokens:
            raise Unusable("an answer without a token")
        is_cut = reason == "length" or len(tokens) > most  # a text may have more tokens here than it had there
        if ids is not None:
            text = self._target.decode(tokens)
        return Reply(tokens[:most], text, "length" if is_cut else "stop", ids is not None, self._prompt_in(raw, choice))

    async def _raw(self, question: Question, way: Mapping[str, Any]) -> Mapping[str, Any]:
        settings = question.settings | dict(way) | {"model": self.model}
        if self._config.ask == "tokens":
            return (await self._client.complete(question.request.prompt, **settings)).raw
        if (thinking := self._config.enable_thinking) is not None:
            settings["chat_template_kwargs"] = {"enable_thinking": thinking}
        if question.tools:
            settings["tools"] = list(question.tools)
        return (await self._client.chat(question.messages, **settings)).raw

    @property
    def _end(self) -> int | None:
        """The token that ends a text which ended by itself."""
        own, ends = self._tokenizer.eos_token_id, self._target.ends
        return own if own in ends else min(ends, default=own)

    def _prompt_in(self, raw: Mapping[str, Any], choice: Mapping[str, Any]) -> list[int] | None:
        if self._config.ask == "tokens":  # it was ours
            return None
        found = raw.get("prompt_token_ids") or choice.get("prompt_token_ids")
        try:
            check_tokens(found, self._target.spec.vocabulary)
        except ValueError:
            return None
        return found or None

    # ── set aside ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def succeed(self) -> None:
        """It has answered a prompt."""
        self.is_tried, self.failing_since = False, None
        self._failures, self._pause_s = 0, FIRST_PAUSE_S

    def fail(self, reason: str, at_once: bool = False) -> None:
        """A request failed, by its fault; after several in a row, or `at_once`, it is left alone."""
        self.reason, self._failures = reason, self._failures + 1
        self.failing_since = self.failing_since or time.monotonic()
        if self.is_up.is_set() and (at_once or self.is_tried or self._failures >= FAILURES):
            self.set_aside(reason)

    def set_aside(self, reason: str) -> None:
        """Ask it nothing until it answers again."""
        log.warning("%s is set aside: %s", self.url, reason)
        self.reason = reason
        self.failing_since = self.failing_since or time.monotonic()
        self.is_up.clear()
        self._return = asyncio.create_task(self._come_back())

    async def _come_back(self) -> None:
        while not self.is_up.is_set():
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            try:
                await self.find_models()
                self.check_model()
                self.is_tried, self._failures = True, 0
                await self.find_way()
            except ClientError as error:
                self.reason = str(error)
            except DataError as error:
                self.reason, self.is_refused = str(error), True
                log.warning("%s is not asked again: %s", self.url, error)
                return
        log.warning("%s answers again", self.url)


def first_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of an answer, which has one."""
    found: Mapping[str, Any] = raw["choices"][0]
    return found


def _text_of(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    return text if isinstance(text, str) else ""


def _calls_tools(choice: Mapping[str, Any]) -> bool:
    """Whether the server took calls of tools out of the text."""
    message = choice.get("message")
    return isinstance(message, Mapping) and bool(message.get("tool_calls") or message.get("function_call"))


def _thinks_apart(choice: Mapping[str, Any]) -> bool:
    """Whether the server took thoughts out of the text."""
    message = choice.get("message")
    return isinstance(message, Mapping) and any(message.get(key) for key in THOUGHTS)


def ids_in(raw: Mapping[str, Any]) -> list[Any] | None:
    """The token ids of an answer, where it has them."""
    choice = first_of(raw)
    for found in (choice.get("token_ids"), choice.get("tokens"), raw.get("tokens")):
        if isinstance(found, list) and found:
            return found
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(entries, list) or not entries:
        return None
    ids = [entry.get("id") if isinstance(entry, Mapping) else None for entry in entries]
    return ids if all(type(token) is int for token in ids) else None
