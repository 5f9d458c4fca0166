"""Tokens to text as they come: whole characters only, and nothing that may still turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """The text of one request.  `push` returns what has become certain; the pieces joined are the whole text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()):
        self._decode = decode
        self._stops = tuple(stops)
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that were given out or held back already."""
        self._held = ""

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Text that these tokens make certain; with `is_last` everything that is left, up to the first stop string."""
        self._window += tokens
        text = self._decode(self._window)
        whole = text if is_last else text.rstrip("\ufffd")
        fresh, self._shown = whole[self._shown :], max(self._shown, len(whole))
        self._held += fresh
        if len(self._window) > 64 and whole == text:
            # a few older tokens stay, so that a tokenizer which treats the first token of a text its own way does so here too
            self._window = self._window[-8:]
            self._shown = len(self._decode(self._window))
        at = min((found for stop in self._stops if (found := self._held.find(stop)) >= 0), default=-1)
        if at >= 0:
            given, self._held = self._held[:at], ""
            return given
        keep = 0 if is_last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
