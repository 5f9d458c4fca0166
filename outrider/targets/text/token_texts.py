"""The text of single tokens, for answers with log probabilities.

`decode` of a single token loses the space before a word and the bytes of a partial character.  So tokens are named by
the bytes they add in the middle of a text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from outrider.targets.text.vocabulary import bytes_of_names


class TokenTexts:
    """Bytes and names of a tokenizer's ids; those of a special token are its name.  Empty for unknown ids."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._as_bytes = None if tokenizer is None else bytes_of_names(tokenizer)
        self._added = {} if tokenizer is None else {t: e.content for t, e in tokenizer.added_tokens_decoder.items()}
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = self._read(token)
        return self._bytes[token]

    def name_of(self, token: int) -> str:
        """Its text; for a partial character `bytes:` and its bytes, as in OpenAI's API."""
        piece = self.bytes_of(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _read(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b""
        if token in self._added:
            return str(self._added[token]).encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        piece = None if self._as_bytes is None or name is None else self._as_bytes(name)
        return str(self._tokenizer.decode([token])).encode() if piece is None else piece


class Offsets:
    """Start of each token in a text, in characters; a character of several tokens starts with the first of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.length = 0

    def push(self, pieces: Iterable[bytes]) -> list[int]:
        offsets = []
        for piece in pieces:
            offsets.append(self.length)
            self.length += len(self._decoder.decode(piece))
        return offsets
