"""A pasted line of shell, taken apart so that what is not touched comes out as it was typed.

A line is commands with separators between them (`;`, `&&`, a pipe); a command is words and redirections.  Words are kept raw,
with their quotes: `$MODEL` stays something that the shell fills in, `'$MODEL'` stays five letters behind a dollar sign.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError

FILLED = r"\$\w+|\$\{[^}]*\}|\$\([^()]*\)|`[^`]*`"
"""What a shell fills in."""
DOUBLE = r'"(?:[^"\\]|\\.)*"'
PIECE = rf"'[^']*'|{DOUBLE}|\\.|{FILLED}|[^\s'\"\\;&|<>()`]"
WORD = rf"(?:{PIECE})+"
SPACE = r"(?:[ \t\r]|\\[ \t\r]*\n|\n(?=\s*-)|(?<![^\s;&|(])#[^\n]*)+"
"""Between words: a line's end behind a backslash or before a flag, too, and a comment."""
REDIRECTION = rf"\d*(?:&>>?|>>|>&|<&|>\||<<<|<<|>|<)[ \t]*(?:{WORD})?"
SEPARATOR = r"&&|\|\||\|&|;;|[;&|()\n]"
TOKEN = re.compile(f"(?P<space>{SPACE})|(?P<redirection>{REDIRECTION})|(?P<separator>{SEPARATOR})|(?P<word>{WORD})", re.DOTALL)


@dataclass(slots=True)
class Simple:
    """One command: what stands between two separators."""

    words: list[str] = field(default_factory=list)
    """Raw."""
    redirections: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join([*self.words, *self.redirections])


def parsed(text: str) -> list[Simple | str]:
    """Commands and, as strings, the separators between them.  Raises ConfigError for a quote that is not closed."""
    found: list[Simple | str] = [Simple()]
    place = 0
    while place < len(text):
        token = TOKEN.match(text, place)
        if token is None:
            raise ConfigError(f"the command can't be read from {text[place : place + 20]!r} on; close the quote there")
        place, kind = token.end(), token.lastgroup
        last = found[-1]
        assert isinstance(last, Simple)
        if kind == "word":
            last.words.append(token[0])
        elif kind == "redirection":
            last.redirections.append(token[0])
        elif kind == "separator":
            found += [token[0], Simple()]
    return found


def joined(line: list[Simple | str]) -> str:
    """The line again."""
    text = ""
    for part in line:
        said = part if isinstance(part, str) else part.text
        if said in (";", ";;", ")", "\n"):
            text = text.removesuffix(" ")
        text += said if said in ("\n", "(", "") else f"{said} "
    return text.strip()


def plain(raw: str) -> str:
    """A word without its quotes; what a shell fills in stays as it is called."""
    try:
        return " ".join(shlex.split(raw))
    except ValueError as error:
        raise ConfigError(f"{raw} can't be read: {error}; quote it as a shell would") from None


def filled(raw: str) -> list[str]:
    """The parts of a word that a shell fills in, such as $MODEL."""
    found = []
    for piece in re.findall(PIECE, raw, re.DOTALL):
        if piece.startswith('"'):
            found += re.findall(FILLED, re.sub(r"\\.", "", piece, flags=re.DOTALL))
        elif len(piece) > 1 and piece[0] in "$`":
            found.append(piece)
    return found


def as_json(value: Any, live: list[str]) -> str:
    """A raw word that is compact JSON, in which the shell fills in what is live."""
    quoted = shlex.quote(json.dumps(value, separators=(",", ":")))
    names = "|".join(map(re.escape, sorted(set(live), key=len, reverse=True)))
    return re.sub(names, lambda name: f"'\"{name[0]}\"'", quoted) if names else quoted
