"""The messages of a row: of data sets, of logs of requests, of Batch files.

A row has one of `messages`, `conversations` (ShareGPT), `turns`, `prompt` (with `response`), `instruction` (with
`input` and `output`), `text`.  Or it is a request to an OpenAI-compatible server (`body`, `request`) with its answer,
if it has one (`response`), as OpenAI's Batch files, proxies' logs and `outrider serve` write them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from outrider.errors import DataError

Message = dict[str, Any]
"""`role` and `content` (a text), and those of EXTRAS that it has."""
Tool = dict[str, Any]
"""The definition of a tool, as OpenAI's `tools` and chat templates have it."""
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "assistant": "assistant", "model": "assistant", "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
EXTRAS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""What else a chat template may use of a message."""
TEXT_PARTS = ("text", "input_text", "output_text")
SKIP = "skip such rows with --skip-bad"


def messages_of(row: Mapping[str, Any], name: str) -> list[Message]:
    """The messages of a row.  `name`: file and line, for errors.  Raises DataError for a row of no known layout."""
    if (request := _request(row, name)) is not None:
        return _asked(request, row, name)
    given, turns = row.get("messages") or row.get("conversations"), row.get("turns")
    if given and not isinstance(given, list):
        raise DataError(f"{name}: messages or conversations must be a list of messages, got {given!r:.80}")
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise DataError(f"{name}: turns must be a list of texts, got {turns!r:.80}")
    if spoken := given or [{"role": "user", "content": turn} for turn in turns or ()]:
        return [message_of(one, name) for one in spoken]
    asked = _text(row, ("prompt", "instruction", "text"), name)
    if not asked:
        keys = ", ".join(map(str, row)) or "none"
        wanted = "messages, conversations, turns, prompt, instruction or text"
        raise DataError(f"{name}: a row needs a non-empty {wanted}; got keys: {keys}")
    shown = "" if row.get("prompt") else _text(row, ("input",), name)
    messages: list[Message] = [{"role": "user", "content": asked + (f"\n\n### Input:\n{shown}" if shown else "")}]
    if answer := _text(row, ("response", "completion", "output"), name):
        messages.append({"role": "assistant", "content": answer})
    return messages


def tools_of(row: Mapping[str, Any], name: str) -> tuple[Tool, ...]:
    """The tools that a row's request or the row itself offers the model; none where its `tool_choice` is none.

    Raises DataError for what are no definitions.
    """
    asked = _request(row, name) or row
    given = asked.get("tools")
    if isinstance(given, str):  # data sets with one type a column
        with suppress(ValueError):
            given = json.loads(given)
    if not given and isinstance(asked.get("functions"), list):  # OpenAI's older word
        given = [{"type": "function", "function": one} for one in asked["functions"]]
    if not given or asked.get("tool_choice") == "none":
        return ()
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise DataError(f"{name}: tools must be a list of definitions, got {given!r:.80}; {SKIP}")
    return tuple(dict(one) for one in given)


def message_of(message: Any, name: str) -> Message:
    """One message with its role's usual name and its content as a text.

    Parts of text are joined; content that is null is empty where the message calls tools.
    """
    fields = message if isinstance(message, Mapping) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    extras = {key: fields[key] for key in EXTRAS if fields.get(key) not in (None, [], "")}
    if isinstance(content, list):
        content = _joined(content, name)
    if content is None and "tool_calls" in extras:
        content = ""
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        roles = ", ".join(sorted(set(ROLES.values())))
        raise DataError(f"{name}: a message needs a role ({roles}) and text as content, got {message!r:.80}")
    return {"role": ROLES[role], "content": content, **extras}


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


def _joined(parts: Sequence[Any], name: str) -> str | None:
    """The text of a list of parts; None where it has something that is no part."""
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            return None
        if part["type"] not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise DataError(f"{name}: a message holds a part of type {part['type']!r}; only text is read; {SKIP}")
        texts.append(part["text"])
    return "".join(texts)


def _text(row: Mapping[str, Any], keys: Sequence[str], name: str) -> str:
    """The first of these fields that is filled in; empty where none is.  Raises DataError for one that is not text."""
    key, text = next(((key, row[key]) for key in keys if row.get(key) not in (None, "")), ("", ""))
    if not isinstance(text, str):
        raise DataError(f"{name}: {key} must be text, got {text!r:.80}; put a list of messages under `messages`")
    return text


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


def _asked(request: Mapping[str, Any], row: Mapping[str, Any], name: str) -> list[Message]:
    """What a request asks, and the answer where the row has it."""
    given, prompt = request.get("messages"), request.get("prompt")
    if given is None and isinstance(prompt, str):
        given = [{"role": "user", "content": prompt}]
    if not isinstance(given, list) or not given:
        wanted = "the request's messages must be a list, or its prompt a text"
        raise DataError(f"{name}: {wanted}, got {(prompt if given is None else given)!r:.80}; {SKIP}")
    if any(isinstance(one, Mapping) and isinstance(one.get("content"), Mapping) for one in given):
        raise DataError(f"{name}: this log is redacted, its texts are gone; give a log with texts")
    messages = [message_of(one, name) for one in given]
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
