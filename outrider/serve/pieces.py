"""Which parts of a text were drafted.

An incomplete character is held back until the rest of it arrives, and so is text that may begin a stop string.  So a
step's text is not always the text of its tokens; each token is matched with the next occurrence of its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

HALF = "\ufffd"


class Pieces:
    """Splits a growing text into drafted and other pieces."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[str, bool]] = deque()
        """Text of each token that has no piece yet, and whether it was drafted."""

    def push(self, tokens: Iterable[tuple[str, bool]], text: str) -> list[tuple[str, bool]]:
        """The pieces of `text`, which was given out after these tokens were generated.  Joined, they are the text."""
        self._tokens.extend(tokens)
        pieces: list[tuple[str, bool]] = []
        at, is_drafted = 0, False
        while at < len(text) and self._tokens:
            name, is_drafted = self._tokens[0]
            if not name or HALF in name:
                self._tokens.popleft()
                continue
            begins = text.find(name, at)
            self._tokens.popleft()
            if begins < 0:
                rest = text[at:]
                if name.startswith(rest):  # its end is held back
                    self._tokens.appendleft((name.removeprefix(rest), is_drafted))
                break
            _add(pieces, text[at : begins + len(name)], is_drafted)
            at = begins + len(name)
        _add(pieces, text[at:], is_drafted)
        return pieces


def _add(pieces: list[tuple[str, bool]], text: str, is_drafted: bool) -> None:
    if not text:
        return
    if pieces and pieces[-1][1] == is_drafted:
        pieces[-1] = (pieces[-1][0] + text, is_drafted)
    else:
        pieces.append((text, is_drafted))
