"""Tables of English words: stop words, common words and synonyms.

Small on purpose: a word that is not in any table counts as rare.
"""

import tomllib
from importlib.resources import files

_TABLES: dict[str, str] = tomllib.loads(files(__package__).joinpath("vocabulary.toml").read_text(encoding="utf-8"))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _groups(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split()) for line in text.strip().splitlines())


STOP = _words(_TABLES["STOP"])
"""Words that carry no content."""

INSTRUCTION = _words(_TABLES["INSTRUCTION"])
"""Words of instructions about the answer; they carry no content either."""

TRIGGERS = _words(_TABLES["TRIGGERS"])
"""Every instruction has at least one of these."""

OPENERS = _words("please kindly hi hello hey ok okay so now well also")
"""Words before a question that are not part of it."""

COMMON = _words(_TABLES["COMMON"])
"""Words that occur in many questions, uninflected; they have half the weight of a rare word."""

NUMBERS = {
    "zero": "0", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
    "nine": "9", "ten": "10", "eleven": "11", "twelve": "12", "thirteen": "13", "fourteen": "14", "fifteen": "15",
    "sixteen": "16", "seventeen": "17", "eighteen": "18", "nineteen": "19",
    "twenty": "20", "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "seventy": "70", "eighty": "80",
    "ninety": "90", "hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000",
    "dozen": "12", "twice": "2", "double": "2", "doubled": "2", "doubles": "2", "both": "2", "pair": "2", "triple": "3",
    "thrice": "3", "tripled": "3", "quadruple": "4",
}  # fmt: skip
"""`one` is missing: it is a pronoun more often than a number."""
CJK_STOP = frozenset(
    "的了是在有和与與他她它们們这這那个個我你就也都吗嗎呢吧着著被把对對从從到为為以而且或请請问問のはをがにでともへや이가은는을를의에"
)
"""Letters of Chinese, Japanese and Korean with little content of their own."""
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

SYNONYMS = _groups(_TABLES["SYNONYMS"])
"""Groups of synonyms, including forms that a stemmer misses; the first represents the group."""

CONTRASTS = _groups(_TABLES["CONTRASTS"])
"""Groups of contrasting words: two questions with different words of a group ask different things."""
