"""Tokens to text as they come: nothing is given out that a later token could change, or that may begin a stop string.

Joined, the pieces are what the tokenizer makes of all tokens at once.  Only a window of them is decoded, and that is safe where
the tokenizer is *local*: its text of X Y is the text of X, up to its last settled character, and then what depends on Y and the
end of X alone.  What is not settled is named by `Detokenizer`:

- the last U+FFFD, which may be half a character of which the rest follows;
- a run of byte tokens (byte fallback: Llama 2, Mistral).  A run is text only as a whole: one byte more can turn all of it into
  U+FFFD.  A run therefore waits for the token that ends it, and no window begins behind a run that is still open;
- letters and spaces that the clean-up of spaces still looks at (`loose`).

A window keeps tokens whose settled text has four characters or more.  So no token behind them is the first of its text, four
bytes or more stand before what is decoded again (no character of UTF-8 has more), and no clean-up reaches across.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.errors import ConfigError

WINDOW = 32
"""Most tokens decoded at once, where the text can be cut there at all."""
CONTEXT = 16
"""Tokens that stay in the window when older ones leave; 16 bytes of any kind make four settled characters."""
SETTLED = 4
"""Fewest settled characters of the tokens that stay."""


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """How token ids become text, and what of a text later tokens may change.

    By default nothing is known of `decode`: texts are decoded whole, and given out at their end.
    """

    decode: Callable[[Sequence[int]], str]
    is_local: bool = False
    """Later tokens change no text but what the fields below name, and at most the last U+FFFD."""
    byte_tokens: Mapping[int, int] = field(default_factory=dict)
    """Bytes by id, of the tokens whose runs are text only as a whole."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Ids that `decode` leaves out, and the name of each; "" where it has none."""
    loose: str = ""
    """Characters that may still change, or go, while no other character stands behind them."""

    def settled(self, text: str) -> str:
        """The part of a text that later tokens leave as it is, where no run of byte tokens is open."""
        return text.removesuffix("\ufffd").rstrip(self.loose)


class Pushed(NamedTuple):
    """What some tokens added to a text."""

    text: str
    """What has become certain, up to the first stop string."""
    tokens: int
    """How many of them belong to the text: all, or those up to the one that completed a stop string."""
    is_stopped: bool = False


def refuse_unmatchable(detokenizer: Detokenizer | None, stops: Sequence[str]) -> Detokenizer:
    """The detokenizer.  Raises ConfigError where there is none, or for a stop string that can never match."""
    if detokenizer is None:
        raise ConfigError(
            f"stop strings {list(stops)} need a tokenizer, and this target was loaded without one; load it by a "
            "name or a folder that has one, or leave them out"
        )
    for stop in stops:
        held = next((name for name in detokenizer.skipped.values() if name and name in stop), None)
        if held is not None:
            raise ConfigError(
                f"stop string {stop!r} holds the special token {held!r}, which is left out of the text, so it can never "
                "match; give a string of plain text (a text ends at the target's end tokens without one)"
            )
    return detokenizer


class TextStream:
    """The text of one request, token by token; ends it at the first stop string."""

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str] = ()):
        """Raises ConfigError for a stop string that can never match."""
        self._detokenizer = refuse_unmatchable(detokenizer, stops)
        self._stops = tuple(stops)
        self._window: list[int] = []
        """The tokens that are decoded together: some whose text is settled, and all behind them."""
        self._run = bytearray()
        """The bytes of the open run of byte tokens at the end of the window."""
        self._read = 0
        """Tokens of the window that were decoded; those of an open run are not."""
        self._settled = 0
        """Characters of the window's text that are settled: they are in `_held`, or were given out."""
        self._rest = ""
        """Text behind them, of the tokens that were decoded."""
        self._held = ""
        """Settled text that was not given out, as it may begin a stop string."""

    def push(self, tokens: Sequence[int], is_last: bool = False) -> Pushed:
        """Add tokens, up to the one with which their text first holds a stop string.

        Gives out what has become certain; with `is_last`, and at a stop string, everything that is left.
        """
        for count, token in enumerate(tokens, 1):
            self._append(token)
            end = self._find_stop() if self._stops else -1
            if end >= 0:
                return Pushed(self._left()[:end], count, True)
        if is_last:
            return Pushed(self._left(), len(tokens))
        if self._detokenizer.is_local:
            self._decode_window()
        begins = (stop[:n] for stop in self._stops for n in range(1, len(stop) + 1))
        cut = len(self._held) - max((len(begin) for begin in begins if self._held.endswith(begin)), default=0)
        certain, self._held = self._held[:cut], self._held[cut:]
        return Pushed(certain, len(tokens))

    def _append(self, token: int) -> None:
        if token in self._detokenizer.skipped:
            return
        self._window.append(token)
        if token in self._detokenizer.byte_tokens:
            self._run.append(self._detokenizer.byte_tokens[token])
        else:
            self._run.clear()

    def _find_stop(self) -> int:
        """Where the first stop string begins in what is left of the text, as it stands; -1 where there is none."""
        self._decode_window()
        # A run may be long, and is decoded once, when it is closed.  Until then its bytes tell whether a look is worth it.
        found = _first(self._stops, self._held + self._rest + _text_of_run(self._run))
        return _first(self._stops, self._left()) if found >= 0 and self._run else found

    def _left(self) -> str:
        """All text that was not given out, as it stands."""
        self._decode_window()
        if not self._run:
            return self._held + self._rest
        return self._held + self._detokenizer.decode(self._window)[self._settled :]

    def _decode_window(self) -> None:
        """Settle the text of all tokens before the open run."""
        closed = len(self._window) - len(self._run)
        if closed == self._read:
            return
        text = self._detokenizer.decode(self._window[:closed])
        settled = self._detokenizer.settled(text) if self._detokenizer.is_local else ""
        self._held += settled[self._settled :]
        self._read, self._settled, self._rest = closed, len(settled), text[len(settled) :]
        if closed > WINDOW and not self._run and self._detokenizer.is_local:
            self._forget()

    def _forget(self) -> None:
        """Let old tokens go, where the text behind them depends on those that stay alone."""
        context = self._window[-CONTEXT:]
        settled = self._detokenizer.settled(self._detokenizer.decode(context))
        if len(settled) >= SETTLED:
            self._window, self._read, self._settled = context, len(context), len(settled)


def _text_of_run(run: bytearray) -> str:
    """A run of byte tokens as decoders with byte fallback write it: UTF-8, or U+FFFD for each of its bytes."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _first(stops: Iterable[str], text: str) -> int:
    """Where the first of the stop strings begins, -1 where the text holds none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
