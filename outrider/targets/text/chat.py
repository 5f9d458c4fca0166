"""Messages through a chat template: the one place where prompts, training data, evaluations and the server render them.

Templates differ in what they take, so messages and tools are made plain first: contents are texts, arguments of tools
are objects, what is null is left out.  What the model reads in training is then what it reads when it is served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.errors import DataError
from outrider.targets.text.control import Encoded, chat_tokens, chat_with_answers
from outrider.targets.text.parts import text_of, without_nulls

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
UNSHOWN = ("weight",)
"""Fields of a message that say what trains, and that no template gets."""
NULLS = ("default", "const", "example")
"""Keys of a JSON schema under which null is a value; elsewhere it is how tables write that there is none."""


def rendered(
    tokenizer: Any, messages: Messages, tools: Tools = (), variables: Mapping[str, Any] | None = None, *,
    add_generation_prompt: bool, parse_special: bool = False,
) -> list[int]:  # fmt: skip
    """Token ids of these messages; what they spell is text, and no control token.

    variables: what the template is handed beside them.  parse_special: control tokens that messages spell are control
    tokens.  Raises DataError where the template refuses them.
    """
    rendered_messages, functions = [plain(message) for message in messages], [plain_tool(tool) for tool in tools]

    def drawn(rendered_messages: Messages) -> list[int]:
        return chat_tokens(
            tokenizer, rendered_messages, functions, variables=variables, parse_special=parse_special,
            add_generation_prompt=add_generation_prompt,
        )  # fmt: skip

    with _refusals():
        try:
            return drawn(rendered_messages)
        except TypeError:  # such as DeepSeek's templates, which add arguments to a text
            if not any(message.get("tool_calls") for message in rendered_messages):
                raise
            return drawn([_with_texts(message) for message in rendered_messages])


def marked(
    tokenizer: Any, messages: Messages, tools: Tools = (), variables: Mapping[str, Any] | None = None
) -> Encoded:
    """Token ids of these messages, and spans of the text that the template marks as generated.  Raises as
    `rendered`."""
    plain_messages, functions = [plain(message) for message in messages], [plain_tool(tool) for tool in tools]
    with _refusals():
        return chat_with_answers(tokenizer, plain_messages, functions, variables or {})


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a template is a program, and raises what it likes
        raise DataError(f"the target's chat template refuses these messages: {error}") from error


# ── plain ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates know it.  Raises DataError for a part that is not text."""
    fields = {key: value for key, value in message.items() if value is not None and key not in UNSHOWN}
    fields["content"] = text_of(message.get("content"))
    if fields.get("role") == "developer":  # OpenAI's newer word
        fields["role"] = "system"
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_call(one) for one in calls]
    return fields


def plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's definition with its `function` around it, and without what a table's other rows have."""
    definition: dict[str, Any] = without_nulls(tool, NULLS)
    return (
        definition
        if "function" in definition or "name" not in definition
        else {"type": "function", "function": definition}
    )


def _call(call: Any) -> Any:
    """A call of a tool with its `function` around it, whose arguments are an object where they are JSON."""
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
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as texts of JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else dict(message)
