"""The messages of a row of a data set, a request log or a Batch file.

A row has one of `messages`, `conversations` (ShareGPT), `conversation`, `turns`, `prompt` (with `response`),
`instruction` (with `input` and `output`), `question`, `text`, and may have a `system` text, earlier turns (`history`)
and `tools`.  Or it is a request to an OpenAI-compatible server (`body`, `request`) with its answer, if any
(`response`), as in OpenAI's Batch files and the logs of proxies and `outrider serve`.  Unknown fields are reported, so
that nothing is lost silently.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from outrider.data.sources.messages import (
    ANSWERERS,
    EXTRAS,
    SKIP,
    Fields,
    Message,
    MessageReader,
    Tool,
    decoded,
    filled,
    joined,
    message_of,
)
from outrider.errors import DataError
from outrider.storage.json_text import parse_json

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


class Reading(NamedTuple):
    """The content of a row."""

    messages: list[Message]
    tools: tuple[Tool, ...]
    unread: tuple[str, ...] = ()
    """Unknown fields that are set; those of messages as `messages[].NAME`."""


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
    elif answer and not prompt and filled(answer[0], "role", "from") in ANSWERERS:
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
    system = joined(content, name) if isinstance(content, list) else content
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


# ── requests and their answers ────────────────────────────────────────────────────────────────────────────────────────


def _request(row: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The body of the request in a row; None for a row that is not a request."""
    if "hash_ids" in row or "input_length" in row:
        raise DataError(
            f"{name}: this log has lengths but no texts, but `outrider prepare` needs texts; name a log that has them "
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
