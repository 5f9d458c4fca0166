"""Which part of a text later tokens may still change, read off a tokenizer's decoder.

The steps of a decoder that are known here turn each token into text by itself, but for the first of a text (Metaspace,
WordPiece, Strip), half characters (ByteLevel) and runs of byte tokens (ByteFallback).  Of a decoder with any other
step, of a tokenizer written in Python, and of one that does more than its decoder says, nothing is known: texts come
whole, at their end.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from typing import Any

from transformers import PreTrainedTokenizerFast

from outrider.sampling.text import Detokenizer

SINGLE: tuple[list[str], ...] = ([], ["ByteLevel"], ["Metaspace"], ["WordPiece"])
"""Decoders of one step, and none at all, where tokens are joined by a space."""
SENTENCEPIECE = re.compile(r"(Replace )?(ByteFallback )?(Fuse (Strip )?)?")
"""The steps of SentencePiece's models, in their order."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CLEANED = " 'nvr"
"""Letters after which the clean-up of spaces may still change a text; it replaces " .", " ' ", " n't", " 've", " 're"
and the like."""


def detokenizer(tokenizer: Any, vocabulary: int, skip_special_tokens: bool = True) -> Detokenizer:
    """How this tokenizer's ids become text.  vocabulary: ids that a model may emit, which can be more than have a
    name."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return _unknown(tokenizer, Detokenizer(decode))
    names: dict[str, int] = tokenizer.get_vocab()
    skipped = dict.fromkeys(set(range(vocabulary)).difference(names.values()), "")
    if skip_special_tokens:
        skipped |= {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    steps, is_cleaned = _steps(tokenizer), _is_cleaned(tokenizer)
    byte_tokens = {token: int(match[1], 16) for name, token in names.items() if (match := BYTE.fullmatch(name))}
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    if not _is_known(steps) or (has_bytes and is_cleaned) or not _is_all(tokenizer, decode, sorted(names.values())):
        return _unknown(tokenizer, Detokenizer(decode, skipped=skipped))
    return Detokenizer(decode, True, byte_tokens if has_bytes else {}, skipped, CLEANED if is_cleaned else "")


def _steps(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """The steps of its decoder, as `tokenizer.json` has them."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_known(steps: list[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in steps]
    if kinds in SINGLE:
        return True
    settings = {step["type"]: step for step in steps}
    replaces, strips = settings.get("Replace"), settings.get("Strip")
    return (
        SENTENCEPIECE.fullmatch("".join(f"{kind} " for kind in kinds)) is not None
        and (replaces is None or (replaces["pattern"], replaces["content"]) == ({"String": "▁"}, " "))
        and (strips is None or strips["stop"] == 0)
    )


def _is_cleaned(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether transformers takes spaces out of the text after the decoder."""
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    corrupts: bool = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return bool(tokenizer.clean_up_tokenization_spaces) and (not is_bpe or corrupts)


def _is_all(tokenizer: PreTrainedTokenizerFast, decode: functools.partial[str], tokens: list[int]) -> bool:
    """Whether `decode` is the decoder and the clean-up, and no more: the text of all its tokens shows it."""
    text = tokenizer.backend_tokenizer.decode(tokens, **decode.keywords)
    return decode(tokens) == (tokenizer.clean_up_tokenization(text) if _is_cleaned(tokenizer) else text)


def _unknown(tokenizer: Any, fallback: Detokenizer) -> Detokenizer:
    logging.getLogger(__name__).warning(
        "the decoder of %s is not known here: streamed text comes whole, at its end; tokens and stop strings are not "
        "affected",
        type(tokenizer).__name__,
    )
    return fallback
