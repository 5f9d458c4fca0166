"""The text of a message's content, which may be a list of parts; and rows without nulls.  Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from outrider.errors import DataError

TEXT_PARTS = ("text", "input_text", "output_text")


def text_of(content: Any) -> str:
    """The text of a message's content, one line for each of its parts, as in vLLM.

    Raises DataError for a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise DataError(
                f"a chat message has a part of type {kind!r}, but targets read only text; use text as content, or "
                "parts of type 'text'"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def without_nulls(value: Any, kept: Collection[str] = ()) -> Any:
    """A JSON value without null fields at any depth, except under the keys `kept`."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one, kept) for key, one in value.items() if one is not None or key in kept}
    return [without_nulls(one, kept) for one in value] if isinstance(value, list | tuple) else value
