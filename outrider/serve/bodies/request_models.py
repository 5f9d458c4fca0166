"""Request bodies: OpenAI's fields, those that vLLM adds, and Outrider's; any other field is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_STOPS, MAX_LOGPROBS, MAX_BIASES = 16, 20, 1024
MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0: logits divided by less would overflow."""

MOST = 2**31 - 1
"""Largest integer in any field."""

WHOLE = BeforeValidator(lambda value: int(value) if _is_whole(value) else value)
"""JSON may write an integer as 3.0."""
Positive = Annotated[int, Field(ge=1, le=MOST), WHOLE]
Natural = Annotated[int, Field(ge=0, le=MOST), WHOLE]
Ranks = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
Text = Annotated[str, StringConstraints(min_length=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""Short, since every step compares the end of a text with all prefixes of its stop strings."""


MOST_MESSAGES, MOST_TOOLS, MOST_PARTS = 4096, 512, 1024
"""Limit per request, since they take time to validate."""
MOST_KEYS = 64
"""Limit for an object with arbitrary keys, since each invalid one takes time."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _few(value: Any, most: int = MOST_KEYS) -> Any:
    if isinstance(value, dict) and len(value) > most:
        raise PydanticCustomError("too_many_keys", f"Input should have at most {most} keys")
    return value


def at_most(most: int) -> BeforeValidator:
    """Refuses a list that is too long before any of its items is validated."""

    def checked(value: Any) -> Any:
        if isinstance(value, list) and len(value) > most:
            raise PydanticCustomError("too_long", f"Input should have at most {most} items, and has {len(value)}")
        return value

    return BeforeValidator(checked)


class Body(BaseModel):
    """Base: strict about types and fields.  Lists fail at the first invalid item, since there could be millions."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, values: Any) -> Any:
        return _few(values)


# ── shared by completions and chats ───────────────────────────────────────────────────────────────────────────────────


CacheControl = Annotated[dict[str, Any], BeforeValidator(_few)] | None


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    """No effect: common prefixes are found automatically."""


Content = Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], at_most(MOST_PARTS)]


class StreamOptions(Body):
    include_usage: bool | None = None
    """End the stream with the token counts."""
    include_obfuscation: bool | None = None
    """No effect: chunks are never padded."""


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    """Schema of the answer."""
    strict: bool | None = None
    """No effect: answers always match the schema."""


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Prediction(Body):
    type: Literal["content"]
    content: Content


class Speculative(Body):
    depth: Annotated[int, Field(ge=0, le=1024), WHOLE] | None = None
    """Maximum number of tokens drafted in one step; 0 decodes without drafts."""
    drafter: Text | None = None
    """Which member of the server's `mix` drafts."""


class SharedBody(Body):
    """Fields of every request for a text."""

    model: str | None = None
    """The name in /v1/models; optional."""
    stream: bool | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    """The same seed gives the same text with any drafter."""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 is greedy; otherwise at least 0.01."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=MOST), WHOLE] | None = None
    """0 and -1 keep every token."""
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: (
        Annotated[
            dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
            BeforeValidator(lambda value: _few(value, MAX_BIASES)),
        ]
        | None
    ) = None
    """Token id → the number added to its logit."""
    min_tokens: Natural | None = None
    """End tokens are forbidden before this many tokens."""
    ignore_eos: bool | None = None
    """End tokens are forbidden until `max_tokens`."""
    prediction: Prediction | None = None
    """Text that the answer is likely to repeat: drafts are taken from it; the answer does not change."""
    speculative: bool | Speculative | None = None
    """false decodes without drafts."""
    parse_special: bool | None = None
    """Whether spelled-out special tokens become control tokens.  By default they do in prompts but not in messages."""
    timeout: float | None = Field(None, gt=0, le=86_400)
    """Seconds after which the request ends with 408."""
    store: bool | None = None
    """false: the drafter does not learn from this request.  true has no effect."""
    user: str | None = None
    """No effect, like the three fields below."""
    metadata: Annotated[dict[str, str], Field(max_length=MOST_KEYS), BeforeValidator(_few)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """No effect: common prefixes are found automatically."""
    prompt_cache_retention: str | None = None


class GenerationBody(SharedBody):
    """Fields of both completions and chats."""

    stream_options: StreamOptions | None = None
    n: Positive | None = None
    """Answers per prompt; the i-th uses `seed` + i."""
    max_tokens: Positive | None = None
    response_format: Format | None = None
    include_drafts: bool | None = None
    """Add `outrider` to the answer: steps, drafted and accepted tokens, and which tokens were drafted."""
    return_token_ids: bool | None = None


class CompletionRequest(GenerationBody):
    """Body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    """A text, token ids, or a list of texts or of token ids."""
    logprobs: Ranks | None = None
    """Return log probabilities of the tokens, and of this many most likely tokens at each position."""


# ── chats ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SystemMessage(Body):
    role: Literal["system"]
    content: Content
    name: str | None = None
    cache_control: CacheControl = None


class DeveloperMessage(Body):
    """OpenAI's newer name for a system message."""

    role: Literal["developer"]
    content: Content
    name: str | None = None
    cache_control: CacheControl = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None
    cache_control: CacheControl = None


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Natural | None = None


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), at_most(MOST_TOOLS)] | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = None
    audio: None = None
    function_call: None = None
    cache_control: CacheControl = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None
    cache_control: CacheControl = None


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Body):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl = None


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


Variables = Annotated[dict[str, str | float | bool], Field(max_length=MOST_KEYS), BeforeValidator(_few)]


class ChatRequest(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(MOST_TOOLS)] | None = None
    """Passed to the chat template."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """none: no tools are passed to the template.  required, or a function: the answer is one call."""
    parallel_tool_calls: bool | None = None
    """false: calls after the first are dropped."""
    logprobs: bool | None = None
    top_logprobs: Ranks | None = None
    max_completion_tokens: Positive | None = None
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template, such as enable_thinking."""


IDLE = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
"""Fields that are accepted but have no effect."""


def idle_fields(body: SharedBody) -> list[str]:
    """Fields that every body may have, and that have no effect in this one."""
    return [name for name in IDLE if getattr(body, name) is not None] + ["store"] * (body.store is True)


def ignored(body: CompletionRequest | ChatRequest) -> list[str]:
    """Fields of this body that have no effect; a response header lists them."""
    items = [*getattr(body, "messages", ()), *(getattr(body, "tools", None) or ())]
    parts = [part for item in items if isinstance(getattr(item, "content", None), list) for part in item.content]
    return idle_fields(body) + ["cache_control"] * any(item.cache_control is not None for item in [*items, *parts])


def offered_tools(body: Any) -> list[Tool]:
    """The tools that the model may call."""
    return [] if getattr(body, "tool_choice", None) == "none" else list(getattr(body, "tools", None) or ())


TextRequest = CompletionRequest | ChatRequest
"""A request that generates text."""


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenizeText(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    """true by default."""
    parse_special: bool | None = None
    """true by default, as in a completion."""


class TokenizeChat(Body):
    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(MOST_TOOLS)] | None = None
    chat_template_kwargs: Variables | None = None
    parse_special: bool | None = None
    """false by default, as in a chat."""


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
