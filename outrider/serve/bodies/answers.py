"""Answers in OpenAI's format: complete, or as server-sent events.

The hot path is a text-only chunk of a stream: everything but the text is built once per choice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii
from typing import Any
from uuid import uuid4

from outrider.sampling.logprobs import TokenLogprob
from outrider.serve.bodies.refusals import Refusal
from outrider.serve.bodies.request_models import ChatRequest, TextRequest, ignored
from outrider.serve.calls import Call, Ending, Output
from outrider.serve.pieces import Pieces
from outrider.targets.text.token_texts import Offsets, TokenTexts
from outrider.targets.text.tool_calls import CallParser, ToolCall

LOWEST = -9999.0
"""Replaces a log probability of minus infinity, which JSON can't represent."""
REASONS: dict[Ending, str] = {"stop": "stop", "length": "length", "context": "length"}
"""OpenAI's finish reasons of finished texts."""
DONE = b"data: [DONE]\n\n"

LONG = 500
"""Tokens with details beyond their text."""
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

Name = Callable[[int], str]
"""A token's text."""


class Choice:
    """One answer in progress."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.drafted: list[bool] = []
        self.steps = self.accepted = 0
        self.reason: Ending | None = None
        self.error = ""

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self.texts.append(output.text)
        self.logprobs += output.logprobs
        self.drafted += [i < output.drafted for i in range(len(output.tokens))]
        self.steps += bool(output.tokens)
        self.accepted += output.drafted
        if output.finish_reason is not None:
            self.reason, self.error = output.finish_reason, output.error

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Answer:
    """Formats the answer to one request."""

    def __init__(
        self, body: TextRequest, model: str, texts: TokenTexts, text_of: Name,
        calls: Callable[[], CallParser | None] = lambda: None,
    ):  # fmt: skip
        """text_of: the text of a token; "" for a special one.  calls: a new parser of the tool calls in a choice; None
        if the choice is text."""
        self.body, self.model, self.texts, self.text_of = body, model, texts, text_of
        self.is_chat = isinstance(body, ChatRequest)
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid4().hex
        self.created = int(time.time())
        self.counts_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._parser = calls
        self._parsers: dict[int, CallParser] = {}
        """One per choice of a stream; empty if choices are text."""
        self._has_calls = calls() is not None
        is_detailed = body.include_drafts or body.return_token_ids or body.logprobs not in (None, False)
        self._is_plain = not (is_detailed or self._has_calls)
        """Chunks contain nothing but text."""
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._offsets: dict[int, Offsets] = {}
        """Of each choice."""
        self._pieces: dict[int, Pieces] = {}

    @property
    def ignored(self) -> list[str]:
        """Fields of the request that have no effect."""
        return ignored(self.body)

    # ── complete ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def whole(self, choices: Sequence[Choice], calls: Sequence[Call]) -> dict[str, Any]:
        answer = self._head("chat.completion" if self.is_chat else "text_completion")
        answer["choices"] = [self._choice(choice) for choice in choices]
        answer["usage"] = usage(calls)
        if self.body.include_drafts:
            drafts = [self._drafts(choice.index, choice.tokens, choice.drafted, choice.text) for choice in choices]
            joined = {name: [item for each in drafts for item in each[name]] for name in drafts[0]}
            answer["outrider"] = counts(choices, calls) | joined
        return answer

    def is_long(self, choices: Sequence[Choice]) -> bool:
        """Whether formatting the complete answer takes so long that it must not be done on an event loop."""
        return not self._is_plain and sum(len(choice.tokens) for choice in choices) > LONG

    def content(self, choices: Sequence[Choice], calls: Sequence[Call]) -> bytes:
        """The complete answer as JSON."""
        return encoded(self.whole(choices, calls), self.is_long(choices))

    def _choice(self, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": choice.index}
        reason = REASONS[choice.reason or "stop"]
        if self.is_chat:
            content, calls = choice.text, list[ToolCall]()
            if (parser := self._parser()) is not None:
                content, calls = parser.push(choice.text, True)
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": [_tool_call(call) for call in calls]}
                reason = "tool_calls" if reason == "stop" else reason
            fields["message"] = message
        else:
            fields["text"] = choice.text
        fields["logprobs"] = self._logprobs(choice.index, choice.logprobs)
        fields["finish_reason"] = reason
        if self.body.return_token_ids:
            fields["token_ids"] = choice.tokens
        return fields

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    # ── in chunks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The first events of a stream."""
        if not self.is_chat:
            return b""
        return b"".join(
            self._event({"index": choice.index, "delta": {"role": "assistant", "content": ""}}) for choice in choices
        )

    def joined(self, outputs: Sequence[tuple[int, Output]]) -> Sequence[tuple[int, Output]]:
        """Merge the outputs of several steps into one per choice, if chunks have only text."""
        if len(outputs) < 2 or not self._is_plain:
            return outputs
        texts: dict[int, list[str]] = {}
        for index, output in outputs:
            texts.setdefault(index, []).append(output.text)
        last = dict(outputs)
        return [(index, replace(last[index], text="".join(parts))) for index, parts in texts.items()]

    def chunk(self, choice: Choice, output: Output, call: Call) -> bytes:
        """The event of one step's output; empty if there is nothing to send."""
        if self._is_plain and output.finish_reason is None:
            if not output.text:
                return b""
            before, after = self._frames.get(choice.index) or self._frame(choice.index)
            return before + encode_basestring_ascii(output.text).encode() + after
        fields: dict[str, Any] = {"index": choice.index}
        reason = None if output.finish_reason is None else REASONS[output.finish_reason]
        if self._has_calls:
            delta, count = self._delta(choice.index, output)
            if not (delta or reason or output.logprobs or self.body.include_drafts or self.body.return_token_ids):
                return b""
            fields["delta"], reason = delta, "tool_calls" if count and reason == "stop" else reason
        else:
            fields |= {"delta": {"content": output.text}} if self.is_chat else {"text": output.text}
        fields["logprobs"] = self._logprobs(choice.index, output.logprobs)
        fields["finish_reason"] = reason
        if self.body.return_token_ids:
            fields["token_ids"] = output.tokens
        more = {}
        if self.body.include_drafts:
            drafted = [i < output.drafted for i in range(len(output.tokens))]
            more["outrider"] = counts([choice], [call]) | self._drafts(
                choice.index, output.tokens, drafted, output.text
            )
        return self._event(fields, **more)

    def _delta(self, index: int, output: Output) -> tuple[dict[str, Any], int]:
        """New content and complete calls of a choice, and the number of its calls so far."""
        if index not in self._parsers:
            parser = self._parser()
            assert parser is not None
            self._parsers[index] = parser
        parser = self._parsers[index]
        before = parser.count
        content, calls = parser.push(output.text, output.finish_reason is not None)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": before + i} | _tool_call(call) for i, call in enumerate(calls)]
        return delta, parser.count

    def closing(self, calls: Sequence[Call]) -> bytes:
        """The last events of a stream."""
        if not self.counts_usage:
            return DONE
        last = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return event(last | {"choices": [], "usage": usage(calls)}) + DONE

    def failed(self, refusal: Refusal) -> bytes:
        """The last events of a stream that fails."""
        return event(refusal.body) + DONE

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        choice.setdefault("logprobs", None)
        choice.setdefault("finish_reason", None)
        chunk = self._head("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": [choice]}
        if self.counts_usage:
            chunk["usage"] = None
        return event(chunk | more)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text of a plain chunk."""
        mark = "\0text\0"
        fields: dict[str, Any] = {"delta": {"content": mark}} if self.is_chat else {"text": mark}
        before, _, after = self._event({"index": index} | fields).partition(json.dumps(mark).encode())
        return self._frames.setdefault(index, (before, after))

    def _drafts(self, index: int, tokens: Sequence[int], drafted: Sequence[bool], text: str) -> dict[str, list[Any]]:
        """Draft flags of these tokens, and the pieces of the text sent with them."""
        pieces = self._pieces.setdefault(index, Pieces())
        shown = zip(map(self.text_of, tokens), drafted, strict=True)
        return {"drafted_tokens": list(drafted), "pieces": pieces.push(shown, text)}

    # ── log probabilities ─────────────────────────────────────────────────────────────────────────────────────────────

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.body.logprobs is None or self.body.logprobs is False:
            return None
        if self.is_chat:
            return {"content": [self._described(one) for one in logprobs], "refusal": None}
        names, pieces = zip(*[self._named(one.token) for one in logprobs], strict=True) if logprobs else ((), ())
        offsets = self._offsets.setdefault(index, Offsets()).push(pieces)
        top = [self._ranked([*one.top, (one.token, one.logprob)]) for one in logprobs]
        values = [_finite(one.logprob) for one in logprobs]
        return {"tokens": list(names), "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _named(self, token: int) -> tuple[str, bytes]:
        """A token's name, and the bytes that it adds to the text; none for a special token."""
        return self.texts.name_of(token), self.texts.bytes_of(token) if self.text_of(token) else b""

    def _ranked(self, likeliest: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log probabilities by token name; if two tokens have the same name, the less likely one is named by its id."""
        ranked: dict[str, float] = {}
        for token, value in sorted(dict(likeliest).items(), key=lambda one: -one[1]):
            name = self.texts.name_of(token)
            ranked[f"token_id:{token}" if name in ranked else name] = _finite(value)
        return ranked

    def _described(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._one(token, value) for token, value in one.top]
        return self._one(one.token, one.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.texts.name_of(token), "logprob": _finite(logprob),
            "bytes": list(self.texts.bytes_of(token)),
        }  # fmt: skip


def _tool_call(call: ToolCall) -> dict[str, Any]:
    # nine letters and digits: Mistral's templates refuse other ids
    return {"id": uuid4().hex[:9], "type": "function", "function": call._asdict()}


def usage(calls: Sequence[Call]) -> dict[str, Any]:
    """Token counts of a request; a prompt counts once for all of its answers."""
    prompts = {id(call.request.prompt): call for call in calls}.values()
    read, written = sum(len(call.request.prompt) for call in prompts), sum(call.written for call in calls)
    return {
        "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(call.cached for call in prompts)},
    }  # fmt: skip


def counts(choices: Iterable[Choice], calls: Iterable[Call]) -> dict[str, int]:
    """Steps, drafted and accepted tokens so far, of these choices together."""
    return {
        "steps": sum(choice.steps for choice in choices),
        "drafted": sum(call.drafted for call in calls),
        "accepted": sum(choice.accepted for choice in choices),
    }


def event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, separators=(",", ":")).encode() + b"\n\n"


def encoded(values: dict[str, Any], is_long: bool) -> bytes:
    """A complete answer as JSON; a long one in pieces, so that other threads run in between."""
    return "".join(ENCODER.iterencode(values) if is_long else ENCODER.encode(values)).encode()


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
