"""Recorded traffic, read from the formats there are and written in our own: when each call came, and what it asked.  No torch.

A row of our own format is `{t, session, body, expected_output_tokens, meta}`, one a line; `body` is what was sent to an
OpenAI-compatible server, `t` is in seconds.  Logs that hold lengths and no text (Mooncake, BurstGPT, Bailian, timed traces) get
words of our own of about that many tokens: equal hash ids become equal text, so shared prefixes stay shared, but what a drafter
guesses of such text says nothing of what it guesses of real text; these calls are marked `synthetic`.

A log is read twice: once to check every row and to note where it stands, then row by row in the order of the times, so its size
on disk is not its size in memory.  (JSON that is one array, as ShareGPT's, is held whole.)
"""

from __future__ import annotations

import csv
import functools
import hashlib
import hmac
import json
import math
import os
import random
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the log."""

    body: Mapping[str, Any]
    """What was asked, as an OpenAI-compatible server reads it: `messages` or `prompt`, and settings."""
    id: str
    at_s: float | None = None
    """Seconds after the first call; None where the log has no times."""
    session: str | None = None
    expected_tokens: int | None = None
    """Length of the answer in the log."""
    synthetic: bool = False
    """The text is ours; only its length and what it shares with other calls are the log's."""
    answer: str | None = None
    """What the log's own server answered."""

    @property
    def path(self) -> str:
        """Where it is sent, behind the server's address."""
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


Parse = Callable[[Any, str], list[Call]]
"""A row and the id for it where it has none -> its calls, times as they stand there."""


@dataclass(frozen=True)
class Trace:
    """A log that was read through once: every row that counts can be read, and where it stands is known."""

    path: Path
    format: str
    size: int
    """Calls."""
    has_times: bool
    span_s: float
    """From the first call to the last."""
    num_synthetic: int
    num_answers: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Rows that were not taken, by reason."""
    places: Sequence[int] = field(default=(), repr=False)
    """Where each row begins, in bytes, in the order of their times; for JSON that is one array its index."""
    lines: Sequence[int] = field(default=(), repr=False)
    start: float = 0.0
    rows: Sequence[Any] | None = field(default=None, repr=False)
    columns: Sequence[str] | None = None
    parse: Parse = field(default=lambda row, name: [], repr=False)

    def calls(self) -> Iterator[Call]:
        """Every call, in the order of their times.  DataError names the line of a row that changed since the first reading."""
        if self.rows is not None:
            for place, line in zip(self.places, self.lines, strict=True):
                yield from self._again(functools.partial(self.rows.__getitem__, place), line)
            return
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; {CHANGED}") from None
        with file:
            for place, line in zip(self.places, self.lines, strict=True):
                file.seek(place)
                yield from self._again(lambda: _decoded(file.readline(), self.columns), line)

    def _again(self, read: Callable[[], Any], line: int) -> list[Call]:
        """What the row asks, its times counted from the first call."""
        try:
            calls = _parsed(self.parse, read(), line)
            if not calls or (self.has_times and any(call.at_s is None for call in calls)):
                raise ValueError("no call with a time" if calls else "no call in it")
            return [replace(call, at_s=None if call.at_s is None else call.at_s - self.start) for call in calls]
        except (*UNREADABLE, _Unanswered) as error:
            raise DataError(f"{self.path}:{line}: {_said_of(error)}; {CHANGED}") from None


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(path: Path, format: str | None = None, skip_bad: bool = False) -> Trace:
    """Read a log through.  DataError names the line of the first row that can't be read; `skip_bad` counts them."""
    if not path.is_file():
        raise DataError(f"no log at {path}; name a file")
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known; choose from {', '.join(FORMATS)}")
    rows, columns = _array_in(path), _columns_in(path)
    name = format or _recognised(path, rows, columns)
    index = _Index(path, name, skip_bad)
    for place, line, row in _rows(path, rows, columns, index):
        index.take(place, line, row)
    if not index.size:
        raise DataError(f"{path}: no calls in it{index.said()}; wanted a log of requests ({', '.join(FORMATS)})")
    return index.trace(rows, columns)


UNREADABLE = (DataError, LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What comes of a row that is not as its format says."""
CHANGED = "the log could be read before, so it changed meanwhile; use a copy that nobody writes to"


def _parsed(parse: Parse, row: Any, line: int) -> list[Call]:
    calls = parse(row, str(line))
    if not all(isinstance(call.answer, str | None) for call in calls):
        raise ValueError("an answer that is no text")
    return calls


def _said_of(error: Exception) -> str:
    return f"no {error} in it" if isinstance(error, KeyError) else str(error) or "it failed in the log"


class _Index:
    """What the first reading notes of every row."""

    def __init__(self, path: Path, name: str, skip_bad: bool) -> None:
        self.path, self.name, self.skip_bad = path, name, skip_bad
        self.parse = FORMATS[name]()
        self.places, self.lines, self.times = array("q"), array("q"), array("d")
        self.size = self.synthetic = self.answers = 0
        self.left_out: Counter[str] = Counter()

    def take(self, place: int, line: int, row: Any) -> None:
        try:
            calls = _parsed(self.parse, row, line)
        except _Unanswered:
            self.left_out["failed in the log"] += 1
            return
        except UNREADABLE as error:
            self.bad(line, _said_of(error))
            return
        if not calls:
            self.left_out["nothing asked"] += 1
            return
        self.places.append(place)
        self.lines.append(line)
        self.times.append(math.nan if calls[0].at_s is None else calls[0].at_s)
        self.size += len(calls)
        self.synthetic += sum(call.synthetic for call in calls)
        self.answers += sum(call.answer is not None for call in calls)

    def bad(self, line: int, said: str) -> None:
        if not self.skip_bad:
            raise DataError(
                f"{self.path}:{line}: {said}; read as {self.name}; mend the row, name the --format, or count such rows "
                "with --skip-bad"
            )
        self.left_out["not readable"] += 1

    def said(self) -> str:
        return "".join(f", {count} {reason}" for reason, count in self.left_out.items())

    def trace(self, rows: list[Any] | None, columns: list[str] | None) -> Trace:
        timed = sum(not math.isnan(time) for time in self.times)
        if timed not in (0, len(self.times)):
            raise DataError(f"{self.path}: {timed} of {len(self.times)} rows have a time; give all of them one, or none")
        order: Sequence[int] = range(len(self.times))
        if timed and any(later < former for former, later in zip(self.times, self.times[1:], strict=False)):
            order = sorted(order, key=self.times.__getitem__)
        start, end = (self.times[order[0]], self.times[order[-1]]) if timed else (0.0, 0.0)
        return Trace(
            self.path, self.name, self.size, timed > 0, end - start, self.synthetic, self.answers, dict(self.left_out),
            array("q", (self.places[row] for row in order)), array("q", (self.lines[row] for row in order)), start, rows,
            columns, self.parse,
        )  # fmt: skip


def _rows(path: Path, rows: list[Any] | None, columns: list[str] | None, index: _Index) -> Iterator[tuple[int, int, Any]]:
    """(place, line, row) of each; lines count from 1, entries of an array too."""
    if rows is not None:
        yield from ((place, place + 1, row) for place, row in enumerate(rows))
        return
    with path.open("rb") as file:
        place = 0
        for line, text in enumerate(file, 1):
            began, place = place, place + len(text)
            if not text.strip() or (columns is not None and line == 1):
                continue
            try:
                row = _decoded(text, columns)
            except ValueError as error:
                index.bad(line, str(error))
                continue
            yield began, line, row


def _decoded(text: bytes, columns: Sequence[str] | None) -> Any:
    if columns is not None:
        cells = next(csv.reader([text.decode().rstrip("\r\n")]))
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} cells where the first line names {len(columns)}")
        return dict(zip(columns, cells, strict=True))
    try:
        row = json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__} where an object was wanted")
    return row


def _array_in(path: Path) -> list[Any] | None:
    with path.open("rb") as file:
        start = file.read(64)
    if start[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is packed with gzip; unpack it first")
    if not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return None
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); wanted one array, or an object a line") from None
    return list(rows)


def _columns_in(path: Path) -> list[str] | None:
    """Names in the first line of a CSV file."""
    with path.open("rb") as file:
        first = file.readline(4096).decode("utf-8-sig", "replace").strip()
    return next(csv.reader([first])) if "Timestamp" in first and "Request tokens" in first else None


def _recognised(path: Path, rows: list[Any] | None, columns: list[str] | None) -> str:
    """The format, by the first row that is an object."""
    if columns is not None:
        return "burstgpt"
    if rows is None:
        with path.open("rb") as file:
            rows = []
            for text in file:
                try:
                    rows.append(_decoded(text, None))
                    break
                except ValueError:
                    continue
    row = next((row for row in rows if isinstance(row, dict)), {})
    name = _format_of(row)
    if name is None:
        keys = ", ".join(list(row)[:8]) or "nothing that is JSON"
        raise DataError(f"{path}: a row holds {keys}; wanted a log of requests; name the --format: {', '.join(FORMATS)}")
    return name


def _format_of(row: Mapping[str, Any]) -> str | None:
    if "hash_ids" in row or "input_length" in row:
        if "chat_id" in row:
            return "bailian"
        try:
            return "mooncake" if not row.get("hash_ids") or _is_block(row, 512) else "timed"
        except UNREADABLE:  # the first reading names the row
            return "mooncake"
    if isinstance(row.get("request"), dict) or ("body" in row and "response" in row):
        return "gateway"
    if "body" in row:
        return "openai-batch" if "url" in row or "custom_id" in row else "outrider"
    if "conversations" in row:
        return "sharegpt"
    if "messages" in row:
        return "raw"
    if "prompt" in row:
        return "raw" if "model" in row and "output_tokens" not in row else "vllm-custom"
    return None


def _is_block(row: Mapping[str, Any], size: int) -> bool:
    return math.ceil(_count(row["input_length"]) / size) == len(row["hash_ids"])


# ── formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Unanswered(Exception):
    """The log's own server failed here: there is nothing to repeat."""


def _own(row: Any, name: str) -> list[Call]:
    meta = row.get("meta") or {}
    body, hidden = _shown_again(row["body"])
    expected = row.get("expected_output_tokens")
    return [
        Call(
            _checked(body), str(meta.get("id", name)), _seconds(row.get("t")), _name(row.get("session")),
            None if expected is None else _count(expected), hidden or bool(meta.get("synthetic")), meta.get("answer"),
        )
    ]  # fmt: skip


def _batch(row: Any, name: str) -> list[Call]:
    at = next((row[key] for key in TIMES if key in row), None)
    return [Call(_checked(row["body"]), str(row.get("custom_id", name)), _seconds(at), _name(row.get("session_id")))]


def _raw(row: Any, name: str) -> list[Call]:
    body = {key: value for key, value in row.items() if key not in OURS}
    at = next((row[key] for key in TIMES if key in row), None)
    return [Call(_checked(body), str(row.get("id", name)), _seconds(at), _name(row.get("session_id")))]


def _gateway(row: Any, name: str) -> list[Call]:
    """What proxies write: the request beside the answer and a time."""
    asked = row.get("request", row.get("body"))
    body = asked.get("body", asked)
    at = next((row[key] for key in TIMES if key in row), None)
    answered = row.get("response") or {}
    answered = answered.get("body", answered) if isinstance(answered, dict) else {}
    choice = (answered.get("choices") or [{}])[0]
    answer = (choice.get("message") or {}).get("content", choice.get("text"))
    tokens = (answered.get("usage") or {}).get("completion_tokens")
    named = str(row.get("id", row.get("request_id", name)))
    return [Call(_checked(body), named, _seconds(at), _name(row.get("session_id")), tokens, answer=answer)]


def _lengths(row: Any, name: str, block: int, per_second: float) -> list[Call]:
    """Mooncake and its relatives: a length, and a hash of every block of tokens with all that came before it."""
    session = _name(row.get("session_id"))
    return [_synthesised(row, name, row["timestamp"] / per_second, session, block)]


def _timed(row: Any, name: str) -> list[Call]:
    block = next((size for size in (16, 64, 512) if not row.get("hash_ids") or _is_block(row, size)), None)
    if block is None:
        raise ValueError(f"{len(row['hash_ids'])} hash_ids don't fit an input_length of {row['input_length']}")
    return _lengths(row, name, block, 1.0)


def _bailian(row: Any, name: str, roots: dict[int, int]) -> list[Call]:
    chat, parent = int(row["chat_id"]), int(row.get("parent_chat_id", -1))
    roots[chat] = roots.get(parent, parent) if parent >= 0 else chat
    return [_synthesised(row, str(chat), float(row["timestamp"]), str(roots[chat]), 16)]


def _burstgpt(row: Any, name: str) -> list[Call]:
    """Lengths in CSV; nothing is known of shared prefixes."""
    lengths = {"input_length": int(row["Request tokens"]), "output_length": int(row["Response tokens"])}
    session = _name(row.get("Session ID") or None)
    return [_synthesised(lengths | {"salt": name}, name, float(row["Timestamp"]), session, 512)]


def _sharegpt(row: Any, name: str) -> list[Call]:
    """A call for each turn of the user, with the log's own answers before it."""
    calls: list[Call] = []
    messages: list[dict[str, str]] = []
    session = str(row.get("id", name))
    for turn in row["conversations"]:
        role = ROLES.get(str(turn.get("from", turn.get("role"))))
        text = turn.get("value", turn.get("content"))
        if role is None or not isinstance(text, str):
            raise ValueError(f"a turn from {turn.get('from')!r}; wanted human, gpt or system, and a text")
        if role == "assistant" and calls and messages[-1]["role"] == "user":
            calls[-1] = replace(calls[-1], answer=text)
        messages.append({"role": role, "content": text})
        if role == "user":
            calls.append(Call({"messages": list(messages)}, f"{session}-{len(calls)}", None, session))
    return calls


def _custom(row: Any, name: str) -> list[Call]:
    """vLLM's own: a prompt that its chat template is laid around."""
    tokens = row.get("output_tokens")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": row["prompt"]}]}
    if tokens is not None:
        body["max_tokens"] = _count(tokens)
    return [Call(_checked(body), str(row.get("id", name)), _seconds(row.get("timestamp")), expected_tokens=tokens)]


FORMATS: dict[str, Callable[[], Parse]] = {
    "outrider": lambda: _own,
    "openai-batch": lambda: _batch,
    "raw": lambda: _raw,
    "gateway": lambda: _gateway,
    "mooncake": lambda: functools.partial(_lengths, block=512, per_second=1000.0),
    "timed": lambda: _timed,
    "bailian": lambda: functools.partial(_bailian, roots={}),
    "burstgpt": lambda: _burstgpt,
    "sharegpt": lambda: _sharegpt,
    "vllm-custom": lambda: _custom,
}
"""In `docs/replay.md` with what each holds."""
TIMES = ("timestamp", "t", "time", "created_at", "created")
OURS = {*TIMES, "session_id", "id", "delay"}
"""Beside a raw request body, and not sent."""
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "system": "system",
}  # fmt: skip
SECRETS = {"api_key", "apikey", "api-key", "authorization", "headers", "extra_headers", "extra_query"}
"""Never carried on from a log, redacted or not."""


def _checked(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ValueError(f"a body that is a {type(body).__name__}; wanted an object with messages or prompt")
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is None and not prompt:
        raise ValueError("a body without messages or prompt")
    if messages is not None and not (isinstance(messages, list) and messages and all(map(_has_role, messages))):
        raise ValueError("messages that are no list of objects with a role")
    if messages is None and not isinstance(prompt, str | list):
        raise ValueError("a prompt that is neither text nor a list")
    for name in ("max_tokens", "max_completion_tokens"):
        if not isinstance(body.get(name), int | None) or isinstance(body.get(name), bool):
            raise ValueError(f"{name} {body[name]!r}; wanted a count of tokens")
    return {key: value for key, value in body.items() if key.lower() not in SECRETS}


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _seconds(value: Any) -> float | None:
    """Seconds, milliseconds since 1970, or a date as ISO 8601 writes it."""
    if value is None:
        return None
    if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
        return datetime.fromisoformat(value).timestamp()
    found = float(value)
    if not math.isfinite(found) or isinstance(value, bool):
        raise ValueError(f"a time of {value}; wanted seconds")
    return found / 1000 if found > 1e11 else found


def _count(value: Any) -> int:
    count = int(value)
    if count < 0 or count != float(value):
        raise ValueError(f"a length of {value}; wanted a count of tokens")
    return count


def _name(value: Any) -> str | None:
    return None if value is None else str(value)


# ── text of our own ───────────────────────────────────────────────────────────────────────────────────────────────────

VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work government number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power hour"
)
"""Each about one token to most tokenizers."""
WORDS = VOCABULARY.split()
LONGEST = 4_000_000
"""Tokens; a length beyond it is a mistake."""


@functools.lru_cache(maxsize=4096)
def words(seed: str, count: int) -> str:
    """`count` words that follow from `seed`."""
    return " ".join(random.Random(seed).choices(WORDS, k=count)) + " "


def _synthesised(row: Mapping[str, Any], name: str, at_s: float, session: str | None, block: int) -> Call:
    """A call of the right lengths whose text begins as that of other calls with the same hash ids does."""
    length, answer = _count(row["input_length"]), _count(row["output_length"])
    if answer == 0:
        raise _Unanswered
    if not 0 < length <= LONGEST:
        raise ValueError(f"an input_length of {length}")
    blocks = [str(entry) for entry in row.get("hash_ids") or ()]
    if blocks and len(blocks) != math.ceil(length / block):
        raise ValueError(f"{len(blocks)} hash_ids don't fit {length} tokens in blocks of {block}")
    # where there are no hashes each call's text is its own from the first word on
    blocks = blocks or [f"{row.get('salt', name)}/{place}" for place in range(math.ceil(length / block))]
    text = "".join(words(entry, min(block, length - block * place)) for place, entry in enumerate(blocks)).rstrip()
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": answer}
    return Call(body, name, _seconds(at_s), session, answer, synthetic=True)


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────

HIDDEN = "hidden"
SETTINGS = {
    "model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "ignore_eos", "stream",
    "stream_options", "parallel_tool_calls",
}  # fmt: skip
"""What a redacted body keeps beside the lengths; all else, known or not, goes."""


def write(path: Path, calls: Iterable[Call], redact: bool = False) -> int:
    """Write calls in our own format, whole or not at all.  Returns how many.

    `redact` keeps lengths, settings, and a hash of each text with a key that is thrown away: who reads the file can tell which
    texts were equal, and can't find out what they said.
    """
    key = secrets.token_bytes(32)
    part = path.with_name(path.name + ".part")
    count = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for call in calls:
                file.write(json.dumps(_row(redacted(call, key) if redact else call)) + "\n")
                count += 1
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"can't write {path}: {error.strerror}; name a file in a folder that exists") from None
    finally:
        part.unlink(missing_ok=True)
    return count


def _row(call: Call) -> dict[str, Any]:
    meta = {"id": call.id, "synthetic": call.synthetic or None, "answer": call.answer}
    row = {
        "t": call.at_s, "session": call.session, "body": call.body, "expected_output_tokens": call.expected_tokens,
        "meta": {key: value for key, value in meta.items() if value is not None},
    }  # fmt: skip
    return {key: value for key, value in row.items() if value is not None}


def redacted(call: Call, key: bytes) -> Call:
    """The call without a word of anybody's."""
    body: dict[str, Any] = {
        name: value for name, value in call.body.items() if name in SETTINGS and isinstance(value, int | float | bool | None)
    }
    if isinstance(call.body.get("model"), str):
        body["model"] = call.body["model"]
    if "messages" in call.body:
        body["messages"] = [
            {"role": message["role"] if message["role"] in KNOWN_ROLES else "user", "content": _hidden(_said(message), key)}
            for message in call.body["messages"]
        ]
    else:
        body["prompt"] = _hidden(call.body["prompt"], key)
    session = None if call.session is None else keyed(call.session, key)
    return Call(body, keyed(call.id, key), call.at_s, session, call.expected_tokens, call.synthetic)


KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def _said(message: Mapping[str, Any]) -> Any:
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "name")}
    content = message.get("content")
    return [content, rest] if rest else content or ""


def _hidden(value: Any, key: bytes) -> dict[str, Any]:
    text = value if isinstance(value, str) else json.dumps(value)
    return {HIDDEN: keyed(text, key), "characters": len(text)}


def keyed(text: str, key: bytes) -> str:
    """A hash that can't be found by trying texts, without the key."""
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]


def _shown_again(body: Any) -> tuple[Any, bool]:
    """A redacted body with words in the place of what was hidden, and whether there was any."""
    found = False

    def shown(value: Any) -> Any:
        nonlocal found
        if isinstance(value, dict) and HIDDEN in value:
            found = True
            length = _count(value.get("characters", 0))
            return words(str(value[HIDDEN]), length // 3 + 1)[:length]
        return value

    if not isinstance(body, dict):
        return body, False
    copy = {key: shown(value) for key, value in body.items()}
    if isinstance(copy.get("messages"), list):
        copy["messages"] = [
            message | {"content": shown(message.get("content"))} if isinstance(message, dict) else message
            for message in copy["messages"]
        ]
    return copy, found
