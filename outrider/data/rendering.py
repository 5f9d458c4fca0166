"""Conversations as the target's tokens, and which of them train.

Where the chat template marks what the assistant generates (`{% generation %}`), the marks decide.  Else an answer is
what follows its prompt: it trains where the prompt, as the engine renders it, is a beginning of the whole.  Where a
boundary is not sure (a template that rewrites earlier turns, a token on both sides), or where an answer spells the
token that ends a turn, it does not train and is counted.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.data.sources.conversations import Conversation, at_place
from outrider.errors import DataError
from outrider.targets.text import chat
from outrider.targets.text.control import text_tokens
from outrider.targets.text.parts import text_of
from outrider.targets.text.turns import runs_on

Tools = chat.Tools
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
    return _tokens(tokenizer, messages, tools, _variables(thinking), is_prompt=True)


def check_template(
    tokenizer: Any, conversation: Conversation, thinking: bool | None = None, answered: bool = False
) -> None:  # fmt: skip
    """Raises DataError with file and line where the chat template refuses a prompt of this conversation.

    answered: with the conversation's own answers, which train, in place of the target's.
    """
    messages: list[Mapping[str, Any]] = []
    variables = _variables(thinking)
    if answered and getattr(tokenizer, "chat_template", None) is not None:
        with at_place(conversation):
            _templated(
                tokenizer, conversation.messages, conversation.tools, variables, add_generation_prompt=False
            )  # fmt: skip
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        if messages and messages[-1]["role"] == "user":  # in place of the target's own answer, which is not known yet
            messages.append({"role": "assistant", "content": "yes"})
        messages.append(message)
        if message["role"] == "user" and getattr(tokenizer, "chat_template", None) is not None:
            with at_place(conversation):
                _templated(tokenizer, messages, conversation.tools, variables, add_generation_prompt=True)


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], length: int, thinking: bool | None = None, tools: Tools = ()
) -> Rendered:
    """A whole conversation as tokens, the assistants' turns (with what closes them) marked to train, cut at
    `length`."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if not last:  # a greeting answers nothing, and there is no prompt before it
        return Rendered([], [])
    messages = messages[: last + 1]
    sure = [{**message, "weight": 0} if _runs_on(tokenizer, message) else message for message in messages]
    template = getattr(tokenizer, "chat_template", None)
    is_marked = isinstance(template, str) and MARKS.search(template) is not None
    whole = (_by_marks if is_marked else _by_prompts)(tokenizer, sure, tools, _variables(thinking))
    cut = [(start, min(end, length)) for start, end in whole.learn if start < length]
    unsure = sum(map(_trains, messages)) - sum(map(_trains, sure))
    return Rendered(whole.tokens[:length], cut, whole.unstable + unsure)


def _runs_on(tokenizer: Any, message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and runs_on(text_of(message.get("content")), tokenizer)


def _by_marks(tokenizer: Any, messages: chat.Messages, tools: Tools, variables: Mapping[str, Any]) -> Rendered:
    """What the template marks as generated; a mark inside a token is not sure."""
    try:
        made = chat.marked(tokenizer, messages, tools, variables)
    except DataError as error:
        raise _to_correct(error) from error.__cause__
    marks, offsets, learn, unstable = made.spans, np.asarray(made.offsets).reshape(-1, 2), [], 0
    answers = [message for message in messages if message["role"] == "assistant"]
    if len(marks) != len(answers) and not all(map(_trains, answers)):  # which mark is whose is not known
        return Rendered(made.ids, [], len(answers))
    trains = [_trains(message) for message in answers] if len(marks) == len(answers) else [True] * len(marks)
    if messages[0]["role"] == "assistant":  # a greeting answers nothing
        trains[:1] = [False]
    for (start, end), is_trained in zip(marks, trains, strict=True):
        if start == end or not is_trained:
            continue
        # several tokens may be the bytes of one letter, and have its place each
        inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if not len(inside) or offsets[inside[0], 0] < start or offsets[inside[-1], 1] > end:
            unstable += 1
        else:
            learn.append((int(inside[0]), int(inside[-1]) + 1))
    return Rendered(made.ids, learn, unstable)


def _trains(message: Mapping[str, Any]) -> bool:
    """Whether an answer trains: not with a weight of 0, which makes it part of the prompt of later ones."""
    return message.get("weight") != 0


def _by_prompts(tokenizer: Any, messages: chat.Messages, tools: Tools, variables: Mapping[str, Any]) -> Rendered:
    """What follows each prompt, where the prompt and its answer are a beginning of the whole."""
    tokens = _tokens(tokenizer, messages, tools, variables, is_prompt=False)
    learn, unstable = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not i or not _trains(message):
            continue
        is_last, part = i == len(messages) - 1, messages[: i + 1]
        prompt = _tokens(tokenizer, messages[:i], tools, variables, is_prompt=True)
        answered = tokens if is_last else _tokens(tokenizer, part, tools, variables, is_prompt=False, is_open=True)
        if tokens[: len(answered)] != answered or answered[: len(prompt)] != prompt:
            unstable += 1
        elif len(prompt) < len(answered):
            learn.append((len(prompt), len(answered)))
    return Rendered(tokens, learn, unstable)


def _tokens(
    tokenizer: Any, messages: chat.Messages, tools: Tools, variables: Mapping[str, Any], *, is_prompt: bool,
    is_open: bool = False,
) -> list[int]:  # fmt: skip
    """The messages' tokens, followed by the start of an answer or by the end of the last message.

    is_open: where there is no template, more follows, so nothing ends.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        return list(_templated(tokenizer, messages, tools, variables, add_generation_prompt=is_prompt))
    end = [] if is_prompt or is_open or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    text = "".join(message["content"] for message in messages)
    return text_tokens(tokenizer, text) + end


def _variables(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking}


def _templated(
    tokenizer: Any, messages: chat.Messages, tools: Tools, variables: Mapping[str, Any], **options: bool
) -> Any:
    """`chat.rendered`, whose refusals say what to do with a row."""
    try:
        return chat.rendered(tokenizer, messages, tools, variables, **options)
    except DataError as error:
        raise _to_correct(error) from error.__cause__


def _to_correct(error: DataError) -> DataError:
    return DataError(f"{error}; correct the row, or skip such rows with --skip-bad")
