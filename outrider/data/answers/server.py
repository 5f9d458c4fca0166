"""One server that answers prompts: whether it is up, which model it serves, and how it returns token ids."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.client import AsyncClient, ClientError, Limits, RefusedError, Retries, Timeouts
from outrider.client.sending.resources import base_of
from outrider.data.answers.dialogue import Dialogue
from outrider.data.answers.store import check_tokens
from outrider.data.config import Config
from outrider.data.rendering import prompt_tokens
from outrider.decoding.state import Request
from outrider.errors import DataError, masked
from outrider.sampling.settings import Sampling
from outrider.targets.protocol import Target
from outrider.targets.remote.rows import settings_of
from outrider.targets.text.control import text_tokens

log = logging.getLogger("outrider.data.answers.servers")
FAILURES = 3
"""Consecutive failures after which a server is suspended."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before a suspended server is tried again; doubled each time."""
RETRIES = Retries(attempts=3, base_s=0.25, cap_s=2.0, share=1.0)
"""Retries of one request; after that, the prompt goes to another server."""
COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
"""Fields in which servers return a model's reasoning."""
SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""The order of sampling steps here, in vLLM and in SGLang; llama.cpp's default applies temperature last."""
ID_FIELDS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "tokens": ({"return_token_ids": True}, {"return_tokens": True}, {"logprobs": 1, "samplers": SAMPLERS}, {}),
    "chat": ({"return_token_ids": True}, {"return_tokens": True}, {"logprobs": True, "samplers": SAMPLERS}, {}),
}
"""Request fields that make servers return token ids: vLLM, SGLang and `outrider serve`; others; llama.cpp; none."""


class UnusableAnswer(ClientError):
    """An answer that can't be used for training."""

    def __init__(self, message: str):
        super().__init__(message, attempts=1)


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A prompt with its settings, in the form that is sent to a server."""

    request: Request
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, dialogue: Dialogue, config: Config) -> AnswerRequest:
        return cls(dialogue.request(config), list(dialogue.messages), dialogue.conversation.tools)

    @property
    def settings(self) -> dict[str, Any]:
        """All sampling fields of the request: a server takes missing ones from the model's generation_config."""
        sampling = self.request.sampling
        fields = settings_of(sampling) | {"max_tokens": self.request.max_new_tokens, "seed": sampling.seed}
        return fields | ({} if sampling.top_k else {"top_k": -1})  # SGLang rejects 0


class Reply(NamedTuple):
    """A server's answer."""

    tokens: list[int]
    """Includes the token that ends the text, if it ended by itself."""
    text: str
    finish_reason: str
    """stop or length."""
    has_ids: bool
    """Whether the server returned the ids; otherwise its text was tokenised here."""
    prompt: list[int] | None
    """The prompt's ids as rendered by the server's template, if it returns them."""


class Server:
    """A server and its state: up, on trial, suspended or given up on."""

    def __init__(self, url: str, config: Config, target: Target, tokenizer: Any, key: str | None):
        """Raises ConfigError for an invalid address."""
        self.url, self._config, self._target, self._tokenizer = masked(base_of(url)), config, target, tokenizer
        self._client = AsyncClient(
            url, api_key=key, retries=RETRIES, timeouts=Timeouts(total_s=config.timeout_s),
            limits=Limits(concurrency=config.in_flight + 1, reset_s=FIRST_PAUSE_S),
        )  # fmt: skip
        self.models: list[str] = []
        """The models it lists; empty if it has no list."""
        self.model: str | None = None
        self.model_of: str | None = None
        """The server that determined the model; None if the settings did."""
        self._id_fields: Mapping[str, Any] = {}
        self.is_up = asyncio.Event()
        """Set while it receives prompts."""
        self.is_tried = False
        """It gets one prompt at a time until it has answered one."""
        self.is_refused = False
        """Whether it is never tried again."""
        self.trial = asyncio.Lock()
        self.failing_since: float | None = None
        self.reason = "not tried yet"
        """Reason of its last failure."""
        self._failures, self._pause_s = 0, FIRST_PAUSE_S
        self._return: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._return is not None:
            self._return.cancel()
        await self._client.aclose()

    # ── discovery ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find_models(self) -> None:
        """Fetch the list of its models.  Raises ClientError."""
        try:
            self.models = await self._client.models()
        except RefusedError as error:
            if error.status != 404:
                raise
            self.models = []  # it has no list

    def check_model(self) -> None:
        """Raises DataError if it does not serve the requested model."""
        if self.model is None:
            raise DataError(f"{self.url} does not say which model it serves; name it with prepare.model")
        if self.models and self.model not in self.models:
            models = f"{self.url} serves {', '.join(self.models)}"
            if self.model_of is None:
                raise DataError(f"{models}, and prepare.model asks for {self.model}; correct one of them")
            raise DataError(
                f"{models}, but {self.model_of} serves {self.model}; give servers of one model, or name the model that "
                "all of them have with prepare.model"
            )

    async def find_id_fields(self) -> None:
        """Find out how it returns token ids with one-token requests; it is up afterwards.

        Raises ClientError if it does not answer, DataError if it refuses the request.
        """
        messages = [{"role": "user", "content": "a"}]
        tokens = prompt_tokens(self._tokenizer, messages, self._config.enable_thinking)
        sampling = Sampling(self._config.temperature, self._config.top_k, self._config.top_p, self._config.seed)
        request, refusal = AnswerRequest(Request(tokens, 1, sampling), messages), ""
        for id_fields in ID_FIELDS[self._config.ask]:
            try:
                raw = await self._raw(request, id_fields)
            except RefusedError as error:
                refusal = str(error)
                continue
            if not id_fields or ids_in(raw) is not None:
                self._id_fields = id_fields
                self.is_up.set()
                return
        hint = "; if it takes no token ids, set prepare.ask to chat" if self._config.ask == "tokens" else ""
        raise DataError(f"{self.url} refuses the request: {refusal}{hint}")

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def reply(self, request: AnswerRequest) -> Reply:
        """The answer to a prompt.  Raises ClientError if there is none, UnusableAnswer if it can't be trained on."""
        raw = await self._raw(request, self._id_fields)
        choice, ids = first_of(raw), ids_in(raw)
        reason, text = choice.get("finish_reason"), _text_of(choice)
        if reason not in COMPLETE and reason != "length":
            raise UnusableAnswer(f"an answer that ended with {reason!r}, not with stop or length")
        if ids is None and _calls_tools(choice):
            raise UnusableAnswer("a tool call without its text or token ids; set prepare.ask: tokens")
        if ids is None and _thinks_apart(choice):
            raise UnusableAnswer(
                "an answer whose reasoning is separate from its text, without token ids, so the generated "
                "text is unknown; set prepare.ask: tokens"
            )
        tokens = text_tokens(self._tokenizer, text, add_special_tokens=False) if ids is None else ids
        try:
            check_tokens(tokens, self._target.spec.vocabulary)
        except ValueError as error:
            raise UnusableAnswer(
                f"an answer whose ids can't be the target's: {error}; does it serve another model?"
            ) from None
        max_tokens, ends = request.request.max_new_tokens, self._target.ends
        if (first := next((i for i, token in enumerate(tokens) if token in ends), None)) is not None:
            tokens, reason = tokens[: first + 1], "stop"  # the server continued after the end of the turn
        if reason in COMPLETE and not (tokens and tokens[-1] in ends) and (end := self._end) is not None:
            tokens = [*tokens, end]
        if not tokens:
            raise UnusableAnswer("an answer without a token")
        is_cut = reason == "length" or len(tokens) > max_tokens  # tokenised here, a text may have more tokens
        if ids is not None:
            text = self._target.decode(tokens)
        finish_reason = "length" if is_cut else "stop"
        return Reply(tokens[:max_tokens], text, finish_reason, ids is not None, self._prompt_in(raw, choice))

    async def _raw(self, request: AnswerRequest, id_fields: Mapping[str, Any]) -> Mapping[str, Any]:
        settings = request.settings | dict(id_fields) | {"model": self.model}
        if self._config.ask == "tokens":
            return (await self._client.complete(request.request.prompt, **settings)).raw
        if (thinking := self._config.enable_thinking) is not None:
            settings["chat_template_kwargs"] = {"enable_thinking": thinking}
        if request.tools:
            settings["tools"] = list(request.tools)
        return (await self._client.chat(request.messages, **settings)).raw

    @property
    def _end(self) -> int | None:
        """The token to append to a text that ended by itself."""
        eos, ends = self._tokenizer.eos_token_id, self._target.ends
        return eos if eos in ends else min(ends, default=eos)

    def _prompt_in(self, raw: Mapping[str, Any], choice: Mapping[str, Any]) -> list[int] | None:
        if self._config.ask == "tokens":  # we sent it
            return None
        prompt = raw.get("prompt_token_ids") or choice.get("prompt_token_ids")
        try:
            check_tokens(prompt, self._target.spec.vocabulary)
        except ValueError:
            return None
        return prompt or None

    # ── suspension ────────────────────────────────────────────────────────────────────────────────────────────────────

    def succeed(self) -> None:
        """Note that it has answered a prompt."""
        self.is_tried, self.failing_since = False, None
        self._failures, self._pause_s = 0, FIRST_PAUSE_S

    def fail(self, reason: str, at_once: bool = False) -> None:
        """Note a failure of the server; suspend it after several in a row, on trial, or with `at_once`."""
        self.reason, self._failures = reason, self._failures + 1
        self.failing_since = self.failing_since or time.monotonic()
        if self.is_up.is_set() and (at_once or self.is_tried or self._failures >= FAILURES):
            self.suspend(reason)

    def suspend(self, reason: str) -> None:
        """Send it no prompts until it answers again."""
        log.warning("%s is suspended: %s", self.url, reason)
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
                await self.find_id_fields()
            except ClientError as error:
                self.reason = str(error)
            except DataError as error:
                self.reason, self.is_refused = str(error), True
                log.warning("%s is not tried again: %s", self.url, error)
                return
        log.warning("%s answers again", self.url)


def first_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of a response."""
    choice: Mapping[str, Any] = raw["choices"][0]
    return choice


def _text_of(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    return text if isinstance(text, str) else ""


def _calls_tools(choice: Mapping[str, Any]) -> bool:
    """Whether the server moved tool calls out of the text."""
    message = choice.get("message")
    return isinstance(message, Mapping) and bool(message.get("tool_calls") or message.get("function_call"))


def _thinks_apart(choice: Mapping[str, Any]) -> bool:
    """Whether the server moved the reasoning out of the text."""
    message = choice.get("message")
    return isinstance(message, Mapping) and any(message.get(key) for key in THOUGHTS)


def ids_in(raw: Mapping[str, Any]) -> list[Any] | None:
    """The token ids in a response; None if it has none."""
    choice = first_of(raw)
    for ids in (choice.get("token_ids"), choice.get("tokens"), raw.get("tokens")):
        if isinstance(ids, list) and ids:
            return ids
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(entries, list) or not entries:
        return None
    ids = [entry.get("id") if isinstance(entry, Mapping) else None for entry in entries]
    return ids if all(type(token) is int for token in ids) else None
