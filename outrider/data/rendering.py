"""Renders conversations as the target's tokens and decides which tokens are trained on.

If the chat template marks what the assistant generates (`{% generation %}`), the marks decide.  Otherwise an answer is
what follows its prompt, and is trained on if the prompt, as an engine renders it, is a prefix of the whole.  If a
boundary is uncertain (a template that rewrites earlier turns, a token on both sides), or an answer spells out the token
that ends a turn, the answer is counted and not trained on.
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
    """Token ids, and the spans [start, end) of them that are trained on."""

    tokens: list[int]
    learn: list[tuple[int, int]]
    unstable: int = 0
    """Number of answers that are not trained on because their boundaries are uncertain."""


def template_hash(tokenizer: Any) -> str | None:
    """Hash, 16 hex digits, of the chat template; None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]


def prompt_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], thinking: bool | None = None, tools: Tools = ()
) -> list[int]:
    """The tokens of a prompt: rendered by the chat template or, without one, the concatenated texts.

    thinking: passed to the template as `enable_thinking`, unless None.  tools: passed to it, if any.
    Raises DataError if the template refuses the messages.
    """
    return _tokens(tokenizer, messages, tools, _variables(thinking), is_prompt=True)


def check_template(
    tokenizer: Any, conversation: Conversation, thinking: bool | None = None, answered: bool = False
) -> None:  # fmt: skip
    """Raises DataError with file and line if the chat template refuses a prompt of this conversation.

    answered: also check it with its answers from the source, which are then trained on.
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
        if messages and messages[-1]["role"] == "user":  # stands in for the target's answer, which is not known yet
            messages.append({"role": "assistant", "content": "yes"})
        messages.append(message)
        if message["role"] == "user" and getattr(tokenizer, "chat_template", None) is not None:
            with at_place(conversation):
                _templated(tokenizer, messages, conversation.tools, variables, add_generation_prompt=True)


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], length: int, thinking: bool | None = None, tools: Tools = ()
) -> Rendered:
    """A whole conversation as tokens, cut at `length`; the assistant's turns, including their end tokens, are trained
    on."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if not last:  # a greeting is not an answer: there is no prompt before it
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
    """Train what the template marks as generated; a mark inside a token is uncertain."""
    try:
        marked = chat.marked(tokenizer, messages, tools, variables)
    except DataError as error:
        raise _to_correct(error) from error.__cause__
    marks, offsets = marked.spans, np.asarray(marked.offsets).reshape(-1, 2)
    learn, unstable = [], 0
    answers = [message for message in messages if message["role"] == "assistant"]
    if len(marks) != len(answers) and not all(map(_trains, answers)):  # marks can't be assigned to answers
        return Rendered(marked.ids, [], len(answers))
    trains = [_trains(message) for message in answers] if len(marks) == len(answers) else [True] * len(marks)
    if messages[0]["role"] == "assistant":  # a greeting answers nothing
        trains[:1] = [False]
    for (start, end), is_trained in zip(marks, trains, strict=True):
        if start == end or not is_trained:
            continue
        # several tokens may be the bytes of one character, and all have its offsets
        inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if not len(inside) or offsets[inside[0], 0] < start or offsets[inside[-1], 1] > end:
            unstable += 1
        else:
            learn.append((int(inside[0]), int(inside[-1]) + 1))
    return Rendered(marked.ids, learn, unstable)


def _trains(message: Mapping[str, Any]) -> bool:
    """Whether an answer is trained on: with weight 0 it is only part of the prompt of later ones."""
    return message.get("weight") != 0


def _by_prompts(tokenizer: Any, messages: chat.Messages, tools: Tools, variables: Mapping[str, Any]) -> Rendered:
    """Train what follows each prompt, if the prompt and its answer are a prefix of the whole."""
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
    """The tokens of messages, followed by the start of an answer (`is_prompt`) or the end of the last message.

    is_open: without a template, leave out the end, since more follows.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        return list(_templated(tokenizer, messages, tools, variables, add_generation_prompt=is_prompt))
    end = [] if is_prompt or is_open or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    text = "".join(message["content"] for message in messages)
    return text_tokens(tokenizer, text) + end


def _variables(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking}


def _templated(
    tokenizer: Any, messages: chat.Messages, tools: Tools, variables: Mapping[str, Any], add_generation_prompt: bool
) -> list[int]:
    """`chat.rendered`, with advice about the row in its errors."""
    try:
        return chat.rendered(tokenizer, messages, tools, variables, add_generation_prompt=add_generation_prompt)
    except DataError as error:
        raise _to_correct(error) from error.__cause__


def _to_correct(error: DataError) -> DataError:
    return DataError(f"{error}; correct the row, or skip such rows with --skip-bad")
