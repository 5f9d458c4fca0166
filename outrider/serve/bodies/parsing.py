"""Parses and validates request bodies; a refusal names the field, what was given and what is expected."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from outrider.config import nearest, once
from outrider.serve.bodies.refusals import Refusal, invalid
from outrider.serve.bodies.request_models import MAX_BIASES, MAX_STOPS, MIN_TEMPERATURE, MOST_KEYS

REFUSED: Mapping[str, tuple[Sequence[Any], str]] = {
    "audio": ((), "targets generate only text; leave it out"),
    "modalities": ((["text"],), "targets generate only text; leave it out"),
    "suffix": (("",), "infilling is not supported; leave it out"),
    "echo": ((False,), "the prompt is not part of the answer; leave it out, and put the prompt before it yourself"),
    "best_of": ((1,), "answers are not ranked; use n"),
    "use_beam_search": ((False,), "beam search is not supported; leave it out"),
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
    "reasoning": ((), "use chat_template_kwargs, if the model's template knows such a variable"),
    "thinking": ((), "use chat_template_kwargs, if the model's template knows such a variable"),
    "verbosity": (("medium",), "ask for it in a message"),
    "length_penalty": ((1, 1.0), "beam search is not supported; leave it out"),
    "include_stop_str_in_output": ((False,), "a text ends before its stop string; leave it out"),
    "skip_special_tokens": ((True,), "special tokens are never part of a text; leave it out"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of a text; leave it out"),
    "add_generation_prompt": ((True,), "the answer is a new message; leave it out"),
    "continue_final_message": ((False,), "the answer is a new message; leave it out"),
    "priority": ((0,), "requests are scheduled round-robin by API key; leave it out"),
    "moderation": ((), "answers are not moderated; leave it out"),
    "previous_response_id": ((), "nothing is stored; send the whole conversation as input"),
    "conversation": ((), "nothing is stored; send the whole conversation as input"),
    "context_management": ((), "nothing is stored; send the conversation that you want to be read as input"),
    "background": ((False,), "an answer is sent on the connection that requested it; leave it out"),
    "truncation": (("disabled",), "shorten the input yourself"),
    "max_tool_calls": ((), "the only tools are functions, which you call yourself; leave it out"),
}  # fmt: skip
"""Unsupported fields of other servers: the values that are accepted because they have no effect (besides null), and
what to use instead."""

MOST_PARTS = 40_000
"""Maximum number of lists, objects and keys of objects in a body."""
MOST_VALUES = 300_000
"""Maximum number of values in a body, such as the token ids of all its prompts."""
MARKS = (b"[", b"{", b":")
OUTSIDE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^"]{1,65536}', re.DOTALL)
"""Matches a string of a body, or the text between two strings."""

EXPECTED: Mapping[str, str] = {
    "prompt": "a text, token ids, or a list of texts or of token ids",
    "stop": f"a text, or up to {MAX_STOPS} texts, each of 1 to 256 characters",
    "tool_choice": "none, auto, required, or a tool by its name",
    "speculative": "true, false, or an object with depth or drafter",
    "temperature": f"0 or a number from {MIN_TEMPERATURE} to 2",
    "chat_template_kwargs": "an object of texts, numbers, and true or false",
    "logit_bias": f"an object of at most {MAX_BIASES} token ids and numbers from -100 to 100",
    "content": "a text, or a list of parts of type text",
}
"""Descriptions of the fields that accept several types."""

B = TypeVar("B", bound=BaseModel)


def read(text: bytes, what: str = "the body") -> Any:
    """The JSON of a body.  Raises Refusal if it is not valid JSON, is nested too deeply, has NaN or half a surrogate,
    has a key twice (parsers differ in which one counts), or more values than any request needs, since each takes
    time."""
    if len(text) > MOST_PARTS and not _has_few_values(text):
        most = f"{MOST_PARTS} lists, objects and keys, or {MOST_VALUES} values"
        raise invalid(f"{what} has more than {most}; send less in one request", code="too_many_values")
    try:
        values = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"{what} is not JSON: {error}; send one JSON object in UTF-8", code="invalid_json") from None
    try:
        json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{what} is refused: {error}; leave one out", code="invalid_json") from None
    return values


def _has_few_values(text: bytes) -> bool:
    """Whether a body has at most MOST_PARTS and MOST_VALUES, without parsing it; punctuation inside strings doesn't
    count."""
    if sum(map(text.count, MARKS)) <= MOST_PARTS and text.count(b",") <= MOST_VALUES:
        return True
    parts = values = 0
    for match in OUTSIDE.finditer(text):  # in pieces, so that other threads get the interpreter lock in between
        if (piece := match[0]).startswith(b'"'):
            continue
        parts, values = parts + sum(map(piece.count, MARKS)), values + piece.count(b",")
        if parts > MOST_PARTS or values > MOST_VALUES:
            return False
    return True


def parse(schema: type[B], values: Any) -> B:
    """A validated body.  Raises Refusal, which names the field, what was given and what is expected."""
    if not isinstance(values, dict):
        raise invalid(f"the body is {_shown(values)}; send one JSON object")
    if len(values) > MOST_KEYS + len(REFUSED):
        supported = ", ".join(sorted(schema.model_fields))
        raise invalid(f"the body has {len(values)} fields, more than are supported; leave out all but {supported}")
    fields = dict(values)
    for name in [name for name in fields if name in REFUSED and name not in schema.model_fields]:
        neutral, advice = REFUSED[name]
        value = fields.pop(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise invalid(f"{name} is not supported: {advice}", name, "unsupported_field")
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _refusal(schema, fields, error) from None


def _refusal(schema: type[BaseModel], body: dict[str, Any], error: ValidationError) -> Refusal:
    problems = error.errors(include_url=False)
    problem = max(problems, key=lambda one: (one["type"] == "extra_forbidden", len(_path(one, body))))
    path = _path(problem, body)
    name = ".".join(map(str, path))
    if problem["type"] == "extra_forbidden":
        key = str(problem["loc"][-1])
        if len(path) == 1:
            names = [field.alias or name for name, field in schema.model_fields.items()]
            return invalid(f"unknown field {_shown(key)}{nearest(key, names)}", key, "unknown_field")
        if _is_medium(problem, body):
            return _no_media(name)
        return invalid(f"unknown field {_shown(name)}; leave it out", name, "unknown_field")
    if problem["type"] == "missing":
        return invalid(f"{name} is missing; add it", name, "missing_field")
    if _is_medium(problem, body):
        return _no_media(name)
    field = next((n for n in reversed(range(len(path))) if path[n] in EXPECTED), None)
    if field is not None:
        name, reason = ".".join(map(str, path[: field + 1])), f"must be {EXPECTED[str(path[field])]}"
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


def _path(problem: Any, value: Any) -> list[str | int]:
    """Where in the body a problem is: pydantic's location without the type names."""
    path: list[str | int] = []
    for part in problem["loc"]:
        if _has(value, part):
            value = value[part]
            path.append(part)
    if problem["type"] == "missing":
        path.append(problem["loc"][-1])
    return path


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _is_medium(problem: Any, value: Any) -> bool:
    """Whether the problem is in a part of a message that is not text, such as an image."""
    for before, part in pairwise(["", *_path(problem, value)]):
        if not _has(value, part):
            return False
        value = value[part]
        if before == "content" and isinstance(value, dict):
            return isinstance(value.get("type"), str) and value["type"] != "text"
    return False


def _no_media(name: str) -> Refusal:
    return invalid(
        f"{name} is not text, and targets read only text; nothing is fetched for a request: send parts of type text",
        name, "unsupported_content",
    )  # fmt: skip


def _shown(value: Any) -> str:
    """A value as the client sent it, shortened to one line."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number with too many digits"
    if isinstance(value, dict | list):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
