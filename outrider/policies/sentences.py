"""Finds sentence ends and cue words in a text that grows token by token.

A token's text is what it adds to the decoded text before it, so that spaces and partial characters are as in the
tokenizer's output.  A sentence ends at a token that ends in `.`, `!` or `?`, or completes a blank line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.sampling.text import common_prefix

WINDOW = 16
"""Number of preceding tokens decoded along with a token."""
ENDS = (".", "!", "?")
BLANK_LINE = re.compile(r"\n[^\S\n]*\n")

Decode = Callable[[Sequence[int]], str]


def decode_of(target: Any, rule: str) -> Decode:
    """The target's function from ids to text.  Raises ConfigError if it has no tokenizer, which `rule` needs."""
    if target.detokenizer is None:
        raise ConfigError(
            f"{rule} reads the text, but this target has no tokenizer; load it from a folder that has one"
        )
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
        return bool(self.added) and any(match.end() > most for match in BLANK_LINE.finditer(whole))

    def contains_end(self, text: str) -> bool:
        """Whether this token has the last character of an occurrence of a text."""
        at = (self.before + self.added).rfind(text)
        return at >= 0 and at + len(text) > len(self.before)

    def completes(self, words: Sequence[str]) -> str | None:
        """The longest of these words that this token completes, or None.  The word may be followed by white space, but
        not preceded by a letter or digit."""
        whole = (self.before + self.added).rstrip()
        if len(whole) <= len(self.before.rstrip()):
            return None
        starts = {word: len(whole) - len(word) for word in words if whole.endswith(word)}
        completed = [word for word, start in starts.items() if not whole[max(0, start - 1) : start].isalnum()]
        return max(completed, key=len, default=None)


def piece(decode: Decode, tokens: Sequence[int], at: int) -> Piece:
    """Token `at` of a text, decoded."""
    start = max(0, at - WINDOW)
    before, whole = decode(tokens[start:at]) if at else "", decode(tokens[start : at + 1])
    # a partial character before the token changes once it is complete
    same = common_prefix(before, whole)
    return Piece(whole[:same], whole[same:])


def pieces(decode: Decode, tokens: Sequence[int], start: int) -> list[Piece]:
    """The tokens of a text from `start` on, decoded."""
    return [piece(decode, tokens, at) for at in range(start, len(tokens))]
