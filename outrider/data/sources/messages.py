"""The messages of a row of a data set, a request log or a Batch file.

A row has one of `messages`, `conversations` (ShareGPT), `turns`, `prompt` (with `response`), `instruction` (with
`input` and `output`), `question`, `text`, and may have a `system` text, earlier turns (`history`) and `tools`.  Or it
is a request to an OpenAI-compatible server (`body`, `request`) with its answer, if any (`response`), as in OpenAI's
Batch files and the logs of proxies and `outrider serve`.  Unknown fields are reported, so that nothing is lost
silently.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from outrider.errors import DataError
from outrider.storage.json_text import parse_json
from outrider.targets.text.parts import text_of

Message = dict[str, Any]
"""`role`, `content` (a text) and any of EXTRAS; `weight` 0 if it does not train."""
Tool = dict[str, Any]
"""The definition of a tool, in the format of OpenAI's `tools` and chat templates."""
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "assistant": "assistant", "model": "assistant", "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
CALLERS = ("function_call", "tool_call")
"""Roles whose text is a tool call, or a list of them, as JSON."""
EXTRAS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Other fields of a message that a chat template may use."""
TRAINS = ("weight", "train", "training", "loss")
"""Fields that say whether a message trains: of OpenAI and Mistral, then Axolotl's two, then ms-swift's."""
IDLE = ("id", "index", "type", "object", "created", "refusal", "annotations", "audio", "status")
"""Fields of a message that are ignored, since they are not part of its text."""
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
"""Fields of a request that don't affect its prompt."""
SKIP = "skip such rows with --skip-bad"


class Reading(NamedTuple):
    """The content of a row."""

    messages: list[Message]
    tools: tuple[Tool, ...]
    unread: tuple[str, ...] = ()
    """Unknown fields that are set; those of messages as `messages[].NAME`."""


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


def read_row(row: Mapping[str, Any], name: str) -> Reading:
    """Read a row in any of the layouts.  name: file and line, for errors.  Raises DataError for an unknown layout."""
    reader = MessageReader()
    if (request := _request(row, name)) is not None:
        fields = Fields(request, SETTINGS)
        messages = _request_messages(fields, row, name, reader)
        tools = _tools(fields, name)
        return Reading(messages, tools, (*_unread_fields(fields, messages, "body."), *reader.unread))
    fields = Fields(row)
    try:
        messages = _with_system(fields, [*_history(fields, name, reader), *_row_messages(fields, name, reader)], name)
    except TypeError as error:
        raise DataError(f"{name}: {error}") from None
    tools = _tools(fields, name)
    return Reading(messages, tools, (*_unread_fields(fields, messages), *reader.unread))


def with_system(request: Mapping[str, Any], name: str = "the request") -> dict[str, Any]:
    """A request with its separate system text, if any, moved to the first message."""
    if not request.get("messages") or not any(request.get(key) for key in SYSTEMS):
        return dict(request)
    fields = Fields(request)
    messages = _with_system(fields, list(request["messages"]), name)
    return {key: value for key, value in request.items() if key not in SYSTEMS} | {"messages": messages}


class MessageReader:
    """Reads messages and collects the names of their unknown fields."""

    def __init__(self) -> None:
        self.unread: list[str] = []

    def message(self, message: Any, name: str) -> Message:
        """As `message_of`; unknown fields are noted."""
        if isinstance(message, Mapping):
            fields = {"role", "from", "content", "value", *EXTRAS, *TRAINS, *IDLE, "reasoning", "function_call"}
            self.unread += [f"messages[].{key}" for key in Fields(message, fields).left()]
        return message_of(message, name)


def _row_messages(fields: Fields, name: str, reader: MessageReader) -> list[Message]:
    """The conversation of a row of a data set."""
    key, content = fields.first("messages", "conversations", "turns")
    if key == "turns":
        if not (isinstance(content, list) and all(isinstance(turn, str) for turn in content)):
            raise DataError(f"{name}: turns must be a list of texts, got {content!r:.80}")
        return [{"role": "user", "content": turn} for turn in content]
    if key and not isinstance(content, list):
        raise DataError(f"{name}: messages or conversations must be a list of messages, got {content!r:.80}")
    if not key:  # TRL: prompt and answer are lists of messages
        content = [message for key in ("prompt", *ANSWERS) for message in _messages_under(fields, key)]
    if content:
        return [reader.message(message, name) for message in content]
    key, question = fields.first(*QUESTIONS)
    if not isinstance(question, str):
        fields.text(key)  # raises if it is set
        keys = ", ".join(map(str, fields.row)) or "none"
        raise DataError(
            f"{name}: a row needs a non-empty messages, conversations, turns, prompt, instruction, question or text; "
            f"got keys: {keys}"
        )
    contexts = [] if key == "prompt" else [fields.text(context) for context in CONTEXTS if context not in fields.used]
    prompt = {"role": "user", "content": "\n\n### Input:\n".join([question, *filter(None, contexts)])}
    answer = fields.text(*ANSWERS, *(("answer",) if key in ("question", "query") else ()))
    return [prompt, {"role": "assistant", "content": answer}] if answer else [prompt]


def _messages_under(fields: Fields, key: str) -> list[Any]:
    """The messages in a field; empty if it has none, and for a second answer."""
    messages = fields.row.get(key)
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return []
    if not messages or (key != "prompt" and fields.used & set(ANSWERS)):
        return []
    fields.used.add(key)
    return messages


def _history(fields: Fields, name: str, reader: MessageReader) -> list[Message]:
    """Earlier turns of a row: pairs of question and answer, as in Alpaca's rows, or messages."""
    _, history = fields.first("history")
    if history is None:
        return []
    messages: list[Message] = []
    for turn in history if isinstance(history, list) else [history]:
        if isinstance(turn, Mapping):
            messages.append(reader.message(turn, name))
        elif isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
            question, answer = turn
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        else:
            raise DataError(f"{name}: history must be a list of pairs [question, answer], got {turn!r:.80}; {SKIP}")
    return messages


def _with_system(fields: Fields, messages: list[Message], name: str) -> list[Message]:
    """The messages with the row's separate system text, if any.  Raises DataError if they have another one."""
    key, content = fields.first(*SYSTEMS)
    system = _joined(content, name) if isinstance(content, list) else content
    if system is None:
        return messages
    if not isinstance(system, str):
        raise DataError(f"{name}: {key} must be text, got {content!r:.80}; {SKIP}")
    existing = [message.get("content") for message in messages if message["role"] == "system"]
    if existing and existing != [system]:
        raise DataError(f"{name}: the messages have a system text, and {key} is another one; leave one out, or {SKIP}")
    return messages if existing or not system.strip() else [{"role": "system", "content": system}, *messages]


def _unread_fields(fields: Fields, messages: Sequence[Message], prefix: str = "") -> list[str]:
    """Fields that were not read, except for repetitions of a message's text."""
    texts = {message["content"].strip() for message in messages}
    unread = ((key, fields.row.get(key)) for key in fields.left())
    return [prefix + key for key, value in unread if not (isinstance(value, str) and value.strip() in texts)]


def _tools(fields: Fields, name: str) -> tuple[Tool, ...]:
    """The tools that a request or a row offers the model; empty if its `tool_choice` is none.

    Raises DataError if they are not a list of definitions.
    """
    key, tools = fields.first("tools", "functions")
    if isinstance(tools, str):  # data sets with one type per column
        with suppress(ValueError):
            tools = parse_json(tools)
    fields.used.add("tool_choice")
    if not tools or fields.row.get("tool_choice") == "none":
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{name}: tools must be a list of definitions, got {tools!r:.80}; {SKIP}")
    if key == "functions":  # OpenAI's older name
        return tuple({"type": "function", "function": tool} for tool in tools)
    return tuple(dict(tool) for tool in tools)


def message_of(message: Any, name: str) -> Message:
    """One message with its role's standard name and its content as text.

    Text parts are joined as the server joins them; null content becomes empty if the message calls tools or thinks.
    """
    fields = message if isinstance(message, Mapping) else {}
    role = _filled(fields, "role", "from")
    content = next((fields[key] for key in ("content", "value") if fields.get(key) is not None), None)
    extras = {key: fields[key] for key in EXTRAS if fields.get(key) not in (None, [], "")}
    if isinstance(thoughts := fields.get("reasoning"), str) and thoughts:  # vLLM's newer name
        extras.setdefault("reasoning_content", thoughts)
    if isinstance(called := fields.get("function_call"), Mapping):  # OpenAI's older name
        extras.setdefault("tool_calls", [{"type": "function", "function": dict(called)}])
    if role in CALLERS and isinstance(content, str):
        extras["tool_calls"], content = _calls(content, name), ""
    if isinstance(calls := extras.get("tool_calls"), str):
        extras["tool_calls"] = _calls(calls, name)
    elif calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
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
        raise DataError(f"{name}: a call of a tool must be JSON with its name and arguments, got {text!r:.80}; {SKIP}")
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


def _joined(parts: Any, name: str) -> str:
    """The joined text of a list of parts."""
    try:
        return text_of(parts)
    except DataError as error:
        raise DataError(f"{name}: {error}; {SKIP}") from None


# ── requests and their answers ────────────────────────────────────────────────────────────────────────────────────────


def _request(row: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The body of the request in a row; None for a row that is not a request."""
    if "hash_ids" in row or "input_length" in row:
        raise DataError(
            f"{name}: this log has lengths and no texts, but `outrider prepare` needs texts; name a log that has them "
            "(`outrider replay` can use this one)"
        )
    request = row.get("request", row.get("body"))
    if isinstance(request, str):  # proxies that log the raw body
        with suppress(ValueError):
            request = parse_json(request)
    if isinstance(request, Mapping):
        body: Any = request.get("body", request)
        return body if isinstance(body, Mapping) else None
    if "custom_id" in row:
        raise DataError(
            f"{name}: the output of a Batch does not have the prompts; give its input as the source's path, and this "
            "file as its answers"
        )
    return None


def _request_messages(fields: Fields, row: Mapping[str, Any], name: str, reader: MessageReader) -> list[Message]:
    """The messages of a request, and the answer if the row has it."""
    key, content = fields.first("messages", "prompt")
    if key == "prompt" and isinstance(content, str):
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list) or not content or not all(isinstance(message, Mapping) for message in content):
        raise DataError(
            f"{name}: the request's messages must be a list, or its prompt a text, got {content!r:.80}; {SKIP}"
        )
    if any(isinstance(message.get("content"), Mapping) for message in content):
        raise DataError(f"{name}: this log is redacted, its texts are gone; give a log with texts")
    messages = _with_system(fields, [reader.message(message, name) for message in content], name)
    if messages[-1]["role"] != "assistant" and (answer := answer_of(row, name)) is not None:
        messages.append(answer)
    return messages


def answer_of(row: Mapping[str, Any], name: str) -> Message | None:
    """The answer in a row of a log or a Batch's output; None if it has none or the request failed."""
    response, meta = row.get("response"), row.get("meta")
    status = response.get("status_code") if isinstance(response, Mapping) else None
    if row.get("error") or (isinstance(status, int) and status >= 400):
        return None
    if isinstance(meta, Mapping) and isinstance(meta.get("answer"), str):
        return {"role": "assistant", "content": meta["answer"]}
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    if not isinstance(response, Mapping):
        return None
    body = response.get("body", response)
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], Mapping)):
        return None
    if isinstance(choices[0].get("text"), str):
        return {"role": "assistant", "content": choices[0]["text"]}
    return message_of({"role": "assistant"} | dict(choices[0].get("message") or {}), name)
