"""Conversations as the tokens that the target sees, and which of them train."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from outrider.data.conversations import Conversation, at_place
from outrider.errors import DataError


@dataclass(slots=True)
class Rendered:
    """Token ids, and which of them train: spans [start, end)."""

    tokens: list[int]
    learn: list[tuple[int, int]] = field(default_factory=list)


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
