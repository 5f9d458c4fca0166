"""Models of the responses, for the OpenAPI document; `bodies.answers` builds them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorFacts(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Reply):
    """OpenAI's error object."""

    error: ErrorFacts


class Model(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Maximum number of tokens of a prompt and its answer together."""


class Models(Reply):
    object: Literal["list"]
    data: list[Model]


class CachedTokens(Reply):
    cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache."""


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Drafts(Reply):
    """Of all choices together, in order."""

    steps: int
    drafted: int
    accepted: int
    drafted_tokens: list[bool]
    """For each token of the answer, whether it was drafted."""
    pieces: list[tuple[str, bool]]
    """The text, split into drafted and other parts."""


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    outrider: Drafts | None = None


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Reply):
    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    """Null if there are only tool calls."""
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    outrider: Drafts | None = None


# ── responses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Reply):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""
    status: Literal["completed"]


class OutputTokens(Reply):
    reasoning_tokens: int


class InputTokens(CachedTokens):
    cache_write_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class Incomplete(Reply):
    reason: Literal["max_output_tokens"]


class Response(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    usage: ResponseUsage


class Event(BaseModel):
    """A server-sent event of a stream."""

    data: str


class Tokens(Reply):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizedText(Reply):
    prompt: str


class Health(Reply):
    status: Literal["ok", "degraded", "stopping", "failed"]
    """degraded: the drafter was switched off, and answers are decoded without drafts."""


Stats = dict[str, Any]
