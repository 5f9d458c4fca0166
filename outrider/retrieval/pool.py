"""The tokens that followed short sequences in texts or guesses, most recent first.  (Fu et al. 2402.02057.)"""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """A bounded table from the beginnings of n-grams to the tokens that followed."""

    def __init__(self, longest: int, most: int, siblings: int):
        """longest: tokens of the longest beginning.  most: beginnings stored; the oldest is removed first.  siblings:
        tokens stored for each."""
        self.longest, self.most, self.siblings = longest, most, siblings
        self.read = 0
        """Tokens of the text that were learnt."""
        self.follows: dict[tuple[int, ...], list[int]] = {}

    def learn(self, text: list[int]) -> None:
        """Learn the new part of the text."""
        for at in range(max(self.read, 1), len(text)):
            self.add(text[max(0, at - self.longest) : at], text[at])
        self.read = len(text)

    def add(self, before: Sequence[int], token: int) -> None:
        """Store that this token followed these."""
        for n in range(1, min(self.longest, len(before)) + 1):
            key = tuple(before[-n:])
            known = self.follows.pop(key, [])
            self.follows[key] = [token, *(other for other in known if other != token)][: self.siblings]
        while len(self.follows) > self.most:
            del self.follows[next(iter(self.follows))]

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether a token is stored for the longest beginning that ends these tokens."""
        return tuple(tokens[-self.longest :]) in self.follows and len(tokens) >= self.longest

    def after(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that followed these, each once: longest match first, then most recent."""
        found: dict[int, None] = {}
        for n in range(min(self.longest, len(tokens)), 0, -1):
            found |= dict.fromkeys(self.follows.get(tuple(tokens[-n:]), ()))
        return list(found)
