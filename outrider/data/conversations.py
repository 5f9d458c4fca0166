"""Read conversations from wherever they are, render them as the target sees them, and mark the tokens that train.

Sources: `stdlib:train` and `stdlib:held_out` (the demo's prompts), FILE.jsonl, FILE.txt (a prompt a line), or a data set's
name on the Hugging Face hub.  A JSONL row has one of `messages`, `conversations`, `turns`, `prompt` (with `response`),
`instruction` (with `input` and `output`), `text`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from jinja2 import TemplateError
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from outrider import demo
from outrider.config import Config as Base
from outrider.errors import DataError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
         "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool"}  # fmt: skip

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON can hold it, no tokenizer can read it."""


class Config(Base):
    """Where prompts come from, and how the target answers them."""

    conversations: str = "stdlib:train"
    """`stdlib:train`, FILE.jsonl, FILE.txt, or a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    count: PositiveInt = 1000
    """Most conversations used."""
    length: PositiveInt = 4096
    """Most tokens of one text; what is beyond is cut off."""
    regenerate: bool = True
    """Let the target write the answers.  A drafter learns the target's own text best; false keeps the answers given."""
    max_new_tokens: PositiveInt = 512
    """Longest answer."""
    temperature: NonNegativeFloat = 0.7
    top_p: float = Field(0.8, gt=0, le=1)
    top_k: NonNegativeInt = 20
    seed: int = 0
    slots: PositiveInt = 16
    """Answers written at the same time."""
    folder: str | None = None
    """Where the answers go; runs that name the same folder share them.  The run's own folder unless given."""
    grams: bool = True
    """Keep hashes of prompts and answers, so that a drafter can be asked later what it was trained on; see docs/overlap.md."""
    skip_bad: bool = False
    """Count rows that can't be read and go on, instead of stopping at the first."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, as it was given."""

    id: str
    """The row's own, or its place where it has none."""
    messages: list[dict[str, str]]
    place: str = ""
    """File and line, for errors."""

    @property
    def has_own_id(self) -> bool:
        return self.id != self.place

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)


@dataclass(slots=True)
class Rendered:
    """Token ids, and which of them train: spans [start, end)."""

    tokens: list[int]
    learn: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Skipped:
    """Rows left out, and why."""

    reasons: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.reasons)


def read(config: Config, skipped: Skipped | None = None) -> Iterator[Conversation]:
    """Up to `config.count` conversations.  Raises DataError with file and line for a bad row, or counts it in `skipped`."""
    skipped = Skipped() if skipped is None else skipped
    source = config.conversations
    if source.startswith("stdlib:"):
        rows: Iterator[tuple[str, Any]] = _library(source.removeprefix("stdlib:"), config)
    elif source.endswith(".jsonl"):
        rows = _jsonl(Path(source), config.skip_bad, skipped)
    elif source.endswith(".txt"):
        rows = _texts(Path(source))
    else:
        rows = _hub(source, config.split)
    seen: set[str] = set()
    for name, row in rows:
        try:
            conversation = parse(row, name)
        except DataError as error:
            if not config.skip_bad:
                raise
            skipped.reasons.append(str(error))
            continue
        if conversation.id in seen:  # reports list prompts by their id: a second row of one id gets its place added
            conversation = replace(conversation, id=f"{conversation.id} at {name}")
        seen.add(conversation.id)
        yield conversation
        if len(seen) == config.count:
            return
    if not seen:
        raise DataError(f"{source} holds no conversation; a row needs one of messages, conversations, turns, prompt, text")


def parse(row: Any, name: str) -> Conversation:
    """One row in any of the known layouts.  `name` says where it stands, for its id and for errors."""
    if not isinstance(row, Mapping):
        raise DataError(f"{name}: a row must be a mapping, not {type(row).__name__}")
    given, turns = row.get("messages") or row.get("conversations"), row.get("turns")
    if given and not isinstance(given, list):
        raise DataError(f"{name}: messages or conversations must be a list of messages, not {given!r:.80}")
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise DataError(f"{name}: turns must be a list of texts, not {turns!r:.80}")
    if given:
        messages = [_message(message, name) for message in given]
    elif turns:
        messages = [{"role": "user", "content": turn} for turn in turns]
    elif row.get("prompt") or row.get("instruction") or row.get("text"):
        messages = _prompt_and_answer(row, name)
    else:
        raise DataError(
            f"{name}: none of messages, conversations, turns, prompt, text is there; keys: {', '.join(map(str, row)) or 'none'}"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise DataError(f"{name}: the conversation has no user turn with text")
    conversation = Conversation(name if row.get("id") is None else str(row["id"]), messages, name)
    for text in (conversation.id, *(message["content"] for message in messages)):
        if broken := SURROGATE.search(text):
            raise DataError(
                f"{name}: the text holds {broken[0]!a}, one half of a surrogate pair, which is not a character; "
                "write the character itself or leave it out"
            )
    return conversation


def _prompt_and_answer(row: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    """The messages of a row that holds one prompt, with the answer given where there is one."""
    asked = _text(row, ("prompt", "instruction", "text"), name)
    given = "" if row.get("prompt") else _text(row, ("input",), name)
    messages = [{"role": "user", "content": asked + (f"\n\n### Input:\n{given}" if given else "")}]
    if answer := _text(row, ("response", "completion", "output"), name):
        messages.append({"role": "assistant", "content": answer})
    return messages


def _text(row: Mapping[str, Any], keys: Sequence[str], name: str) -> str:
    """The first of these fields that is filled in; empty where none is.  Raises DataError for one that is not text."""
    key = next((key for key in keys if row.get(key) not in (None, "")), None)
    if key is None:
        return ""
    text = row[key]
    if not isinstance(text, str):
        raise DataError(f"{name}: {key} must be text, not {text!r:.80}; a list of messages belongs in `messages`")
    return text


def _message(message: Any, name: str) -> dict[str, str]:
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        raise DataError(
            f"{name}: a message needs a role ({', '.join(sorted(set(ROLES.values())))}) and text as content, "
            f"not {message!r:.80}"
        )
    return {"role": ROLES[role], "content": content}


def _library(split: str, config: Config) -> Iterator[tuple[str, Any]]:
    if split not in get_args(demo.Split):
        raise DataError(f"stdlib:{split} is unknown; use stdlib:train or stdlib:held_out")
    # to train, short prompts: reading one costs as much as writing its answer, and teaches nothing
    characters = 240 if split == "train" else 600
    for name, text in demo.prompts(cast(demo.Split, split), config.count, config.seed, characters):
        yield name, {"id": name, "prompt": text}


def _texts(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number} is not UTF-8 text: {error}") from None
        if text.strip():
            yield f"{path.name}:{number}", {"prompt": text}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines as bytes: a torn character spoils its own line alone.  A byte order mark at the start is left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f"{path}, line 1 begins with the mark of UTF-16; save the file as UTF-8")
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; name a file of prompts, or stdlib:train for the demo's") from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from None


def _jsonl(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield f"{path.name}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = " (the line is cut off)" if not line.endswith(b"\n") else ""
            problem = f"{path}, line {number} is not JSON{cut}: {error}; mend it, or leave such lines out with --skip-bad"
            if not skip_bad:
                raise DataError(problem) from None
            skipped.reasons.append(problem)


def _hub(name: str, split: str) -> Iterator[tuple[str, Any]]:
    import datasets  # a second to import, and only needed here

    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        for number, row in enumerate(rows):
            yield f"{name}[{number}]", row
    except (OSError, ValueError, ConnectionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"can't load data set {name!r}: {first}; give a local .jsonl file where there is no network") from None


def template_hash(tokenizer: Any) -> str | None:
    """16 hex digits that tell two chat templates apart; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]


def prompt_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """What the target reads before it answers: the chat template's rendering, or the plain texts one after the other.

    Raises DataError where the template refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer.encode("".join(message["content"] for message in messages))
    return _templated(tokenizer, messages, add_generation_prompt=True)


def check_template(tokenizer: Any, conversation: Conversation) -> None:
    """Raises DataError with file and line where the chat template refuses a prompt of this conversation."""
    said: list[Mapping[str, str]] = []
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        if said and said[-1]["role"] == "user":  # the target's own answer, which is not known yet
            said.append({"role": "assistant", "content": "yes"})
        said.append(message)
        if message["role"] == "user" and getattr(tokenizer, "chat_template", None) is not None:
            with at_place(conversation):
                _templated(tokenizer, said, add_generation_prompt=True, tokenize=False)


@contextmanager
def at_place(conversation: Conversation) -> Iterator[None]:
    """A DataError from inside says which row it is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{conversation.place or conversation.id}: {error}") from error.__cause__


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], length: int) -> Rendered:
    """A whole conversation as tokens, the assistants' turns (with what closes them) marked to train, cut at `length`."""
    rendered, turns = Rendered([]), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:  # a greeting answers nothing, and no template renders what came before it
            continue
        before = prompt_tokens(tokenizer, messages[:i])
        whole = _closed(tokenizer, messages[: i + 1])
        rendered.tokens = whole
        turns.append((_shared(before, whole), whole))
    # what a later rendering changed of a turn (its end, where there is no template) does not train
    spans = [(start, min(_shared(whole, rendered.tokens), length)) for start, whole in turns]
    rendered.tokens = rendered.tokens[:length]
    rendered.learn = [(start, end) for start, end in spans if start < end]
    return rendered


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    ends = min(len(one), len(other))
    return next((n for n in range(ends) if one[n] != other[n]), ends)


def _closed(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return tokenizer.encode("".join(message["content"] for message in messages)) + end
    return _templated(tokenizer, messages)


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, tokenize: bool = True, **choices: bool) -> Any:
    """What the chat template makes of these messages: token ids, or with `tokenize=False` the text."""
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=tokenize, return_dict=False, **choices)
    except (TemplateError, TypeError) as error:  # a template adds texts with +, and a tokenizer adds no number to one
        raise DataError(
            f"the target's chat template refuses these messages ({error}); mend the row, or leave such rows out with --skip-bad"
        ) from error
