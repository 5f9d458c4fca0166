"""Incremental detokenization: text is released once no later token can change it and it can't begin a stop string.

Concatenated, the pieces equal the text of all tokens decoded at once.  Only a window of tokens is decoded.  That is
safe if the tokenizer is *local*: its text of X Y is the text of X up to X's last final character, followed by text that
depends only on Y and the end of X.  `Detokenizer` says what is not final:

- the last U+FFFD, which may be half a character whose rest follows;
- a run of byte tokens (byte fallback: Llama 2, Mistral).  A run has text only as a whole: one more byte can turn all of
  it into U+FFFD.  So a run is held back until the token that ends it, and no window begins inside an open run;
- letters and spaces that the clean-up of spaces may still change (`loose`).

The tokens that stay in a window have at least four final characters.  So no token after them is the first of its text,
at least four bytes precede what is decoded again (the most that a UTF-8 character has), and no clean-up reaches across.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.errors import ConfigError

WINDOW = 32
"""Maximum number of tokens decoded at once, if the text can be cut."""
CONTEXT = 16
"""Number of tokens that stay in the window when older ones leave; any 16 bytes have four final characters."""
MIN_FINAL = 4
"""Minimum number of final characters of the tokens that stay."""


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix of two texts."""
    shorter = min(len(one), len(other))
    near = max(0, shorter - 64)
    begin = near if one[:near] == other[:near] else 0  # most texts differ near their end
    return next((n for n in range(begin, shorter) if one[n] != other[n]), shorter)


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """How token ids become text, and which text later tokens may change.

    By default nothing is assumed about `decode`: texts are decoded as a whole and released at their end.
    """

    decode: Callable[[Sequence[int]], str]
    is_local: bool = False
    """Later tokens change only what the fields below describe, and the last U+FFFD."""
    byte_tokens: Mapping[int, int] = field(default_factory=dict)
    """Id → byte, for tokens whose runs have text only as a whole."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Ids that `decode` leaves out, and their names; "" for one without a name."""
    loose: str = ""
    """Trailing characters of a text that may still change or disappear."""

    def final(self, text: str) -> str:
        """The part of a text that later tokens don't change, if no run of byte tokens is open."""
        return text.removesuffix("\ufffd").rstrip(self.loose)


class Pushed(NamedTuple):
    """What tokens added to a text."""

    text: str
    """Text that has become final, up to the first stop string."""
    tokens: int
    """How many of the tokens belong to the text: all, or those up to the one that completed a stop string."""
    is_stopped: bool = False


def with_stops(detokenizer: Detokenizer | None, stops: Sequence[str]) -> Detokenizer:
    """Returns the detokenizer.  Raises ConfigError if it is None.

    A stop string that is a special token ends a text at that token.  One that contains a special token among other text
    never matches, since a text has no special tokens; it is ignored, as in transformers.
    """
    if detokenizer is None:
        raise ConfigError(
            f"stop strings {list(stops)} need a tokenizer, and this target was loaded without one; load the target by "
            "a name or folder that has one, or leave the stop strings out"
        )
    return detokenizer


class TextStream:
    """The text of one request, token by token, up to the first stop string."""

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str] = (), before: Sequence[int] = ()):
        """before: the tokens that the text continues; a space between them belongs to the text, if decoding would drop
        its first space.

        Raises ConfigError for stop strings without a detokenizer.
        """
        self._detokenizer = with_stops(detokenizer, stops)
        self._stops = tuple(stop for stop in stops if stop not in self._detokenizer.skipped.values())
        self._ends = {token for token, name in self._detokenizer.skipped.items() if name and name in stops}
        """Special tokens that are stop strings."""
        self._window: list[int] = []
        """The tokens that are decoded together: some with final text, and all after them."""
        self._run = bytearray()
        """The bytes of the open run of byte tokens at the end of the window."""
        self._read = 0
        """Number of decoded tokens of the window; those of an open run are not decoded."""
        self._final_length = 0
        """Number of final characters of the window's text: they are in `_held`, or were released."""
        self._rest = ""
        """Decoded text after them."""
        self._held = ""
        """Final text that is held back because it may begin a stop string."""
        self._end: str | None = None
        """The rest of a finished text, until it is released."""
        if before:
            self._begin(before)

    def _begin(self, before: Sequence[int]) -> None:
        """Put the last tokens before the text into the window, as released text."""
        shown = [token for token in before if token not in self._detokenizer.skipped]
        # an open run of bytes is text by itself: what follows does not change it
        backwards = itertools.dropwhile(self._detokenizer.byte_tokens.__contains__, reversed(shown))
        earlier = [*backwards][::-1]
        context = earlier[-CONTEXT:]
        if len(self._detokenizer.decode(context)) < MIN_FINAL:
            context = shown  # whole, so that no token after it is the first of its text
        text = self._detokenizer.decode(context)
        if len(earlier) == len(shown):
            text = text.removesuffix("\ufffd")  # the text may complete half a character
        self._window, self._read, self._final_length = context, len(context), len(text)

    def push(self, tokens: Sequence[int], is_last: bool = False) -> Pushed:
        """Like `write`, and returns the text that has become final."""
        count, is_stopped = self.write(tokens, is_last)
        return Pushed(self.take(), count, is_stopped)

    def write(self, tokens: Sequence[int], is_last: bool = False) -> tuple[int, bool]:
        """Add tokens, up to the one that first completes a stop string; is_last: the text is finished.

        Returns how many were added, and whether a stop string ended the text.  Without stop strings only the
        end is decoded.
        """
        for count, token in enumerate(tokens, 1):
            if token in self._ends:
                self._end = self._left()
                return count, True
            self._append(token)
            end = self._find_stop() if self._stops else -1
            if end >= 0:
                self._end = self._left()[:end]
                return count, True
        if is_last:
            self._end = self._left()
        return len(tokens), False

    def take(self) -> str:
        """Text that has become final since the last call; all of the rest if the text is finished."""
        if self._end is not None:
            text, self._end, self._held = self._end, "", ""
            return text
        if self._detokenizer.is_local:
            self._decode_window()
        begins = (stop[:n] for stop in self._stops for n in range(1, len(stop) + 1))
        cut = len(self._held) - max((len(begin) for begin in begins if self._held.endswith(begin)), default=0)
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def _append(self, token: int) -> None:
        if token in self._detokenizer.skipped:
            return
        self._window.append(token)
        if token in self._detokenizer.byte_tokens:
            self._run.append(self._detokenizer.byte_tokens[token])
        else:
            self._run.clear()

    def _find_stop(self) -> int:
        """Where the first stop string begins in the unreleased text; -1 for none."""
        self._decode_window()
        # A run may be long and is decoded once, when it is closed.  Until then its bytes show whether a stop is
        # possible.
        position = _first(self._stops, self._held + self._rest + _text_of_run(self._run))
        return _first(self._stops, self._left()) if position >= 0 and self._run else position

    def _left(self) -> str:
        """All unreleased text."""
        self._decode_window()
        if not self._run:
            return self._held + self._rest
        return self._held + self._detokenizer.decode(self._window)[self._final_length :]

    def _decode_window(self) -> None:
        """Decode all tokens before the open run."""
        closed = len(self._window) - len(self._run)
        if closed <= self._read:
            return
        text = self._detokenizer.decode(self._window[:closed])
        final = self._detokenizer.final(text) if self._detokenizer.is_local else ""
        self._held += final[self._final_length :]
        # text released before this one may not be final
        self._read, self._final_length = closed, max(self._final_length, len(final))
        self._rest = text[self._final_length :]
        if closed > WINDOW and not self._run and self._detokenizer.is_local:
            self._forget()

    def _forget(self) -> None:
        """Drop old tokens, if later text depends only on those that stay."""
        context = self._window[-CONTEXT:]
        final = self._detokenizer.final(self._detokenizer.decode(context))
        if len(final) >= MIN_FINAL:
            self._window, self._read, self._final_length = context, len(context), len(final)


def _text_of_run(run: bytearray) -> str:
    """A run of byte tokens as decoders with byte fallback decode it: UTF-8, or U+FFFD for each byte."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _first(stops: Iterable[str], text: str) -> int:
    """Where the first of the stop strings begins in the text; -1 for none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
