"""Messages of a conversation, under the names that data sets and servers give their fields."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from outrider.errors import DataError
from outrider.storage.json_text import parse_json
from outrider.targets.text.parts import text_of

Message = dict[str, Any]
"""`role`, `content` (a text) and any of EXTRAS; `weight` 0 if it is not trained on."""
Tool = dict[str, Any]
"""The definition of a tool, in the format of OpenAI's `tools` and chat templates."""
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "assistant": "assistant", "model": "assistant", "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
ANSWERERS = tuple(name for name, role in ROLES.items() if role == "assistant")
CALLERS = ("function_call", "tool_call")
"""Roles whose text is a tool call, or a list of them, as JSON."""
EXTRAS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Other fields of a message that a chat template may use."""
TEXTS = ("tool_call_id", "name", "reasoning_content", "thinking")
"""Those of EXTRAS whose values are text."""
TRAINS = ("weight", "train", "training", "loss")
"""Fields that say whether a message is trained on: OpenAI's and Mistral's, then Axolotl's two, then ms-swift's."""
IDLE = ("id", "index", "type", "object", "created", "refusal", "annotations", "audio", "status")
"""Fields of a message that are ignored, since they are not part of its text."""
SKIP = "skip such rows with --skip-bad"


class Fields:
    """A mapping that tracks which fields were read; null, empty texts and empty lists count as missing."""

    def __init__(self, row: Mapping[str, Any], read: Iterable[str] = ()):
        self.row, self.used = row, set(read)

    def first(self, *keys: str) -> tuple[str, Any]:
        """The first of these fields that is set, and its value."""
        key = next((key for key in keys if self.row.get(key) not in (None, "", [], {})), "")
        self.used.add(key)
        return key, self.row.get(key) if key else None

    def text(self, *keys: str) -> str:
        """The first of these fields that is set; empty if none is.  Raises TypeError if it is not text."""
        key, text = self.first(*keys)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{key} must be text, got {text!r:.80}; put a list of messages under `messages`")
        return text or ""

    def left(self) -> list[str]:
        """Fields that are set and were not read."""
        return [key for key in map(str, self.row) if key not in self.used and self.first(key)[1] is not None]


class MessageReader:
    """Reads messages and collects the names of their unknown fields."""

    def __init__(self) -> None:
        self.unread: list[str] = []

    def message(self, message: Any, name: str) -> Message:
        """Like `message_of`; unknown fields are recorded."""
        if isinstance(message, Mapping):
            fields = {"role", "from", "content", "value", *EXTRAS, *TRAINS, *IDLE, "reasoning", "function_call"}
            self.unread += [f"messages[].{key}" for key in Fields(message, fields).left()]
        return message_of(message, name)


def decoded(value: Any) -> Any:
    """The list or object that a text spells as JSON, as in data sets with one type per column; else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return parse_json(value)
    return value


def message_of(message: Any, name: str) -> Message:
    """One message with its role's standard name and its content as text.

    Text parts are joined as the server joins them; null content becomes empty if the message calls tools or thinks.
    """
    fields = message if isinstance(message, Mapping) else {}
    role, content = _only(fields, name, "role", "from"), _only(fields, name, "content", "value")
    extras = {key: fields[key] for key in EXTRAS if fields.get(key) not in (None, [], "")}
    if thoughts := fields.get("reasoning"):  # vLLM's newer name
        extras.setdefault("reasoning_content", thoughts)
    for key in extras.keys() & set(TEXTS):
        if not isinstance(extras[key], str):
            raise DataError(f"{name}: {key} of a message must be text, got {extras[key]!r:.80}; {SKIP}")
    if called := fields.get("function_call"):  # OpenAI's older name
        called = _calls(called, name)[0] if isinstance(called, str) else called
        if not isinstance(called, Mapping):
            raise DataError(f"{name}: function_call must have a name and arguments, got {called!r:.80}; {SKIP}")
        extras.setdefault("tool_calls", [{"type": "function", "function": dict(called)}])
    if role in CALLERS and isinstance(content, str):
        extras["tool_calls"], content = _calls(content, name), ""
    if isinstance(calls := extras.get("tool_calls"), str):
        extras["tool_calls"] = _calls(calls, name)
    elif calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise DataError(f"{name}: tool_calls must be a list of calls, got {calls!r:.80}; {SKIP}")
    if isinstance(content, list):
        content = joined(content, name)
    if content is None and extras.keys() & {"tool_calls", "reasoning_content", "thinking"}:
        content = ""
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        roles = ", ".join(sorted(set(ROLES.values())))
        raise DataError(f"{name}: a message needs a role ({roles}) and text as content, got {message!r:.80}")
    return {"role": ROLES[role], "content": content, **extras, **_weight(fields, ROLES[role], name)}


def filled(fields: Mapping[str, Any], *keys: str) -> Any:
    return next((fields[key] for key in keys if fields.get(key) not in (None, "")), None)


def _only(fields: Mapping[str, Any], name: str, key: str, other: str) -> Any:
    """The value of a field that has two names.  Raises DataError if both are set and differ."""
    values = [fields[each] for each in (key, other) if fields.get(each) is not None]
    filled = [value for value in values if value != ""] or values
    roles = [ROLES.get(value, value) if key == "role" and isinstance(value, str) else value for value in filled]
    if len(roles) == 2 and roles[0] != roles[1]:
        raise DataError(f"{name}: a message has {key} {filled[0]!r:.40} and {other} {filled[1]!r:.40}; leave one out")
    return filled[0] if filled else None


def _weight(fields: Mapping[str, Any], role: str, name: str) -> dict[str, int]:
    """`weight` 0 for an answer that is only context."""
    weights = {key: fields[key] for key in TRAINS if fields.get(key) is not None} if role == "assistant" else {}
    for key, value in weights.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{name}: the {key} of a message must be 0 or 1, got {value!r:.80}; {SKIP}")
    return {"weight": 0} if 0 in weights.values() else {}


def _calls(text: str, name: str) -> list[dict[str, Any]]:
    """Tool calls written as JSON: one, or a list."""
    try:
        calls = parse_json(text)
    except ValueError:
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{name}: a tool call must be JSON with a name and arguments, got {text!r:.80}; {SKIP}")
    return calls


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield str(key)
            yield from texts_of(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from texts_of(member)


def joined(parts: Any, name: str) -> str:
    """The joined text of a list of parts."""
    try:
        return text_of(parts)
    except DataError as error:
        raise DataError(f"{name}: {error}; {SKIP}") from None
