"""Bodies of requests: OpenAI's fields, those that vLLM added, and our own; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from outrider.config import nearest
from outrider.serve.refusals import Refusal, invalid

MAX_STOPS, MAX_LOGPROBS, MAX_BIASES = 16, 20, 1024
MIN_TEMPERATURE = 0.01
"""Lowest temperature that is not greedy: logits divided by less overflow."""

MOST = 2**31 - 1
"""Highest number of anything."""

WHOLE = BeforeValidator(lambda value: int(value) if _is_whole(value) else value)
"""JSON may write an integer as 3.0."""
Positive = Annotated[int, Field(ge=1, le=MOST), WHOLE]
Natural = Annotated[int, Field(ge=0, le=MOST), WHOLE]
Ranks = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
Text = Annotated[str, StringConstraints(min_length=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""Every step compares the end of a text with all beginnings of its stop strings."""


MOST_KEYS = 64
"""Of an object with names of its own: each wrong one costs time."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _few(value: Any, most: int = MOST_KEYS) -> Any:
    if isinstance(value, dict) and len(value) > most:
        raise PydanticCustomError("too_many_keys", f"Input should have at most {most} keys")
    return value


class Body(BaseModel):
    """Base: strict about types and fields.  A list ends at its first wrong item, of which there could be millions."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, values: Any) -> Any:
        return _few(values)


# ── parts of both kinds of requests ───────────────────────────────────────────────────────────────────────────────────


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class StreamOptions(Body):
    include_usage: bool | None = None
    """End the stream with the number of tokens."""
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
    """What the answer fits."""
    strict: bool | None = None
    """No effect: answers always fit."""


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Prediction(Body):
    type: Literal["content"]
    content: Content


class Speculative(Body):
    depth: Annotated[int, Field(ge=0, le=1024), WHOLE] | None = None
    """Most tokens drafted in one step; 0 decodes plainly."""
    drafter: Text | None = None
    """Member of the server's `mix` that drafts."""


class Asked(Body):
    """What completions and chats have in common."""

    model: str | None = None
    """The name that /v1/models gives; may be left out."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    """Answers to each prompt; the i-th has `seed` + i."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    """Same seed, same text, whatever drafts for it."""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 is greedy; else at least 0.01."""
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
    """Token id to what is added to its logit."""
    max_tokens: Positive | None = None
    min_tokens: Natural | None = None
    """End tokens are impossible before."""
    ignore_eos: bool | None = None
    """End tokens are impossible until `max_tokens`."""
    response_format: Format | None = None
    prediction: Prediction | None = None
    """Text that the answer is likely to repeat: it is drafted from, and changes nothing else."""
    speculative: bool | Speculative | None = None
    """false decodes plainly."""
    include_drafts: bool | None = None
    """Answer with `outrider`: steps, drafted and accepted tokens, and which tokens were drafted."""
    return_token_ids: bool | None = None
    timeout: float | None = Field(None, gt=0, le=86_400)
    """Seconds after which the request ends with 408."""
    user: str | None = None
    """No effect, as the four below."""
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MOST_KEYS), BeforeValidator(_few)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """No effect: beginnings of prompts are shared where they are equal."""


class CompletionRequest(Asked):
    """Body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    """A text, token ids, or a list of texts or of token ids."""
    logprobs: Ranks | None = None
    """Log probabilities of the tokens, and of this many likeliest at each place."""


# ── chats ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SystemMessage(Body):
    role: Literal["system"]
    content: Content
    name: str | None = None


class DeveloperMessage(Body):
    """OpenAI's newer word for a system message."""

    role: Literal["developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


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
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


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


Variables = Annotated[dict[str, str | float | bool], Field(max_length=MOST_KEYS), BeforeValidator(_few)]


class ChatRequest(Asked):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    """Given to the chat template; what the model writes is returned as content."""
    tool_choice: Literal["none", "auto"] | None = None
    """none: the template is given no tools."""
    parallel_tool_calls: bool | None = None
    """No effect: the text is the model's."""
    logprobs: bool | None = None
    top_logprobs: Ranks | None = None
    max_completion_tokens: Positive | None = None
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template, such as enable_thinking."""


TextRequest = CompletionRequest | ChatRequest
"""A request for texts."""


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenizeText(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    """true unless given."""


class TokenizeChat(Body):
    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: Variables | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED: Mapping[str, tuple[Sequence[Any], str]] = {
    "audio": ((), "targets write text alone; leave it out"),
    "modalities": ((["text"],), "targets write text alone; leave it out"),
    "suffix": (("",), "no text is written between two others; leave it out"),
    "echo": ((False,), "the prompt is not part of the answer; leave it out, and put the prompt before it yourself"),
    "best_of": ((1,), "answers are not ranked; use n"),
    "use_beam_search": ((False,), "texts are drawn one by one; leave it out"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tools and tool_choice"),
    "chat_template": ((), "only the tokenizer's own template is rendered; leave it out"),
    "guided_json": ((), "use response_format"),
    "guided_regex": ((), "use response_format with a JSON schema that has a pattern"),
    "guided_choice": ((), "use response_format with a JSON schema that has an enum"),
    "guided_grammar": ((), "use response_format"),
    "structured_outputs": ((), "use response_format"),
    "stop_token_ids": (([],), "use stop"),
    "bad_words": (([],), "use logit_bias"),
    "prompt_logprobs": ((0,), "only tokens of the answer have log probabilities; leave it out"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "web_search_options": ((), "nothing is fetched for a request; leave it out"),
    "reasoning_effort": ((), "use chat_template_kwargs, if the model's template knows such a variable"),
    "verbosity": (("medium",), "ask for it in a message"),
    "length_penalty": ((1, 1.0), "there is no beam search; leave it out"),
    "include_stop_str_in_output": ((False,), "a text ends before its stop string; leave it out"),
    "skip_special_tokens": ((True,), "special tokens are never part of a text; leave it out"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of a text; leave it out"),
    "add_generation_prompt": ((True,), "the answer is a new message; leave it out"),
    "continue_final_message": ((False,), "the answer is a new message; leave it out"),
    "priority": ((0,), "requests are served by turns; leave it out"),
    "moderation": ((), "answers are not judged; leave it out"),
}  # fmt: skip
"""Known fields that would change the answer: values that do not, besides null, and what to do instead."""

WANTED: Mapping[str, str] = {
    "prompt": "a text, token ids, or a list of texts or of token ids",
    "stop": f"a text, or up to {MAX_STOPS} texts, each of 1 to 256 characters",
    "tool_choice": "none or auto: what the model writes is returned as text, so no tool can be forced",
    "speculative": "true, false, or an object with depth or drafter",
    "temperature": f"0 or a number from {MIN_TEMPERATURE} to 2",
    "chat_template_kwargs": "an object of texts, numbers, and true or false",
    "logit_bias": f"an object of at most {MAX_BIASES} token ids and numbers from -100 to 100",
    "content": "a text, or a list of parts of type text",
}
"""What a field of several types may be, in words."""

B = TypeVar("B", bound=BaseModel)


def read(text: bytes, what: str = "the body") -> Any:
    """The JSON of a body.  Raises Refusal where it is none, is nested too deeply, or holds NaN or half a surrogate."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"{what} is not JSON: {error}; send one JSON object in UTF-8", code="invalid_json") from None


def parse(schema: type[B], values: Any) -> B:
    """A body, checked.  Raises Refusal, which names the field, what was given, and what is wanted."""
    if not isinstance(values, dict):
        raise invalid(f"the body is {_shown(values)}; send one JSON object")
    given = _few_fields(schema, values)
    for name in [name for name in given if name in REFUSED and name not in schema.model_fields]:
        neutral, advice = REFUSED[name]
        value = given.pop(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise invalid(f"{name} is not supported: {advice}", name, "unsupported_field")
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _refusal(schema, given, error) from None


def _few_fields(schema: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    if len(values) > MOST_KEYS + len(REFUSED):
        raise invalid(f"the body has {len(values)} fields, more than there are; leave out all but {_known(schema)}")
    return dict(values)


def _known(schema: type[BaseModel]) -> str:
    return ", ".join(sorted(schema.model_fields))


def _refusal(schema: type[BaseModel], given: dict[str, Any], error: ValidationError) -> Refusal:
    problems = error.errors(include_url=False)
    problem = max(problems, key=lambda one: (one["type"] == "extra_forbidden", len(_path(one, given))))
    path = _path(problem, given)
    name = ".".join(map(str, path))
    if problem["type"] == "extra_forbidden":
        key = str(problem["loc"][-1])
        if len(path) == 1:
            known = [field.alias or name for name, field in schema.model_fields.items()]
            return invalid(f"unknown field {_shown(key)}{nearest(key, known)}", key, "unknown_field")
        if _is_medium(problem, given):
            return _no_media(name)
        return invalid(f"unknown field {_shown(name)}; leave it out", name, "unknown_field")
    if problem["type"] == "missing":
        return invalid(f"{name} is missing; add it", name, "missing_field")
    if _is_medium(problem, given):
        return _no_media(name)
    field = next((n for n in reversed(range(len(path))) if path[n] in WANTED), None)
    if field is not None:
        name, reason = ".".join(map(str, path[: field + 1])), f"must be {WANTED[str(path[field])]}"
    else:
        reason = _reason(problem)
    return invalid(f"{name} {reason} (given: {_shown(problem['input'])})", name or None, "invalid_value")


def _reason(problem: Any) -> str:
    context = problem.get("ctx") or {}
    match problem["type"]:
        case "union_tag_invalid" | "union_tag_not_found":
            tags = context.get("expected_tags", "")
            return f"must have a {context['discriminator']}" + (f" of {tags}" if tags else "")
        case "too_short":
            return f"must have at least {context['min_length']} item"
    return str(problem["msg"]).replace("Input should", "must", 1)


def _path(problem: Any, given: Any) -> list[str | int]:
    """Where in the body a problem is: pydantic's place without its names of types."""
    path: list[str | int] = []
    for part in problem["loc"]:
        if _has(given, part):
            given = given[part]
            path.append(part)
    if problem["type"] == "missing":
        path.append(problem["loc"][-1])
    return path


def _has(given: Any, part: str | int) -> bool:
    if isinstance(given, list):
        return isinstance(part, int) and part < len(given)
    return isinstance(given, dict) and part in given


def _is_medium(problem: Any, given: Any) -> bool:
    """Whether the problem lies in a part of a message that is no text."""
    for before, part in pairwise(["", *_path(problem, given)]):
        if not _has(given, part):
            return False
        given = given[part]
        if before == "content" and isinstance(given, dict):
            return isinstance(given.get("type"), str) and given["type"] != "text"
    return False


def _no_media(name: str) -> Refusal:
    return invalid(
        f"{name} is no text, and targets read text alone; nothing is fetched for a request: give parts of type text",
        name, "unsupported_content",
    )  # fmt: skip


def _shown(value: Any) -> str:
    """A value as a client sent it, in one line at most."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of many digits"
    if isinstance(value, dict | list):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
