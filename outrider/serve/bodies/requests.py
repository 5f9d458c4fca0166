"""From request bodies to the engine's requests: encodes prompts, reads settings, and enforces the server's limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outrider import generation
from outrider.config import nearest
from outrider.decoding.state import Request
from outrider.errors import ConfigError, DataError
from outrider.sampling.grammar import Grammar
from outrider.sampling.settings import Sampling
from outrider.serve.bodies import chat
from outrider.serve.bodies.refusals import Refusal, invalid
from outrider.serve.bodies.request_models import (
    MIN_TEMPERATURE,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SchemaFormat,
    Speculative,
    TextFormat,
    TextRequest,
    TokenizeChat,
    TokenizeText,
    Tool,
    offered_tools,
)
from outrider.serve.bodies.schemas import bounded
from outrider.serve.config import Config
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.control import text_tokens
from outrider.targets.text.detokenizer import showing
from outrider.targets.text.parts import text_of
from outrider.targets.text.prompts import encoded
from outrider.targets.text.tool_calls import CallParser, schema_of

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that does not set it, as in OpenAI's API."""
PIECE = 32_768
"""Longer texts are encoded in pieces of so many characters, to find out whether they are too long: a token takes
hundreds of bytes while it is encoded."""
SEAM = 64
"""Maximum error, in tokens, of a piece's count."""
LETTERS = 8
"""Longer texts than so many characters per token of the limit are encoded in pieces, too; predictions are cut there."""
MOST_COUNTED = 65_536
"""Number of tokens that /tokenize counts even if no slot can hold them."""
LARGEST_SCHEMA = 100_000
"""Characters; the time to compile a schema grows with the square of its properties."""
DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings whose defaults come from the model's generation_config, as in vLLM."""


class Reader:
    """Turns bodies into requests.  Slow for long prompts, so call it in a thread; every method may raise Refusal."""

    def __init__(self, target: TransformersTarget, config: Config, name: str, length: int, drafters: Sequence[str]):
        """length: tokens of a slot.  drafters: names that a request may choose from; empty without a drafter."""
        self.target, self.config, self.name, self.length, self.drafters = target, config, name, length, tuple(drafters)
        self.defaults = defaults_of(target)

    def requests(self, body: TextRequest, owner: str) -> list[list[Request]]:
        """For each prompt, a request for each of its answers."""
        self.check_model(body.model)
        n = body.n or 1
        self._check_number(1 if isinstance(body, ChatRequest) else len(_listed(body.prompt)), n)
        calls = self.calls(body)
        prompts = self._prompts(body, calls)
        with _reported():
            settings = self._sampling(body, calls)
            stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
            requests = []
            for tokens in prompts:
                most = self._most(body, len(tokens))
                sampling = replace(settings, min_new_tokens=self._fewest(body, most))
                [request] = generation.requests(
                    self.target, [tokens], most, sampling, stops, streamed=bool(body.stream),
                    continues=not isinstance(body, ChatRequest),
                )  # fmt: skip
                request = replace(request, tenant=owner, **self._drafts(body))
                if calls is not None and calls.form is not None and request.detokenizer is not None:
                    shown = showing(request.detokenizer, self.target.tokenizer, calls.form.marks)
                    request = replace(request, detokenizer=shown)
                requests.append([_seeded(request, i) for i in range(n)])
        return requests

    def calls(self, body: TextRequest) -> CallParser | None:
        """The parser of the tool calls in an answer; None for an answer that is text."""
        return chat.calls_of(body, self.target.tokenizer) if isinstance(body, ChatRequest) else None

    def tokens(self, body: TokenizeText | TokenizeChat) -> list[int]:
        """Token ids for /tokenize."""
        self.check_model(body.model)
        if isinstance(body, TokenizeChat):
            return self._chat(body, body.tools)
        self._check_texts([body.prompt], max(MOST_COUNTED, self._longest))
        return self._encoded(body.prompt, body.add_special_tokens is not False, body.parse_special is not False)

    def text(self, body: DetokenizeRequest) -> str:
        """Text for /detokenize."""
        self.check_model(body.model)
        self._tokenizer()
        if wrong := [token for token in body.tokens if token >= self.target.spec.vocabulary]:
            most = self.target.spec.vocabulary - 1
            raise invalid(f"token id {wrong[0]} is outside the model's vocabulary; ids are 0 to {most}", "tokens")
        return str(self.target.tokenizer.decode(body.tokens))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"unknown model {name[:80]!r}{nearest(name[:80], [self.name])}"
            raise Refusal(404, message, "model", "model_not_found")

    # ── prompts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prompts(self, body: TextRequest, calls: CallParser | None) -> list[list[int]]:
        if isinstance(body, ChatRequest):
            encoded_prompts = [self._chat(body, offered_tools(body))]
            if calls is not None and calls.is_forced and calls.form is not None and calls.form.begin:
                encoded_prompts[0] += self.target.tokenizer.encode(calls.form.begin, add_special_tokens=False)
        else:
            prompts = _listed(body.prompt)
            for prompt in prompts:
                if isinstance(prompt, str):
                    self._check_texts([prompt], self._longest)
                else:
                    self._check_length(len(prompt))
            encoded_prompts = [self._token_ids(prompt, body.parse_special is not False) for prompt in prompts]
        if not encoded_prompts:
            raise invalid("prompt is an empty list; give at least one text, or token ids", "prompt")
        for tokens in encoded_prompts:
            self._check_length(len(tokens))
        return encoded_prompts

    def _chat(self, body: ChatRequest | TokenizeChat, tools: Sequence[Tool] | None) -> list[int]:
        is_parsed, tokenizer = body.parse_special is True, self.target.tokenizer
        most = self._longest if isinstance(body, ChatRequest) else max(MOST_COUNTED, self._longest)
        if len(body.messages) > most:  # each has at least one token
            raise self._too_long(f"{len(body.messages)} or more")
        self._check_texts([text_of(message.model_dump()["content"]) for message in body.messages], most)
        check = lambda rendered: self._check_texts([rendered], most)  # including names, tools and their indentation
        return chat.tokens_of(body.messages, tools, body.chat_template_kwargs, tokenizer, is_parsed, check)

    def _token_ids(self, prompt: str | list[int], is_parsed: bool) -> list[int]:
        if isinstance(prompt, str):
            return self._encoded(prompt, is_parsed=is_parsed)
        with _reported("prompt"):
            return self.target.encode(prompt)

    def _encoded(self, text: str, with_special: bool = True, is_parsed: bool = True) -> list[int]:
        tokenizer = self._tokenizer()
        with _encoding("prompt"):
            if not is_parsed:
                return text_tokens(tokenizer, text, add_special_tokens=with_special)
            return encoded(text, tokenizer) if with_special else list(tokenizer.encode(text, add_special_tokens=False))

    def _tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise invalid("this model has no tokenizer; give prompts as token ids to /v1/completions")
        return self.target.tokenizer

    @property
    def _longest(self) -> int:
        """Maximum number of tokens of a prompt."""
        return min(self.config.prompt_tokens or self.length, self.length - 1)

    def _check_texts(self, texts: Sequence[str], most: int) -> None:
        """Refuse texts with far more than `most` tokens without encoding or rendering them completely."""
        size = min(PIECE, LETTERS * most)
        if self.target.tokenizer is None or sum(map(len, texts)) <= size:
            return
        joined, count = "\n".join(texts), 0
        for begin in range(0, len(joined), size):
            with _encoding("prompt"):
                encoded = self.target.tokenizer.encode(joined[begin : begin + size], add_special_tokens=False)
            count += max(0, len(encoded) - SEAM)
            if count > most:
                raise self._too_long(f"more than {most}")

    def _too_long(self, count: str) -> Refusal:
        return invalid(
            f"the prompt has {count} tokens, and this server accepts at most {self._longest}; shorten it", "prompt",
            "context_length_exceeded",
        )  # fmt: skip

    def _check_length(self, count: int) -> None:
        if count > self._longest:
            raise self._too_long(str(count))
        if not count:
            raise invalid("the prompt is empty; give at least one token", "prompt")

    def _check_number(self, prompts: int, n: int) -> None:
        if n > self.config.n:
            raise invalid(f"n must be at most {self.config.n}, got {n}", "n")
        if prompts * n > self.config.texts:
            raise invalid(
                f"{prompts} prompts with {n} answers each are {prompts * n} texts, and a request may have at most "
                f"{self.config.texts}; send several requests",
                "prompt",
            )

    # ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _most(self, body: TextRequest, prompt: int) -> int:
        """Maximum number of tokens of an answer to a prompt of `prompt` tokens."""
        room, limit = self.length - prompt, self.config.max_tokens
        max_tokens, name = body.max_tokens, "max_tokens"
        if isinstance(body, ChatRequest):
            if body.max_completion_tokens is not None:
                max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
        elif max_tokens is None:
            max_tokens = min(COMPLETION_TOKENS, room, limit or room)
        if max_tokens is None:
            return min(room, limit or room)
        if max_tokens > room:
            raise invalid(
                f"{name} is {max_tokens}, and after a prompt of {prompt} tokens there is room for {room}; lower it",
                name, "context_length_exceeded",
            )  # fmt: skip
        if limit is not None and max_tokens > limit:
            raise invalid(f"{name} must be at most {limit}, got {max_tokens}", name)
        return max_tokens

    def _fewest(self, body: TextRequest, most: int) -> int:
        fewest = most if body.ignore_eos else body.min_tokens or 0
        if fewest > most:
            raise invalid(f"min_tokens is {fewest}, and the answer has at most {most} tokens; lower it", "min_tokens")
        return fewest

    def _sampling(self, body: TextRequest, calls: CallParser | None) -> Sampling:
        requested = {name: getattr(body, name) for name in DRAWN}
        drawn = self.defaults | {name: value for name, value in requested.items() if value is not None}
        if 0 < drawn["temperature"] < MIN_TEMPERATURE:
            raise invalid(
                f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {drawn['temperature']}", "temperature"
            )
        return Sampling(
            drawn["temperature"], max(0, int(drawn["top_k"])), drawn["top_p"], body.seed, drawn["min_p"],
            repetition_penalty=drawn["repetition_penalty"], presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias={int(token): value for token, value in (body.logit_bias or {}).items()},
            logprobs=_logprobs(body), grammar=_grammar(body, calls),
        )  # fmt: skip

    def _drafts(self, body: TextRequest) -> dict[str, Any]:
        """A body's draft settings, as fields of `Request`."""
        speculative = body.speculative
        drafts: dict[str, Any] = {}
        if isinstance(speculative, Speculative) and not self.drafters:
            raise invalid("speculative has no effect: this server has no drafter; leave it out", "speculative")
        if speculative is False:
            drafts["max_draft"] = 0
        elif isinstance(speculative, Speculative):
            if speculative.drafter is not None and speculative.drafter not in self.drafters:
                near = nearest(speculative.drafter[:80], self.drafters)
                raise invalid(f"unknown drafter {speculative.drafter[:80]!r}{near}", "speculative.drafter")
            drafts |= {"max_draft": speculative.depth, "drafter": speculative.drafter or ""}
        if body.prediction is not None:
            text = text_of(body.prediction.model_dump()["content"])
            text = text[: LETTERS * self.length]  # it may be long, but no answer is longer than `length`
            drafts["prediction"] = self._encoded(text, with_special=False)[: self.length]
        return drafts


def defaults_of(target: TransformersTarget) -> dict[str, Any]:
    """Default sampling settings: those of the model's generation_config, and neutral values for the rest."""
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    config = target.generation_config
    defaults = {} if config is None else {name: value for name, value in vars(config).items() if name in DRAWN}
    return plain | {name: value for name, value in defaults.items() if value is not None}


def _listed(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    return [prompt] if is_one else list(prompt)


def _seeded(request: Request, i: int) -> Request:
    """The i-th answer's request."""
    seed = request.sampling.seed
    if i == 0 or seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + i + 2**63) % 2**64 - 2**63))


def _logprobs(body: TextRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs has no effect without logprobs; add logprobs: true", "top_logprobs")
    return body.top_logprobs or 0 if body.logprobs else None


def _grammar(body: TextRequest, calls: CallParser | None) -> Grammar | None:
    form, param = body.response_format, "response_format"
    if calls is not None and calls.is_forced and isinstance(body, ChatRequest):
        tools = [tool.function for tool in body.tools or () if tool.function.name in calls.names]
        schema = schema_of([function.model_dump(exclude_none=True) for function in tools], calls.form)
        param = "tools"
    elif isinstance(form, TextFormat | None):
        return None
    else:
        schema = form.json_schema.schema_ if isinstance(form, SchemaFormat) else {"type": "object"}
    if (size := len(json.dumps(schema))) > LARGEST_SCHEMA:
        raise invalid(f"the schema has {size} characters, more than {LARGEST_SCHEMA}", param)
    with _reported(param):
        return Grammar.json(bounded(schema))


@contextmanager
def _encoding(param: str) -> Iterator[None]:
    """Errors of the tokenizer become refusals."""
    try:
        yield
    except DataError as error:
        raise invalid(str(error), param) from None
    except (TypeError, ValueError) as error:
        raise invalid(f"the tokenizer can't read the text: {error}", param) from None


@contextmanager
def _reported(param: str | None = None) -> Iterator[None]:
    """Outrider's errors become refusals."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise invalid(str(error), param) from None
