"""How a chat template ends an assistant's turn, read off what it writes.

A checkpoint may name three different ends: in its generation_config, in its tokenizer and in its template.  Where the
template's is missing from the first, which is what `generate` stops at, answers run on into turns of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

ANSWER = "Yes, of course."
"""An answer that no template writes itself."""


class Closing(NamedTuple):
    """What a template writes after an answer."""

    end: int
    """The special token that comes first: it ends the turn."""
    rest: tuple[int, ...]
    """What follows it, such as a line break."""


_turns: WeakKeyDictionary[Any, tuple[str, Closing | None]] = WeakKeyDictionary()
"""By tokenizer: its template, and what that closes a turn with."""


def closing_of(tokenizer: Any) -> Closing | None:
    """What the chat template closes an assistant's turn with; None without a template, or where no special token
    does."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return None
    previous, closing = _turns.get(tokenizer, ("", None))
    if previous != template:
        closing = _read(tokenizer)
        _turns[tokenizer] = template, closing
    return closing


def _read(tokenizer: Any) -> Closing | None:
    messages = [{"role": "user", "content": "Can you?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, ValueError):  # it refuses such a chat, or asks for more than messages
        return None
    _, is_there, after = text.rpartition(ANSWER)
    ids = tokenizer.encode(after, add_special_tokens=False) if is_there and after else []
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return Closing(ids[0], tuple(ids[1:])) if ids and ids[0] in special else None


def runs_on(answer: str, tokenizer: Any) -> bool:
    """Whether an answer's text spells the token that ends turns: it was written with another end, and goes on."""
    closing = closing_of(tokenizer)
    return closing is not None and tokenizer.convert_ids_to_tokens(closing.end) in answer


def names_of(tokens: Sequence[int], tokenizer: Any) -> str:
    """These ids with their texts, for messages."""
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in tokens) or "none"
