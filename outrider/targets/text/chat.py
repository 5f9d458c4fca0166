"""Renders messages with a chat template, for prompts, training data, evaluations and the server alike.

Templates accept different forms, so messages and tools are normalised first: contents are texts, arguments of tools are
objects, nulls are removed.  The model then reads the same tokens in training and when served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.errors import DataError
from outrider.storage.json_text import parse_json
from outrider.targets.text.control import Encoded, chat_tokens, chat_with_answers
from outrider.targets.text.parts import text_of, without_nulls

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
UNSHOWN = ("weight",)
"""Fields of a message that concern training; they are not passed to templates."""
NULLS = ("default", "const", "example")
"""Keys of a JSON schema for which null is a value; elsewhere a null means that the field is missing."""


def rendered(
    tokenizer: Any, messages: Messages, tools: Tools = (), variables: Mapping[str, Any] | None = None, *,
    add_generation_prompt: bool, parse_special: bool = False, check: Callable[[str], None] = lambda text: None,
) -> list[int]:  # fmt: skip
    """Token ids of these messages; control tokens spelled out in them are text.

    variables: also passed to the template.  parse_special: control tokens spelled out in messages become control
    tokens.  check: called with the rendered text before it is encoded.  Raises DataError if the template refuses the
    messages; its cause is what the template or the check raised.
    """
    plain_messages, functions = [plain(message) for message in messages], [plain_tool(tool) for tool in tools]

    def tokens_of(chat: Messages) -> list[int]:
        return chat_tokens(
            tokenizer, chat, functions, variables=variables, parse_special=parse_special,
            add_generation_prompt=add_generation_prompt, check=check,
        )  # fmt: skip

    with _refusals():
        try:
            return tokens_of(plain_messages)
        except TypeError:  # such as DeepSeek's templates, which concatenate arguments with strings
            if not any(message.get("tool_calls") for message in plain_messages):
                raise
            return tokens_of([_with_texts(message) for message in plain_messages])


def marked(
    tokenizer: Any, messages: Messages, tools: Tools = (), variables: Mapping[str, Any] | None = None
) -> Encoded:
    """Token ids of these messages, and the spans that the template marks as generated.  Raises as `rendered`."""
    plain_messages, functions = [plain(message) for message in messages], [plain_tool(tool) for tool in tools]
    with _refusals():
        return chat_with_answers(tokenizer, plain_messages, functions, variables or {})


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a template is a program and may raise anything
        raise DataError(f"the target's chat template refuses these messages: {error}") from error


# ── plain ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that templates expect.  Raises DataError for a part that is not text."""
    fields = {key: value for key, value in message.items() if value is not None and key not in UNSHOWN}
    fields["content"] = text_of(message.get("content"))
    if fields.get("role") == "developer":  # OpenAI's newer word
        fields["role"] = "system"
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_call(one) for one in calls]
    return fields


def plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's definition, wrapped in `function` and without nulls from a table's other rows."""
    definition: dict[str, Any] = without_nulls(tool, NULLS)
    is_bare = "function" not in definition and "name" in definition
    return {"type": "function", "function": definition} if is_bare else definition


def _call(call: Any) -> Any:
    """A tool call, wrapped in `function`, with its arguments as an object if they are JSON."""
    if not isinstance(call, Mapping):
        return call
    fields = {key: value for key, value in call.items() if value is not None}
    if "function" not in fields and "name" in fields:
        inner = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
        fields["function"] = inner
    if isinstance(function := fields.get("function"), Mapping):
        fields["function"] = {**function, "arguments": _object(function.get("arguments"))}
    return {"type": "function", **fields}


def _object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as JSON strings."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else dict(message)
