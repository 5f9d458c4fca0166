"""Which part of a text can still be changed by later tokens, from a tokenizer's decoder.

The supported decoder steps turn each token into text independently, except the first of a text (Metaspace, WordPiece,
Strip), partial characters (ByteLevel) and runs of byte tokens (ByteFallback).  With any other step, with a tokenizer
written in Python, or with one that does more than its decoder, a text is returned only as a whole, at its end.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from outrider.sampling.text import Detokenizer

SINGLE: tuple[list[str], ...] = ([], ["ByteLevel"], ["Metaspace"], ["WordPiece"])
"""Decoders of one step or none; without one, tokens are joined by a space."""
SENTENCEPIECE = re.compile(r"(Replace )?(ByteFallback )?(Fuse (Strip )?)?")
"""The steps of SentencePiece models, in order."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CLEANED = " 'nvr"
"""Letters after which the clean-up of spaces can still change a text; it replaces " .", " ' ", " n't", " 've", " 're"
and similar."""


def detokenizer(tokenizer: Any, vocabulary: int, skip_special_tokens: bool = True) -> Detokenizer:
    """The incremental decoder of this tokenizer.  vocabulary: number of ids that a model may emit, which can exceed the
    tokenizer's."""
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
    """The steps of its decoder, as in `tokenizer.json`."""
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
    """Whether transformers removes spaces from the decoded text."""
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    corrupts: bool = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return bool(tokenizer.clean_up_tokenization_spaces) and (not is_bpe or corrupts)


def _is_all(tokenizer: PreTrainedTokenizerFast, decode: functools.partial[str], tokens: list[int]) -> bool:
    """Whether `decode` is only the decoder and the clean-up, tested on the text of all tokens."""
    text = tokenizer.backend_tokenizer.decode(tokens, **decode.keywords)
    return decode(tokens) == (tokenizer.clean_up_tokenization(text) if _is_cleaned(tokenizer) else text)


def _unknown(tokenizer: Any, fallback: Detokenizer) -> Detokenizer:
    logging.getLogger(__name__).warning(
        "the decoder of %s is not supported: its text is not streamed but sent at the end; tokens and stop strings are "
        "not affected",
        type(tokenizer).__name__,
    )
    return fallback


def showing(decoder: Detokenizer, tokenizer: Any, marks: Collection[str]) -> Detokenizer:
    """The detokenizer, with these special tokens as part of the text."""
    skipped = {token: name for token, name in decoder.skipped.items() if name not in marks}
    if len(skipped) == len(decoder.skipped):
        return decoder
    # the tokens to skip never reach `decode`
    return replace(decoder, decode=functools.partial(tokenizer.decode, skip_special_tokens=False), skipped=skipped)
