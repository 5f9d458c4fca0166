"""OpenAI's responses API, translated: a request becomes that of a chat, and the chat's answer a response.

Nothing is stored: a conversation is sent whole, as `input`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Discriminator, Field, Tag

from outrider.serve.bodies.answers import Answer, Choice, encoded, usage
from outrider.serve.bodies.refusals import Refusal
from outrider.serve.bodies.request_models import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    JsonSchema,
    ObjectFormat,
    Positive,
    Ranks,
    SharedBody,
    Text,
    TextFormat,
    Variables,
    at_most,
    idle_fields,
)
from outrider.serve.calls import Call, Output

LOGPROBS = "message.output_text.logprobs"
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
"""Fields of a chat's request by what they are called here."""


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = None
    logprobs: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Content = Annotated[str | Annotated[list[InputText], Field(fail_fast=True)], at_most(MOST_PARTS)]


class Item(Body):
    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: Text
    arguments: str


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


KINDS = {"message": MessageItem, "function_call": CallItem, "function_call_output": CallOutputItem}


def _kind_of(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) and kind in KINDS else None


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(
        _kind_of, custom_error_type="unknown_item", custom_error_message=f"Input should have a type of {list(KINDS)}"
    ),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: Text


class NamedSchema(JsonSchema):
    type: Literal["json_schema"]


class TextSettings(Body):
    format: Annotated[TextFormat | ObjectFormat | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ObfuscationOptions(Body):
    include_obfuscation: bool | None = None
    """No effect: chunks are never padded."""


class ResponseRequest(SharedBody):
    """Body of /v1/responses."""

    input: Annotated[
        str | Annotated[list[AnyItem], Field(fail_fast=True)], at_most(MOST_MESSAGES)
    ]  # fmt: skip
    """A user's text, or the whole conversation: messages, function calls and their outputs."""
    instructions: str | None = None
    """A system message before `input`."""
    max_output_tokens: Positive | None = None
    text: TextSettings | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Ranks | None = None
    include: Annotated[list[Included], at_most(MOST_PARTS)] | None = None
    """Log probabilities; there is never reasoning, encrypted or not."""
    stream_options: ObfuscationOptions | None = None
    chat_template_kwargs: Variables | None = None


def chat_of(body: ResponseRequest) -> dict[str, Any]:
    """The body of the same request to /v1/chat/completions."""
    shared = body.model_dump(include={*SharedBody.model_fields, "parallel_tool_calls", "chat_template_kwargs"})
    values: dict[str, Any] = {"messages": _messages(body), "max_completion_tokens": body.max_output_tokens} | shared
    if has_logprobs := LOGPROBS in (body.include or ()) or body.top_logprobs is not None:
        values |= {"logprobs": has_logprobs, "top_logprobs": body.top_logprobs}
    form = body.text and body.text.format
    if isinstance(form, NamedSchema):
        schema = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        values["response_format"] = form.model_dump()
    if body.tools is not None:
        values["tools"] = [{"type": "function", "function": _dump(tool, {"type"})} for tool in body.tools]
    choice = body.tool_choice
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
    return {name: value for name, value in (values | {"tool_choice": named}).items() if value is not None}


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        match item:
            case MessageItem():
                messages.append({"role": item.role, "content": _content(item.content)})
            case CallOutputItem():
                content = _content(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case CallItem():  # a call belongs to what the assistant said before it
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _content(content: str | list[InputText]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def _dump(body: Body, without: set[str] | None = None) -> dict[str, Any]:
    return body.model_dump(exclude=without, exclude_none=True, by_alias=True)


@contextmanager
def renamed() -> Iterator[None]:
    """Refusals name the fields as they are called here."""
    try:
        yield
    except Refusal as refusal:
        head, _, rest = (refusal.param or "").partition(".")
        if head in NAMES:
            refusal.param = NAMES[head] + (f".{rest}" if rest else "")
            refusal.message = refusal.message.replace(head, NAMES[head])
        raise


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class ResponseAnswer:
    """Formats the answer to one request, with the methods of `Answer`, from that of the chat."""

    def __init__(self, body: ResponseRequest, chat: Answer):
        self.body, self.chat, self.id = body, chat, f"resp_{uuid4().hex}"
        self._output: list[dict[str, Any]] = []
        self._message: dict[str, Any] | None = None
        """The item in `_output` with the text."""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason = "stop"
        self._sent = 0
        """Events so far."""
        self.joined = chat.joined
        self.is_long = chat.is_long

    @property
    def ignored(self) -> list[str]:
        """Fields of the request that have no effect."""
        return idle_fields(self.body) + ["include"] * ("reasoning.encrypted_content" in (self.body.include or ()))

    def whole(self, choices: Sequence[Choice], calls: Sequence[Call]) -> dict[str, Any]:
        self._take(self.chat.whole(choices, calls)["choices"][0])
        self._close()
        return self._response(calls)

    def content(self, choices: Sequence[Choice], calls: Sequence[Call]) -> bytes:
        return encoded(self.whole(choices, calls), self.is_long(choices))

    def opening(self, choices: Sequence[Choice]) -> bytes:
        response = self._response(None)
        return self._events({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def chunk(self, choice: Choice, output: Output, call: Call) -> bytes:
        chunk = self.chat.chunk(choice, output, call)
        return self._events(self._take(json.loads(chunk.removeprefix(b"data: "))["choices"][0])) if chunk else b""

    def closing(self, calls: Sequence[Call]) -> bytes:
        events = self._close()
        response = self._response(calls)
        return self._events([*events, {"type": f"response.{response['status']}", "response": response}])

    def failed(self, refusal: Refusal) -> bytes:
        fields = {name: refusal.body["error"][name] for name in ("code", "message", "param")}
        return self._events([{"type": "error", **fields}])

    def _take(self, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Add a choice, or a chunk of one; returns its events."""
        part = choice.get("message") or choice["delta"]
        self._reason = choice["finish_reason"] or self._reason
        text, logprobs = part.get("content") or "", (choice["logprobs"] or {}).get("content", [])
        events = []
        if text or logprobs:
            events = self._begun()
            self._texts.append(text)
            self._logprobs += logprobs
            events.append(self._of_text("response.output_text.delta", delta=text, logprobs=logprobs))
        for call in part.get("tool_calls") or ():
            events += self._called(call)
        return events

    def _begun(self) -> list[dict[str, Any]]:
        """Begin the message with the text, if it has not begun."""
        if self._message is not None:
            return []
        self._message = {
            "type": "message", "id": f"msg_{uuid4().hex}", "status": "in_progress", "role": "assistant", "content": [],
        }  # fmt: skip
        self._output.append(self._message)
        item = {**self._message, "content": []}
        added = {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": item}
        return [added, self._of_text("response.content_part.added", part=_text_part())]

    def _called(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        item = {
            "type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": call["id"], **call["function"],
            "status": "completed",
        }  # fmt: skip
        self._output.append(item)
        place = {"output_index": len(self._output) - 1}
        begun, place_of = item | {"arguments": "", "status": "in_progress"}, place | {"item_id": item["id"]}
        kind, arguments = "response.function_call_arguments", item["arguments"]
        return [
            {"type": "response.output_item.added", **place, "item": begun},
            {"type": f"{kind}.delta", **place_of, "delta": arguments},
            {"type": f"{kind}.done", **place_of, "name": item["name"], "arguments": arguments},
            {"type": "response.output_item.done", **place, "item": item},
        ]

    def _close(self) -> list[dict[str, Any]]:
        """End the message; an answer without a call has one, even if it is empty."""
        events = [] if self._output else self._begun()
        if (message := self._message) is None:
            return events
        part = _text_part("".join(self._texts), self._logprobs)
        message |= {"status": self._status, "content": [part]}
        text = {"text": part["text"], "logprobs": self._logprobs}
        events += [
            self._of_text("response.output_text.done", **text), self._of_text("response.content_part.done", part=part),
        ]  # fmt: skip
        done = {"type": "response.output_item.done", "output_index": self._output.index(message), "item": message}
        return [*events, done]

    def _of_text(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._message is not None
        place = {"item_id": self._message["id"], "output_index": self._output.index(self._message), "content_index": 0}
        return {"type": kind, **place, **fields}

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, calls: Sequence[Call] | None) -> dict[str, Any]:
        """calls: None while it is in progress."""
        body, status = self.body, "in_progress" if calls is None else self._status
        form = body.text and body.text.format
        choice = body.tool_choice
        return {
            "id": self.id, "object": "response", "created_at": self.chat.created, "status": status,
            "background": False, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self.chat.model,
            "output": list(self._output), "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "store": False, "temperature": body.temperature, "top_p": body.top_p,
            "text": {"format": {"type": "text"} if form is None else _dump(form)},
            "tool_choice": _dump(choice) if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [{"parameters": None, "strict": None} | _dump(tool) for tool in body.tools or ()],
            "truncation": "disabled", "metadata": body.metadata or {},
            "usage": None if calls is None else _usage(calls),
        }  # fmt: skip

    def _events(self, events: Any) -> bytes:
        parts = []
        for event in events:
            text = json.dumps(event | {"sequence_number": self._sent}, separators=(",", ":"))
            parts.append(f"event: {event['type']}\ndata: {text}\n\n".encode())
            self._sent += 1
        return b"".join(parts)


def _text_part(text: str = "", logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _usage(calls: Sequence[Call]) -> dict[str, Any]:
    counts = usage(calls)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }  # fmt: skip
