"""Conversations as the target's tokens, and which of them train."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from outrider.data.conversations import Conversation, at_place
from outrider.errors import DataError


class Rendered(NamedTuple):
    """Token ids, and which of them train: spans [start, end)."""

    tokens: list[int]
    learn: list[tuple[int, int]]


def template_hash(tokenizer: Any) -> str | None:
    """16 hex digits of the chat template's hash; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]


def prompt_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a prompt: rendered by the chat template, or the plain texts one after the other.

    Raises DataError where the template refuses the messages.
    """
    return _tokens(tokenizer, messages, is_prompt=True)


def check_template(tokenizer: Any, conversation: Conversation) -> None:
    """Raises DataError with file and line where the chat template refuses a prompt of this conversation."""
    messages: list[Mapping[str, str]] = []
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        if messages and messages[-1]["role"] == "user":  # in place of the target's own answer, which is not known yet
            messages.append({"role": "assistant", "content": "yes"})
        messages.append(message)
        if message["role"] == "user" and getattr(tokenizer, "chat_template", None) is not None:
            with at_place(conversation):
                _templated(tokenizer, messages, add_generation_prompt=True, tokenize=False)


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], length: int) -> Rendered:
    """A whole conversation as tokens, the assistants' turns (with what closes them) marked to train, cut at
    `length`."""
    tokens, turns = list[int](), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:  # a greeting answers nothing, and there is no prompt before it
            tokens = _tokens(tokenizer, messages[: i + 1], is_prompt=False)
            turns.append((_shared(prompt_tokens(tokenizer, messages[:i]), tokens), tokens))
    # tokens of a turn that a later rendering changed (its end, where there is no template) do not train
    spans = [(start, min(_shared(whole, tokens), length)) for start, whole in turns]
    return Rendered(tokens[:length], [(start, end) for start, end in spans if start < end])


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that two texts share from the start."""
    ends = min(len(one), len(other))
    return next((n for n in range(ends) if one[n] != other[n]), ends)


def _tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]], is_prompt: bool) -> list[int]:
    """The messages' tokens, followed by the start of an answer or by the end of the last message."""
    if getattr(tokenizer, "chat_template", None) is not None:
        return _templated(tokenizer, messages, add_generation_prompt=is_prompt)
    end = [] if is_prompt or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tokenizer.encode("".join(message["content"] for message in messages)) + end


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, tokenize: bool = True, **choices: bool) -> Any:
    """The chat template's rendering of these messages: token ids, or with `tokenize=False` the text."""
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=tokenize, return_dict=False, **choices)
    except (TemplateError, TypeError) as error:  # a template adds texts with +, and a tokenizer adds no number to one
        what = f"the target's chat template refuses these messages ({error})"
        raise DataError(f"{what}; correct the row, or skip such rows with --skip-bad") from error
