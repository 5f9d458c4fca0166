"""The pool of n-grams of lookahead decoding: tokens that followed short sequences.  (Fu et al. 2402.02057.)"""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """A bounded table that maps prefixes of n-grams to the tokens that followed, most recent first."""

    def __init__(self, longest: int, most: int, siblings: int):
        """longest: maximum number of tokens of a prefix.  most: maximum number of prefixes stored; the oldest is
        removed first.  siblings: tokens stored per prefix."""
        self.longest, self.most, self.siblings = longest, most, siblings
        self.read = 0
        """Number of tokens of the text learnt so far."""
        self.follows: dict[tuple[int, ...], list[int]] = {}

    def learn(self, text: list[int]) -> None:
        """Learn the new part of the text."""
        for at in range(max(self.read, 1), len(text)):
            self.add(text[max(0, at - self.longest) : at], text[at])
        self.read = len(text)

    def add(self, before: Sequence[int], token: int) -> None:
        """Store that this token followed `before`."""
        for n in range(1, min(self.longest, len(before)) + 1):
            key = tuple(before[-n:])
            earlier = self.follows.pop(key, [])
            self.follows[key] = [token, *(other for other in earlier if other != token)][: self.siblings]
        while len(self.follows) > self.most:
            del self.follows[next(iter(self.follows))]

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether a token is stored for the last `longest` of these tokens."""
        return tuple(tokens[-self.longest :]) in self.follows and len(tokens) >= self.longest

    def after(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that followed these, without duplicates: longest match first, then most recent."""
        followers: dict[int, None] = {}
        for n in range(min(self.longest, len(tokens)), 0, -1):
            followers |= dict.fromkeys(self.follows.get(tuple(tokens[-n:]), ()))
        return list(followers)
