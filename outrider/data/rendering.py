"""Conversations as the target's tokens, and which of them train.

Where the chat template marks what the assistant generates (`{% generation %}`), the marks decide.  Else an answer is
what follows its prompt: it trains where the prompt, as the engine renders it, is a beginning of the whole.  Where a
boundary is not sure (a template that rewrites earlier turns, a token on both sides), or where an answer goes on after
the token that ends a turn, it does not train and is counted.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.data.sources.conversations import Conversation, at_place
from outrider.errors import DataError
from outrider.targets.text.turns import runs_on

Tools = Sequence[Mapping[str, Any]]
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """Token ids, and which of them train: spans [start, end)."""

    tokens: list[int]
    learn: list[tuple[int, int]]
    unstable: int = 0
    """Answers that do not train, since where they begin or end is not sure."""


def template_hash(tokenizer: Any) -> str | None:
    """16 hex digits of the chat template's hash; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]


def prompt_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], thinking: bool | None = None, tools: Tools = ()
) -> list[int]:
    """The tokens of a prompt: rendered by the chat template, or the plain texts one after the other.

    thinking: handed to the template as `enable_thinking`, unless None.  tools: handed to it where there are some.
    Raises DataError where the template refuses the messages.
    """
    return _tokens(tokenizer, messages, _choices(thinking, tools), is_prompt=True)


def check_template(tokenizer: Any, conversation: Conversation, thinking: bool | None = None) -> None:
    """Raises DataError with file and line where the chat template refuses a prompt of this conversation."""
    messages: list[Mapping[str, Any]] = []
    choices = _choices(thinking, conversation.tools)
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        if messages and messages[-1]["role"] == "user":  # in place of the target's own answer, which is not known yet
            messages.append({"role": "assistant", "content": "yes"})
        messages.append(message)
        if message["role"] == "user" and getattr(tokenizer, "chat_template", None) is not None:
            with at_place(conversation):
                _templated(tokenizer, messages, choices, add_generation_prompt=True, tokenize=False)


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], length: int, thinking: bool | None = None, tools: Tools = ()
) -> Rendered:
    """A whole conversation as tokens, the assistants' turns (with what closes them) marked to train, cut at
    `length`."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if not last:  # a greeting answers nothing, and there is no prompt before it
        return Rendered([], [])
    messages = messages[: last + 1]
    template = getattr(tokenizer, "chat_template", None)
    is_marked = isinstance(template, str) and MARKS.search(template) is not None
    choices = _choices(thinking, tools)
    whole = _by_marks(tokenizer, messages, choices) if is_marked else _by_prompts(tokenizer, messages, choices)
    learn = [(start, end) for start, end in whole.learn if not runs_on(whole.tokens[start:end], tokenizer)]
    cut = [(start, min(end, length)) for start, end in learn if start < length]
    return Rendered(whole.tokens[:length], cut, whole.unstable + len(whole.learn) - len(learn))


def _by_marks(tokenizer: Any, messages: Sequence[Mapping[str, Any]], choices: Mapping[str, Any]) -> Rendered:
    """What the template marks as generated; a mark inside a token is not sure."""
    variables = {**tokenizer.special_tokens_map, **choices}
    draw: Any = render_jinja_template  # its annotation says that it returns one text
    with _as_data_error():
        texts, marks = draw(
            conversations=[list(messages)], chat_template=tokenizer.chat_template, return_assistant_tokens_mask=True,
            **variables,
        )  # fmt: skip
    made = tokenizer(texts[0], add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    offsets, learn, unstable = np.asarray(made["offset_mapping"]).reshape(-1, 2), [], 0
    answers = marks[0][1:] if messages[0]["role"] == "assistant" else marks[0]  # a greeting answers nothing
    for start, end in answers:
        if start == end:
            continue
        # several tokens may be the bytes of one letter, and have its place each
        inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if not len(inside) or offsets[inside[0], 0] < start or offsets[inside[-1], 1] > end:
            unstable += 1
        else:
            learn.append((int(inside[0]), int(inside[-1]) + 1))
    return Rendered(made["input_ids"], learn, unstable)


def _by_prompts(tokenizer: Any, messages: Sequence[Mapping[str, Any]], choices: Mapping[str, Any]) -> Rendered:
    """What follows each prompt, where the prompt and its answer are a beginning of the whole."""
    tokens = _tokens(tokenizer, messages, choices, is_prompt=False)
    learn, unstable = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not i:
            continue
        is_last = i == len(messages) - 1
        prompt = _tokens(tokenizer, messages[:i], choices, is_prompt=True)
        answered = tokens if is_last else _tokens(tokenizer, messages[: i + 1], choices, is_prompt=False, is_open=True)
        if tokens[: len(answered)] != answered or answered[: len(prompt)] != prompt:
            unstable += 1
        elif len(prompt) < len(answered):
            learn.append((len(prompt), len(answered)))
    return Rendered(tokens, learn, unstable)


def _tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], choices: Mapping[str, Any], *, is_prompt: bool,
    is_open: bool = False,
) -> list[int]:  # fmt: skip
    """The messages' tokens, followed by the start of an answer or by the end of the last message.

    is_open: where there is no template, more follows, so nothing ends.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        tokens: list[int] = _templated(tokenizer, messages, choices, add_generation_prompt=is_prompt)
        return tokens
    end = [] if is_prompt or is_open or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    text = "".join(message["content"] for message in messages)
    return list(tokenizer.encode(text)) + end


def _choices(thinking: bool | None, tools: Tools) -> dict[str, Any]:
    """What a template is handed beside the messages."""
    found: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return found | {"tools": list(tools)} if tools else found


def _templated(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], choices: Mapping[str, Any], *, tokenize: bool = True,
    add_generation_prompt: bool,
) -> Any:  # fmt: skip
    """The chat template's rendering of these messages: token ids, or with `tokenize=False` the text."""
    with _as_data_error():
        return tokenizer.apply_chat_template(
            list(messages), tokenize=tokenize, return_dict=False, add_generation_prompt=add_generation_prompt, **choices
        )


@contextmanager
def _as_data_error() -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError) as error:  # a template adds texts with +, and a tokenizer adds no number to one
        what = f"the target's chat template refuses these messages ({error})"
        raise DataError(f"{what}; correct the row, or skip such rows with --skip-bad") from error
