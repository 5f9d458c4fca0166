"""The category of a request, by keywords in its text: code, math, extraction, language, chat, or other.  No torch.

A mark is a pattern in `MARKS`; each has a test, and docs/plan.md lists them.  The category with the most marks
wins; a tie gives `other`.  The marks of `chat` are those of everyday talk, and count only if no other category has any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Category = Literal["code", "math", "extraction", "language", "chat", "other"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
Messages = Sequence[Mapping[str, Any]]
"""Chat messages whose content is text."""
READ = 8000
"""Characters that are searched at the beginning of a text, and again at its end."""
SHORT = 400
"""Longest question, in characters, that counts as chat."""
FOREIGN = 0.3
"""Smallest share of letters outside the Latin script in a text of another language."""
FEWEST_WORDS = 3
"""Words of another language that identify it; each is frequent in its language and rare in English."""

_PROGRAMS = r"(function|method|class|script|program|code|algorithm|unit tests?|regex|query|endpoint|bug)"
_TEXTS = (
    "(text|context|article|passage|document|contract|report|e-?mails?|transcript|reviews?|paragraph|letter|table|notes)"
)
_LANGUAGES = (
    "english|german|french|spanish|italian|portuguese|dutch|polish|russian|ukrainian|turkish|arabic|hebrew|hindi|chinese|"
    "mandarin|japanese|korean|vietnamese|thai|greek|latin|swedish|danish|norwegian|finnish|czech|hungarian|romanian"
)
_FOREIGN_WORDS = (
    "der|das|und|nicht|ist|eine|mit|für|auf|wie|les|des|est|une|dans|pour|avec|vous|que|qui|los|las|una|para|como|por|"
    "está|il|della|che|di|sono|não|uma|com|você|het|een|niet|voor"
)
MARKS: Mapping[Category, Mapping[str, re.Pattern[str]]] = {
    "code": {
        "fence": re.compile(r"^\s*```", re.MULTILINE),
        "line of code": re.compile(
            r"^\s*(def \w+\(|class \w+[(:{]|(async )?function \w*\(|#include\b|import \w+|from \w+ import |"
            r"(const|let|var) \w+ =|public (static|class|void)|fn \w+\(|func \w+\(|select\b.+\bfrom\b|"
            r"return \w+.*;\s*$)",
            re.MULTILINE | re.IGNORECASE,
        ),
        "traceback": re.compile(
            r"Traceback \(most recent call last\)|^\s+at [\w.$]+\([\w.]+:\d+\)|\w(Error|Exception): ", re.MULTILINE,
        ),
        "asked for": re.compile(
            r"\b(write|implement|fix|debug|refactor|explain|review|optimi[sz]e|complete|create)\b[^.?!\n]{0,60}\b"
            + _PROGRAMS + r"\b", re.IGNORECASE,
        ),
        "named": re.compile(
            r"\b(python|javascript|typescript|java|rust|golang|c\+\+|c#|sql|bash|html|css|kotlin)(?!\w)", re.IGNORECASE,
        ),
    },
    "math": {
        "notation": re.compile(r"\\(frac|sqrt|sum|int|cdot|boxed|begin\{(equation|align))|\$[^$\n]*[\\^_=][^$\n]*\$"),
        "arithmetic": re.compile(r"\d\s*[-+*/×÷^]\s*\(?\d|\b\d*[a-z](\^\d)?\s*[-+]\s*\d+[a-z]?\s*=", re.IGNORECASE),
        "asked for": re.compile(
            r"\b(solve|calculate|compute|prove|simplify|evaluate|factori[sz]e|differentiate|integrate)\b[^.?!\n]{0,80}"
            r"(\d|\b(equation|integral|derivative|theorem|inequality|polynomial|probability)\b)", re.IGNORECASE,
        ),
        "how many": re.compile(r"\d.*\bhow (many|much|far|long|old)\b", re.IGNORECASE | re.DOTALL),
    },
    "extraction": {
        "asked for": re.compile(
            r"\b(extract|summari[sz]e|pull out|classify|categori[sz]e|paraphrase)\b|"
            r"\b(list|find|identify) (all|every|each)\b|\b(a|brief|short) summary of\b", re.IGNORECASE,
        ),
        "given text": re.compile(
            rf"\bthe (following|given|above|attached) {_TEXTS}\b|^{_TEXTS}:|<{_TEXTS}>",
            re.IGNORECASE | re.MULTILINE,
        ),
        "form": re.compile(
            r"\b(as|in|into|valid|return|output|respond with) (a )?(json|csv|yaml|xml)\b", re.IGNORECASE,
        ),
    },
    "language": {
        "translation": re.compile(r"\btranslat(e|ion)\b", re.IGNORECASE),
        "named": re.compile(
            rf"\b(into|to|from) ({_LANGUAGES})\b|\b(answer|reply|write|say)\b[^.?!\n]{{0,40}}\bin ({_LANGUAGES})\b",
            re.IGNORECASE,
        ),
    },
    "chat": {
        "greeting": re.compile(r"^\s*(hi|hello|hey|good (morning|evening)|thanks|thank you)\b", re.IGNORECASE),
        "opinion": re.compile(
            r"\b(what do you think|do you think|should i|can you recommend|give me (some )?(advice|tips|ideas)|tell me|"
            r"help me|i('m| am) (feeling|trying|looking)|explain|describe|imagine|pretend|you are an?)\b",
            re.IGNORECASE,
        ),
        "writing": re.compile(
            r"\b(write|draft|compose)\b[^.?!\n]{0,40}\b(poem|story|essay|email|letter|post|speech|song|joke|review)\b",
            re.IGNORECASE,
        ),
    },
}  # fmt: skip
"""Category → name of the mark → its pattern.  `language` also has the marks "script" and "words", `chat` also
"question", and `extraction` also "schema", a response format in the request's settings."""
_WORDS = re.compile(rf"\b({_FOREIGN_WORDS})\b", re.IGNORECASE)


def category_of(prompt: str | Messages, settings: Mapping[str, Any] | None = None) -> Category:
    """The category of a request, by its last question, or by all its questions if that one has no marks.

    prompt: a text, or chat messages.  settings: the rest of the body.
    """
    texts = [prompt] if isinstance(prompt, str) else [str(one["content"]) for one in prompt if one["role"] == "user"]
    for questions in (texts[-1:], texts):
        counts = {name: len(matches) for name, matches in marks("\n".join(questions), settings).items() if matches}
        if len(counts) > 1:
            counts.pop("chat", None)
        best = [name for name, count in counts.items() if count == max(counts.values())]
        if best:
            return best[0] if len(best) == 1 else "other"
    return "other"


def marks(text: str, settings: Mapping[str, Any] | None = None) -> dict[Category, list[str]]:
    """The marks of a text, by category."""
    text = text if len(text) <= 2 * READ else f"{text[:READ]}\n{text[-READ:]}"
    matches = {
        category: [name for name, pattern in patterns.items() if pattern.search(text)]
        for category, patterns in MARKS.items()
    }
    letters = [letter for letter in text if letter.isalpha()]
    # accented Latin letters end below U+0250
    if letters and sum(ord(letter) >= 0x250 for letter in letters) >= FOREIGN * len(letters):
        matches["language"].append("script")
    if len({word.lower() for word in _WORDS.findall(text)}) >= FEWEST_WORDS:
        matches["language"].append("words")
    form = (settings or {}).get("response_format")
    if isinstance(form, Mapping) and str(form.get("type")).startswith("json"):
        matches["extraction"].append("schema")
    if len(text) <= SHORT and text.rstrip().endswith("?"):
        matches["chat"].append("question")
    return matches
