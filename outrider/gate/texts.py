"""Are two files of answers the same, text by text?  No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from outrider.errors import DataError
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import whole_text

TEXT_KEYS = ("text", "answer", "output", "completion")


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two servers' answers to a prompt.  Without their tokens, a tie can't be told from a fault."""

    id: str
    is_equal: bool
    first_character: int | None
    """Index of the first character that differs."""
    excerpts: tuple[str, str] | None
    """The texts from there."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The answers of two servers, paired by prompt."""

    pairs: tuple[TextPair, ...]

    @property
    def equal(self) -> int:
        return sum(pair.is_equal for pair in self.pairs)

    @property
    def verdict(self) -> Literal["equal", "different"]:
        return "equal" if self.equal == len(self.pairs) else "different"

    def as_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "texts": len(self.pairs), "pairs": [asdict(pair) for pair in self.pairs]}


def compare_texts(first: str | Path, second: str | Path) -> Texts:
    """Compare two JSONL files of answers, matched by `id` if rows have one, otherwise by row.

    The answer is under text, answer, output or completion.  Raises DataError with file and line.
    """
    one, other = _answers(Path(first)), _answers(Path(second))
    if set(one) != set(other):
        lone = sorted(set(one) ^ set(other))[0]
        has, lacks = (first, second) if lone in one else (second, first)
        raise DataError(
            f"{has} has an answer to {lone!r}, but {lacks} has none; give two files of answers to the same prompts"
        )
    return Texts(tuple(_text_pair(name, one[name], other[name]) for name in one))


def _text_pair(name: str, one: str, other: str) -> TextPair:
    at = next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
    return TextPair(name, at is None, at, None if at is None else (one[at : at + 40], other[at : at + 40]))


def _answers(path: Path) -> dict[str, str]:
    answers: dict[str, str] = {}
    try:
        lines = whole_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read {path}: {error}; give a JSONL file of answers") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}; correct the line or delete it") from None
        values = [row[key] for key in TEXT_KEYS if isinstance(row.get(key), str)] if isinstance(row, dict) else []
        if not values:
            raise DataError(f"{path}, line {number} has no answer; put a text under one of {', '.join(TEXT_KEYS)}")
        name = str(row.get("id", len(answers)))
        if name in answers:
            raise DataError(f"{path}, line {number}: id {name!r} occurs a second time; give one answer per prompt")
        answers[name] = values[0]
    if not answers:
        raise DataError(f"{path} has no answer in it; give a JSONL file with one answer per line")
    return answers
