"""Where sentences end and where cue words stand in a text that grows token by token.

A token's text is what it adds to the text of the tokens before it, so that spaces and half characters come out as the
tokenizer writes them.  A sentence ends at a token that ends in `.`, `!` or `?`, or completes a blank line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.sampling.text import common_prefix

WINDOW = 16
"""Tokens that are decoded with one, for the text before it."""
ENDS = (".", "!", "?")
BLANK_LINE = re.compile(r"\n[^\S\n]*\n")

Decode = Callable[[Sequence[int]], str]


def decode_of(target: Any, rule: str) -> Decode:
    """How a target's ids become text.  Raises ConfigError for one without a tokenizer, which this rule needs."""
    if target.detokenizer is None:
        raise ConfigError(f"{rule} reads the text, and this target has no tokenizer; load it by a folder that has one")
    decode: Decode = target.detokenizer.decode
    return decode


class Piece(NamedTuple):
    """One token as text."""

    before: str
    """The end of the text before it."""
    added: str

    @property
    def ends_sentence(self) -> bool:
        if self.added.rstrip().endswith(ENDS):
            return True
        whole, most = self.before + self.added, len(self.before)
        return bool(self.added) and any(found.end() > most for found in BLANK_LINE.finditer(whole))

    def completes(self, words: Sequence[str]) -> str | None:
        """The longest of these words that the text ends with since this token, or None; white space after it does not
        matter, a letter or digit before it does."""
        whole = (self.before + self.added).rstrip()
        if len(whole) <= len(self.before.rstrip()):
            return None
        starts = {word: len(whole) - len(word) for word in words if whole.endswith(word)}
        found = [word for word, start in starts.items() if not whole[max(0, start - 1) : start].isalnum()]
        return max(found, key=len, default=None)


def piece(decode: Decode, tokens: Sequence[int], at: int) -> Piece:
    """Token `at` of a text as text."""
    start = max(0, at - WINDOW)
    before, whole = decode(tokens[start:at]) if at else "", decode(tokens[start : at + 1])
    # half a character before it becomes another one with it
    same = common_prefix(before, whole)
    return Piece(whole[:same], whole[same:])


def pieces(decode: Decode, tokens: Sequence[int], start: int) -> list[Piece]:
    """The tokens of a text from `start` on."""
    return [piece(decode, tokens, at) for at in range(start, len(tokens))]
