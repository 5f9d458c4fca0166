"""Which part of a text was drafted: tokens are known to be, and a text is shown.

Half a character is held back until the rest of it comes, and text that may begin a stop string too.  So a step's text
need not be its tokens' text; a token's part is where its own text is next found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

HALF = "\ufffd"


class Pieces:
    """Splits a text that grows into what was drafted and what was not."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[str, bool]] = deque()
        """Text of each token that has no part yet, and whether it was drafted."""

    def push(self, tokens: Iterable[tuple[str, bool]], text: str) -> list[tuple[str, bool]]:
        """These tokens were written, and this text was given out.  Joined, the pieces are the text."""
        self._tokens.extend(tokens)
        found: list[tuple[str, bool]] = []
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
            _add(found, text[at : begins + len(name)], is_drafted)
            at = begins + len(name)
        _add(found, text[at:], is_drafted)
        return found


def _add(found: list[tuple[str, bool]], text: str, is_drafted: bool) -> None:
    if not text:
        return
    if found and found[-1][1] == is_drafted:
        found[-1] = (found[-1][0] + text, is_drafted)
    else:
        found.append((text, is_drafted))
