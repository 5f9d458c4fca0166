"""Counterfactual texts: words of a text swapped for others, token by token as it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.policies.sentences import Decode
from outrider.sampling.text import common_prefix
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import whole_text

BEFORE = ("(", "\n")
"""Texts that can precede a word without a space, to find its tokens there."""
Ids = tuple[int, ...]


def swap_of(path: str | Path) -> dict[str, str]:
    """The words of a JSON file {word: word}.  Raises ConfigError for a file that is not one."""
    hint = 'give a JSON file such as {"he": "she", "she": "he"}'
    try:
        words = parse_json(whole_text(Path(path)))
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror or error}); {hint}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); {hint}") from None
    if not (isinstance(words, dict) and all(isinstance(value, str) for value in words.values())):
        raise ConfigError(f"{path} must be an object of texts, got {type(words).__name__}; {hint}")
    check_words(words)
    return words


def check_words(words: Mapping[str, str]) -> None:
    """Raises ConfigError for a key that is not one word, or a value without a letter."""
    for word, other in words.items():
        if len(word.split()) != 1 or word != word.strip() or not other.strip():
            raise ConfigError(f"a swap must be of one word for another text, got {word!r} for {other!r}")


@dataclass(frozen=True)
class Swap:
    """Sequences of token ids and their replacements; the longest match is swapped."""

    table: Mapping[Ids, Ids]
    begins_word: Callable[[int], bool] = lambda token: True
    """Whether a token does not continue the previous word.  A swapped sequence ends before such a token, and starts
    with one or follows a token that is not part of a word."""
    ends_word: Callable[[int], bool] = lambda token: True
    """Whether a word may begin right after this token."""

    @classmethod
    def of(cls, words: Mapping[Any, Any], target: Any) -> Swap:
        """words: texts, which are encoded after a space and without one; or token ids.

        Raises ConfigError for texts and a target without a tokenizer.
        """
        if not any(isinstance(word, str) for word in words):
            return cls({tuple(ids): tuple(other) for ids, other in words.items()})
        if target.detokenizer is None:
            raise ConfigError("counterfactual swaps words, and this target has no tokenizer; give token ids instead")
        check_words(words)
        table: dict[Ids, Ids] = {}
        for word, other in words.items():
            for before, space in ((BEFORE[0], " "), *((before, "") for before in BEFORE)):
                pair = [_ids_after(before, space + text, target) for text in (word, other)]
                if pair[0] and pair[1]:
                    table.setdefault(pair[0], pair[1])
        text_of = _TextOf(target.detokenizer.decode, tuple(target.encode(BEFORE[0])))
        begins_word = lambda token: not _is_word(text_of(token)[:1])
        return cls(table, begins_word, lambda token: not _is_word(text_of(token)[-1:]))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is swapped."""
        return max(map(len, self.table), default=0)

    @property
    def growth(self) -> float:
        """Largest possible ratio of the counterfactual's length to the text's."""
        return max((len(other) / len(ids) for ids, other in self.table.items()), default=1.0)


@dataclass
class SwappedText:
    """The counterfactual of one text."""

    swap: Swap
    tokens: list[int] = field(default_factory=list)
    """Tokens that later ones can't change."""
    _read: int = 0
    """Number of the text's tokens that these replace."""

    def follow(self, text: Sequence[int]) -> list[int]:
        """Read the text's new tokens.  Returns its swapped end, which the next tokens may change because a sequence may
        continue there."""
        while self._read < len(text):
            if self._may_begin(text):
                return self._end(text)
            ids = self._found(text, self._read)
            self.tokens += self.swap.table[ids] if ids else [text[self._read]]
            self._read += max(1, len(ids))
        return []

    def _end(self, text: Sequence[int]) -> list[int]:
        end, at = list[int](), self._read
        while at < len(text):
            ids = self._found(text, at)
            end += self.swap.table[ids] if ids else [text[at]]
            at += max(1, len(ids))
        return end

    def _found(self, text: Sequence[int], at: int) -> Ids:
        """The longest sequence at this position; () for none."""
        for length in range(min(self.swap.longest, len(text) - at), 0, -1):
            ids, end = tuple(text[at : at + length]), at + length
            if ids in self.swap.table and (end == len(text) or self.swap.begins_word(text[end])):
                return ids if self._is_start(text, at) else ()
        return ()

    def _may_begin(self, text: Sequence[int]) -> bool:
        """Whether the rest of the text is a sequence or the beginning of one."""
        rest = tuple(text[self._read : self._read + self.swap.longest + 1])
        return any(ids[: len(rest)] == rest for ids in self.swap.table) and self._is_start(text, self._read)

    def _is_start(self, text: Sequence[int], at: int) -> bool:
        """Whether a word may begin here."""
        return at == 0 or self.swap.begins_word(text[at]) or self.swap.ends_word(text[at - 1])


def beginning(target: Any) -> Ids:
    """The ids that a target's tokenizer puts before every text; none without a tokenizer."""
    if target.detokenizer is None:
        return ()
    one, other = (target.encode(text) for text in BEFORE)
    return tuple(one[: common_prefix(one, other)])


class _TextOf:
    """The text that a token adds after another one, cached."""

    def __init__(self, decode: Decode, before: Ids):
        self._decode, self._before, self._known = decode, before, dict[int, str]()
        self._start = len(decode(before))

    def __call__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([*self._before, token])[self._start :]
        return self._known[token]


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _ids_after(before: str, text: str, target: Any) -> Ids:
    """The ids of a text after another one; () if a token spans both."""
    first, whole = target.encode(before), target.encode(before + text)
    return tuple(whole[len(first) :]) if whole[: len(first)] == first else ()
