"""Prompts in any form, normalised: each a text, a list of token ids, or the messages of one chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from outrider.errors import DataError, first_line
from outrider.targets.text import chat

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
EXPECTED = "give a text, token ids or chat messages, or many of these"
PLAIN = (int, str, list)
"""Types of nearly every item, checked first since checking for an array is slow."""


@runtime_checkable
class Array(Protocol):
    """A tensor or a numpy array."""

    ndim: int

    def tolist(self) -> Any: ...


def listed(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list; an iterator is read to its end.

    An array [S] is one prompt, an array [B, S] is B of them; padding in a tokenizer's output is removed.  Raises
    DataError for anything that is not a prompt.
    """
    plain = _plain(prompts)
    if isinstance(plain, str) or _is_message(plain):
        return [single(plain)]
    items = [_plain(item) for item in _iterated(plain)]
    if items and (_is_message(items[0]) or not isinstance(items[0], str | Iterable)):
        return [single(items)]
    return [single(item) for item in items]


def single(prompt: Any) -> Prompt:
    """One prompt, from any form, including an array, a tokenizer's output, or a single message.  Raises DataError for
    anything else."""
    plain = _plain(prompt)
    if isinstance(plain, str):
        return plain
    if _is_message(plain):
        return [plain]
    items = [_plain(item) for item in _iterated(plain)]
    if len(items) == 1 and isinstance(items[0], list):  # a batch of one
        items = items[0]
    if items and all(map(_is_message, items)):
        return items
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise DataError(f"a prompt holds {item!r}, which is not a token id; {EXPECTED}")
    return list(map(int, items))


def is_chat(prompt: Prompt) -> bool:
    """Whether a plain prompt is the messages of a chat."""
    return not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], int)


def ids_of(
    prompt: Any, tokenizer: Any, vocabulary: int, media: Mapping[int, str], thinking: bool | None = None,
    tools: chat.Tools = (),
) -> list[int]:  # fmt: skip
    """Like `TransformersTarget.encode`, with its errors.  media: placeholder ids of images, videos or audio."""
    plain = single(prompt)
    if not plain or isinstance(plain[0], int):
        return _checked(plain, vocabulary, media)  # type: ignore[arg-type]
    if tokenizer is None:
        raise DataError("this target was loaded without a tokenizer: pass prompts as lists of token ids")
    try:
        return _checked(_encoded(plain, tokenizer, thinking, tools), vocabulary, media, tokenizer)
    except DataError:
        raise
    except (TypeError, ValueError, LookupError) as error:
        raise DataError(f"the tokenizer can't read the prompt {prompt!r}: {first_line(error)}; correct it") from error


def _encoded(prompt: Any, tokenizer: Any, thinking: bool | None, tools: chat.Tools) -> list[int]:
    """Token ids of a text or of chat messages, by the tokenizer."""
    if isinstance(prompt, str):
        return encoded(prompt, tokenizer)
    if tokenizer.chat_template is None:
        raise DataError("the tokenizer has no chat template: pass the prompt as one text instead of chat messages")
    options = {} if thinking is None else {"enable_thinking": thinking}
    return chat.rendered(tokenizer, prompt, tools, options, add_generation_prompt=True)


def encoded(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text with the tokenizer's beginning token, once even if a chat template already wrote it."""
    tokens: list[int] = list(tokenizer.encode(text, add_special_tokens=True))
    begin = _beginning(tokenizer)
    count = len(begin)
    is_double = tokens[: 2 * count] == 2 * begin and text.startswith(tokenizer.decode(begin[:1])) if count else False
    return tokens[count:] if is_double else tokens


def _beginning(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before a text, such as one beginning token, or GLM's two."""
    whole, plain = (list(tokenizer.encode("a", add_special_tokens=adds)) for adds in (True, False))
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def unembedded(tokenizer: Any, vocabulary: int) -> dict[str, int]:
    """Tokens without an embedding in a model with this vocabulary, since they were only added to the tokenizer."""
    if tokenizer is None or len(tokenizer) <= vocabulary:
        return {}
    return {name: token for name, token in tokenizer.get_vocab().items() if token >= vocabulary}


def refuse_unembedded(texts: Iterable[str], tokenizer: Any, vocabulary: int) -> None:
    """Raises DataError for a text with a token that has no embedding."""
    names = unembedded(tokenizer, vocabulary)
    for name in (name for text in texts for name in names if name in text):
        raise DataError(_without_row(name, names[name], vocabulary))


def _without_row(name: str, token: int, vocabulary: int) -> str:
    return (
        f"the tokenizer has the token {name!r} ({token}), but the model's embedding has {vocabulary} rows: resize the "
        "model with model.resize_token_embeddings and train that row, or remove the token from the text"
    )


def _checked(tokens: list[int], vocabulary: int, media: Mapping[int, str], tokenizer: Any = None) -> list[int]:
    if not tokens:
        raise DataError("the prompt is empty; give at least one token of text")
    for token in tokens:
        if not 0 <= token < vocabulary:
            if tokenizer is not None:
                raise DataError(_without_row(tokenizer.convert_ids_to_tokens(token), token, vocabulary))
            raise DataError(
                f"token id {token} is outside the target's vocabulary of {vocabulary}; use the target's own tokenizer"
            )
        if token in media:
            raise DataError(
                f"token id {token} is a placeholder for an image, a video or audio ({media[token]}), but targets read "
                "only text; remove it"
            )
    return tokens


def _plain(value: Any) -> Any:
    """Arrays as lists, and the ids of a tokenizer's output."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Array):
        return value.tolist()
    if not isinstance(value, Mapping) or "input_ids" not in value:
        return value
    ids, mask = _plain(value["input_ids"]), _plain(value.get("attention_mask"))
    if mask is None:
        return ids
    if ids and isinstance(ids[0], list):
        return [_unpadded(*row) for row in zip(ids, mask, strict=True)]
    return _unpadded(ids, mask)


def _unpadded(ids: Sequence[int], mask: Sequence[int]) -> list[int]:
    return [token for token, is_real in zip(ids, mask, strict=True) if is_real]


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str)


def _iterated(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        raise DataError(
            f"a prompt can't be a mapping with the keys {', '.join(map(repr, value)) or '(none)'}; give a text, token "
            "ids, or a list of chat messages, each with `role` and `content`"
        )
    if isinstance(value, bytes | bytearray) or not isinstance(value, Iterable):
        raise DataError(f"a prompt can't be {value!r}; {EXPECTED}")
    return value
