"""The messages of a row: of data sets, of logs of requests, of Batch files.

A row has one of `messages`, `conversations` (ShareGPT), `turns`, `prompt` (with `response`), `instruction` (with
`input` and `output`), `question`, `text`; beside them a `system` text, earlier turns (`history`) and `tools`.  Or it is
a request to an OpenAI-compatible server (`body`, `request`) with its answer, if it has one (`response`), as OpenAI's
Batch files, proxies' logs and `outrider serve` write them.  What no layout knows is named, so that nothing is lost
unseen.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from outrider.errors import DataError
from outrider.targets.text.parts import text_of

Message = dict[str, Any]
"""`role` and `content` (a text), and those of EXTRAS that it has; `weight` 0 where it does not train."""
Tool = dict[str, Any]
"""The definition of a tool, as OpenAI's `tools` and chat templates have it."""
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "assistant": "assistant", "model": "assistant", "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
CALLERS = ("function_call", "tool_call")
"""Roles whose text is a call of a tool, or a list of them, as JSON."""
EXTRAS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""What else a chat template may use of a message."""
TRAINS = ("weight", "train", "training", "loss")
"""How a message says whether it trains: OpenAI's and Mistral's word, then Axolotl's two, then ms-swift's."""
IDLE = ("id", "index", "type", "object", "created", "refusal", "annotations", "audio", "status")
"""Fields of a message that are no text of it."""
SYSTEMS = ("system", "system_prompt", "system_message")
QUESTIONS = ("prompt", "instruction", "question", "query", "text", "input")
CONTEXTS = ("input", "context")
ANSWERS = ("response", "completion", "output", "chosen")
SETTINGS = {
    "model", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "user", "store",
    "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls", "metadata",
    "service_tier", "timeout", "prediction", "include_drafts", "return_token_ids", "speculative", "echo", "best_of",
}  # fmt: skip
"""Fields of a request that its prompt does not depend on."""
SKIP = "skip such rows with --skip-bad"


class Reading(NamedTuple):
    """A row as it was read."""

    messages: list[Message]
    tools: tuple[Tool, ...]
    unread: tuple[str, ...] = ()
    """Fields that are filled in and that were not read, those of messages as `messages[].NAME`."""


class Fields:
    """A mapping, and which of its fields were read; null, empty texts and empty lists count as missing."""

    def __init__(self, row: Mapping[str, Any], read: Iterable[str] = ()):
        self.row, self.used = row, set(read)

    def first(self, *keys: str) -> tuple[str, Any]:
        """The first of these fields that is filled in, and its value."""
        key = next((key for key in keys if self.row.get(key) not in (None, "", [], {})), "")
        self.used.add(key)
        return key, self.row.get(key) if key else None

    def text(self, *keys: str) -> str:
        """The first that is filled in; empty where none is.  Raises TypeError for one that is not text."""
        key, text = self.first(*keys)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{key} must be text, got {text!r:.80}; put a list of messages under `messages`")
        return text or ""

    def left(self) -> list[str]:
        """Fields that are filled in and were not read."""
        return [key for key in map(str, self.row) if key not in self.used and self.first(key)[1] is not None]


def read_row(row: Mapping[str, Any], name: str) -> Reading:
    """A row in any of the layouts.  `name`: file and line, for errors.  Raises DataError for one of no known layout."""
    if (request := _request(row, name)) is not None:
        fields, unread = Fields(request, SETTINGS), Counted()
        messages = _asked(fields, row, name, unread)
        tools = _tools(fields, name)
        return Reading(messages, tools, (*_not_said(fields, messages, "body."), *unread.names))
    fields, unread = Fields(row), Counted()
    try:
        messages = _with_system(fields, [*_history(fields, name, unread), *_said(fields, name, unread)], name)
    except TypeError as error:
        raise DataError(f"{name}: {error}") from None
    tools = _tools(fields, name)
    return Reading(messages, tools, (*_not_said(fields, messages), *unread.names))


def with_system(request: Mapping[str, Any], name: str = "the request") -> dict[str, Any]:
    """A request with the system text that stands beside its messages as the first of them."""
    if not request.get("messages") or not any(request.get(key) for key in SYSTEMS):
        return dict(request)
    fields = Fields(request)
    messages = _with_system(fields, list(request["messages"]), name)
    return {key: value for key, value in request.items() if key not in SYSTEMS} | {"messages": messages}


class Counted:
    """Names of messages' fields that were not read."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def message(self, message: Any, name: str) -> list[Message]:
        """`message_of`, and a note of what else the message has."""
        if isinstance(message, Mapping):
            known = {"role", "from", "content", "value", *EXTRAS, *TRAINS, *IDLE, "reasoning", "function_call"}
            self.names += [f"messages[].{key}" for key in Fields(message, known).left()]
        return [message_of(message, name)]


def _said(fields: Fields, name: str, unread: Counted) -> list[Message]:
    """The conversation of a row of a data set."""
    key, given = fields.first("messages", "conversations", "turns")
    if key == "turns":
        if not (isinstance(given, list) and all(isinstance(turn, str) for turn in given)):
            raise DataError(f"{name}: turns must be a list of texts, got {given!r:.80}")
        return [{"role": "user", "content": turn} for turn in given]
    if key and not isinstance(given, list):
        raise DataError(f"{name}: messages or conversations must be a list of messages, got {given!r:.80}")
    if not key:  # TRL's: what is asked, and what is answered, are lists of messages
        given = [one for key in ("prompt", *ANSWERS) for one in _messages_under(fields, key)]
    if given:
        return [made for one in given for made in unread.message(one, name)]
    key, asked = fields.first(*QUESTIONS)
    if not isinstance(asked, str):
        fields.text(key)  # says that it is none
        keys = ", ".join(map(str, fields.row)) or "none"
        wanted = "messages, conversations, turns, prompt, instruction, question or text"
        raise DataError(f"{name}: a row needs a non-empty {wanted}; got keys: {keys}")
    shown = [] if key == "prompt" else [fields.text(one) for one in CONTEXTS if one not in fields.used]
    content = "\n\n### Input:\n".join([asked, *filter(None, shown)])
    answer = fields.text(*ANSWERS, *(("answer",) if key in ("question", "query") else ()))
    said = [{"role": "user", "content": content}]
    return [*said, {"role": "assistant", "content": answer}] if answer else said


def _messages_under(fields: Fields, key: str) -> list[Any]:
    given = fields.row.get(key)
    is_chat = isinstance(given, list) and given and all(isinstance(one, Mapping) for one in given)
    if is_chat and not (key != "prompt" and fields.used & set(ANSWERS)):
        fields.used.add(key)
        return list(given)  # type: ignore[arg-type]
    return []


def _history(fields: Fields, name: str, unread: Counted) -> list[Message]:
    """Earlier turns beside a row: pairs of question and answer, as Alpaca's rows have them, or messages."""
    _, given = fields.first("history")
    found: list[Message] = []
    for one in given if isinstance(given, list) else [given] if given is not None else []:
        if isinstance(one, Mapping):
            found += unread.message(one, name)
        elif isinstance(one, list | tuple) and len(one) == 2 and all(isinstance(text, str) for text in one):
            found += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), one, strict=True)]
        else:
            raise DataError(f"{name}: history must be a list of pairs [question, answer], got {one!r:.80}; {SKIP}")
    return found


def _with_system(fields: Fields, messages: list[Message], name: str) -> list[Message]:
    """The messages with the system text that stands beside them.  Raises DataError where they have another one."""
    key, given = fields.first(*SYSTEMS)
    system = _joined(given, name) if isinstance(given, list) else given
    if system is None:
        return messages
    if not isinstance(system, str):
        raise DataError(f"{name}: {key} must be text, got {given!r:.80}; {SKIP}")
    own = [message.get("content") for message in messages if message["role"] == "system"]
    if own and own != [system]:
        raise DataError(f"{name}: the messages have a system text, and {key} is another one; leave one out, or {SKIP}")
    return messages if own or not system.strip() else [{"role": "system", "content": system}, *messages]


def _not_said(fields: Fields, messages: Sequence[Message], place: str = "") -> list[str]:
    """Fields that were not read, without texts that are those of a message."""
    said = {message["content"].strip() for message in messages}
    left = ((key, fields.row.get(key)) for key in fields.left())
    return [place + key for key, value in left if not (isinstance(value, str) and value.strip() in said)]


def _tools(fields: Fields, name: str) -> tuple[Tool, ...]:
    """The tools that a request or a row offers the model; none where its `tool_choice` is none.

    Raises DataError for what are no definitions.
    """
    key, given = fields.first("tools", "functions")
    if isinstance(given, str):  # data sets with one type a column
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    fields.used.add("tool_choice")
    if not given or fields.row.get("tool_choice") == "none":
        return ()
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise DataError(f"{name}: tools must be a list of definitions, got {given!r:.80}; {SKIP}")
    if key == "functions":  # OpenAI's older word
        return tuple({"type": "function", "function": one} for one in given)
    return tuple(dict(one) for one in given)


def message_of(message: Any, name: str) -> Message:
    """One message with its role's usual name and its content as a text.

    Parts of text are joined as the server joins them; content that is null is empty where the message calls tools or
    thinks.
    """
    fields = message if isinstance(message, Mapping) else {}
    role = _filled(fields, "role", "from")
    content = next((fields[key] for key in ("content", "value") if fields.get(key) is not None), None)
    extras = {key: fields[key] for key in EXTRAS if fields.get(key) not in (None, [], "")}
    if isinstance(thoughts := fields.get("reasoning"), str) and thoughts:  # vLLM's newer word
        extras.setdefault("reasoning_content", thoughts)
    if isinstance(called := fields.get("function_call"), Mapping):  # OpenAI's older word
        extras.setdefault("tool_calls", [{"type": "function", "function": dict(called)}])
    if role in CALLERS and isinstance(content, str):
        extras["tool_calls"], content = _calls(content, name), ""
    if isinstance(calls := extras.get("tool_calls"), str):
        extras["tool_calls"] = _calls(calls, name)
    elif calls is not None and not (isinstance(calls, list) and all(isinstance(one, Mapping) for one in calls)):
        raise DataError(f"{name}: tool_calls must be a list of calls, got {calls!r:.80}; {SKIP}")
    if isinstance(content, list):
        content = _joined(content, name)
    if content is None and extras.keys() & {"tool_calls", "reasoning_content", "thinking"}:
        content = ""
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        roles = ", ".join(sorted(set(ROLES.values())))
        raise DataError(f"{name}: a message needs a role ({roles}) and text as content, got {message!r:.80}")
    return {"role": ROLES[role], "content": content, **extras, **_weight(fields, ROLES[role], name)}


def _filled(fields: Mapping[str, Any], *keys: str) -> Any:
    return next((fields[key] for key in keys if fields.get(key) not in (None, "")), None)


def _weight(fields: Mapping[str, Any], role: str, name: str) -> dict[str, int]:
    """`weight` 0 for an answer that is there for its context alone."""
    given = {key: fields[key] for key in TRAINS if fields.get(key) is not None} if role == "assistant" else {}
    for key, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{name}: the {key} of a message must be 0 or 1, got {value!r:.80}; {SKIP}")
    return {"weight": 0} if 0 in given.values() else {}


def _calls(text: str, name: str) -> list[dict[str, Any]]:
    """Calls of tools that are written as JSON: one, or a list."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(f"{name}: a call of a tool must be JSON with its name and arguments, got {text!r:.80}; {SKIP}")
    return found


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from texts_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_of(one)


def _joined(parts: Any, name: str) -> str:
    """The text of a list of parts."""
    try:
        return text_of(parts)
    except DataError as error:
        raise DataError(f"{name}: {error}; {SKIP}") from None


# ── requests and their answers ────────────────────────────────────────────────────────────────────────────────────────


def _request(row: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The body of the request that a row is about; None for a row that is no request."""
    if "hash_ids" in row or "input_length" in row:
        raise DataError(
            f"{name}: this log has lengths and no texts, but `outrider prepare` needs texts; name a log that has them "
            "(`outrider replay` can use this one)"
        )
    asked = row.get("request", row.get("body"))
    if isinstance(asked, str):  # proxies that log the body as it came
        with suppress(ValueError):
            asked = json.loads(asked)
    if isinstance(asked, Mapping):
        body: Any = asked.get("body", asked)
        return body if isinstance(body, Mapping) else None
    if "custom_id" in row:
        problem = f"{name}: the output of a Batch does not say what was asked"
        raise DataError(f"{problem}; give its input as the source's path, and this file as its answers")
    return None


def _asked(fields: Fields, row: Mapping[str, Any], name: str, unread: Counted) -> list[Message]:
    """What a request asks, and the answer where the row has it."""
    key, given = fields.first("messages", "prompt")
    if key == "prompt" and isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(one, Mapping) for one in given):
        wanted = "the request's messages must be a list, or its prompt a text"
        raise DataError(f"{name}: {wanted}, got {given!r:.80}; {SKIP}")
    if any(isinstance(one.get("content"), Mapping) for one in given):
        raise DataError(f"{name}: this log is redacted, its texts are gone; give a log with texts")
    messages = _with_system(fields, [made for one in given for made in unread.message(one, name)], name)
    if messages[-1]["role"] != "assistant" and (answer := answer_of(row, name)) is not None:
        messages.append(answer)
    return messages


def answer_of(row: Mapping[str, Any], name: str) -> Message | None:
    """The answer in a row of a log, or of a Batch's output; None where there is none, or where the request failed."""
    answered, meta = row.get("response"), row.get("meta")
    status = answered.get("status_code") if isinstance(answered, Mapping) else None
    if row.get("error") or (isinstance(status, int) and status >= 400):
        return None
    if isinstance(meta, Mapping) and isinstance(meta.get("answer"), str):
        return {"role": "assistant", "content": meta["answer"]}
    if isinstance(answered, str):
        return {"role": "assistant", "content": answered}
    if not isinstance(answered, Mapping):
        return None
    body = answered.get("body", answered)
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], Mapping)):
        return None
    if isinstance(choices[0].get("text"), str):
        return {"role": "assistant", "content": choices[0]["text"]}
    return message_of({"role": "assistant"} | dict(choices[0].get("message") or {}), name)
