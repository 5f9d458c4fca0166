"""The messages of a row of a data set, a request log or a Batch file.

A row has one of `messages`, `conversations` (ShareGPT), `conversation`, `turns`, `prompt` (with `response`),
`instruction` (with `input` and `output`), `question`, `text`, and may have a `system` text, earlier turns (`history`)
and `tools`.  Or it is a request to an OpenAI-compatible server (`body`, `request`) with its answer, if any
(`response`), as in OpenAI's Batch files and the logs of proxies and `outrider serve`.  Unknown fields are reported, so
that nothing is lost silently.
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
ANSWERERS = tuple(name for name, role in ROLES.items() if role == "assistant")
CALLERS = ("function_call", "tool_call")
"""Roles whose text is a tool call, or a list of them, as JSON."""
EXTRAS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Other fields of a message that a chat template may use."""
TEXTS = ("tool_call_id", "name", "reasoning_content", "thinking")
"""Those of EXTRAS that are texts."""
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
    key, content = fields.first("messages", "conversations", "conversation", "turns")
    content = _by_message(decoded(content)) if key else _prompted(fields)
    is_texts = key == "turns" and not (isinstance(content, list) and all(isinstance(turn, Mapping) for turn in content))
    if key and not (isinstance(content, list) and (not is_texts or all(isinstance(turn, str) for turn in content))):
        raise DataError(f"{name}: {key} must be a list of {'texts' if is_texts else 'messages'}, got {content!r:.80}")
    if is_texts:
        return [{"role": "user", "content": turn} for turn in content]
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


def _by_message(content: Any) -> Any:
    """A list of messages, of a list for each of their fields, as `datasets` stores them."""
    columns = list(content.values()) if isinstance(content, Mapping) else []
    if not columns or not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return content
    return [dict(zip(content, values, strict=True)) for values in zip(*columns, strict=True)]


def _prompted(fields: Fields) -> list[Any]:
    """The conversation of a row in which the prompt, the answer or both are messages, as in TRL; empty if neither is.

    An answer that begins with a question of its own repeats the prompt.
    """
    prompt, answer = _messages_under(fields, "prompt"), _messages_under(fields, *ANSWERS)
    if prompt and not answer and (text := fields.text(*ANSWERS)):
        answer = [{"role": "assistant", "content": text}]
    elif answer and not prompt and _filled(answer[0], "role", "from") in ANSWERERS:
        prompt = [{"role": "user", "content": fields.text(*QUESTIONS)}]
    return prompt + answer


def _messages_under(fields: Fields, *keys: str) -> list[Any]:
    """The messages in the first of these fields that has any."""
    for key in keys:
        messages = fields.row.get(key)
        if messages and isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages):
            fields.used.add(key)
            return messages
    return []


def decoded(value: Any) -> Any:
    """The list or object that a text spells as JSON, as in data sets with one type per column; else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return parse_json(value)
    return value


def _history(fields: Fields, name: str, reader: MessageReader) -> list[Message]:
    """Earlier turns of a row: pairs of question and answer, as in Alpaca's rows, or messages."""
    history = decoded(fields.first("history")[1])
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
    tools = decoded(tools)
    tools = list(map(decoded, tools)) if isinstance(tools, list) else tools
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
        content = _joined(content, name)
    if content is None and extras.keys() & {"tool_calls", "reasoning_content", "thinking"}:
        content = ""
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        roles = ", ".join(sorted(set(ROLES.values())))
        raise DataError(f"{name}: a message needs a role ({roles}) and text as content, got {message!r:.80}")
    return {"role": ROLES[role], "content": content, **extras, **_weight(fields, ROLES[role], name)}


def _filled(fields: Mapping[str, Any], *keys: str) -> Any:
    return next((fields[key] for key in keys if fields.get(key) not in (None, "")), None)


def _only(fields: Mapping[str, Any], name: str, key: str, other: str) -> Any:
    """The value under two names for one thing.  Raises DataError if both are set and differ."""
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
    if messages[-1]["role"] != "assistant":
        answer = answer_of(row, name)
        messages += [] if answer is None else [answer]
        reader.unread += _unread_answers(row, answer)
    return messages


def answer_of(row: Mapping[str, Any], name: str) -> Message | None:
    """The answer in a row of a log or a Batch's output; None if it has none or the request failed."""
    meta = row.get("meta")
    if _has_failed(row):
        return None
    if isinstance(meta, Mapping) and isinstance(meta.get("answer"), str):
        return {"role": "assistant", "content": meta["answer"]}
    body = answered(row)
    if isinstance(body, str):
        return {"role": "assistant", "content": body}
    if not isinstance(body, Mapping):
        return None
    choices = body.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        if isinstance(choices[0].get("text"), str):
            return {"role": "assistant", "content": choices[0]["text"]}
        message = choices[0].get("message")
        return message_of({"role": "assistant", **message}, name) if isinstance(message, Mapping) else None
    if body.get("role") == "assistant" and body.get("content"):  # a message, as Anthropic's servers send it
        return message_of({key: body[key] for key in body.keys() & {"role", "content", *EXTRAS}}, name)
    return None


def _has_failed(row: Mapping[str, Any]) -> bool:
    response = row.get("response")
    status = response.get("status_code") if isinstance(response, Mapping) else None
    return bool(row.get("error")) or (isinstance(status, int) and status >= 400)


def answered(row: Mapping[str, Any]) -> Any:
    """What a server answered, without its envelope; a text stays one unless it spells a server's JSON."""
    response = row.get("response")
    body = response.get("body", response) if isinstance(response, Mapping) else response
    spelled = decoded(body)
    return spelled if isinstance(spelled, Mapping) and "choices" in spelled else body


def _unread_answers(row: Mapping[str, Any], answer: Message | None) -> list[str]:
    """Names of what a log's row has of answers and is not read."""
    body = answered(row)
    if answer is None:
        return ["response"] if body and not _has_failed(row) else []
    choices = body.get("choices") if isinstance(body, Mapping) else None
    return ["response.choices[1:]"] if isinstance(choices, list) and len(choices) > 1 else []
