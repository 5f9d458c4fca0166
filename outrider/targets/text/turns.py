"""How a chat template ends an assistant's turn, found by rendering one.

A checkpoint may name three different end tokens: in its generation_config, its tokenizer and its template.  If the
template's is missing from generation_config, which decides where `generate` stops, answers run on into further turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

ANSWER = "Yes, of course."
"""An answer that no template contains."""


class Closing(NamedTuple):
    """The tokens that a template writes after an answer."""

    end: int
    """The first one, a special token, which ends the turn."""
    rest: tuple[int, ...]
    """The others, such as a line break."""


_turns: WeakKeyDictionary[Any, tuple[str, Closing | None]] = WeakKeyDictionary()
"""By tokenizer: its template, and how that closes a turn."""


def closing_of(tokenizer: Any) -> Closing | None:
    """How the chat template closes an assistant's turn; None without a template, or if no special token does."""
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
    except (TemplateError, TypeError, ValueError):  # it refuses such a chat, or needs more than messages
        return None
    _, is_there, after = text.rpartition(ANSWER)
    ids = tokenizer.encode(after, add_special_tokens=False) if is_there and after else []
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return Closing(ids[0], tuple(ids[1:])) if ids and ids[0] in special else None


def runs_on(answer: str, tokenizer: Any) -> bool:
    """Whether an answer contains the token that ends turns: it was generated with another end token and ran on."""
    closing = closing_of(tokenizer)
    return closing is not None and tokenizer.convert_ids_to_tokens(closing.end) in answer


def names_of(tokens: Sequence[int], tokenizer: Any) -> str:
    """These ids with their texts, for log and error messages."""
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in tokens) or "none"
