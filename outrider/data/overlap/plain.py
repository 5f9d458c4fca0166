"""Normalises notation: LaTeX and Unicode signs, decimals, units of measure.

Signs are ignored in hashes, so operators between operands become words here: `7 + 8` and `7 * 8` differ, while
`7 × 8`, `$7\\times 8$` and `7*8` do not.
"""

from __future__ import annotations

import re

from outrider.data.overlap.vocabulary import DIGITS, NUMBERS, TENS

_LATEX = tuple((re.compile(pattern), replacement) for pattern, replacement in (
    (r"\{,\}|(?<=\d)\\[,!](?=\d{3}(?!\d))", ""),
    (r"\\[,;:! ]|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|q?quad|ldots|c?dots"
     r"|text(?:bf|it|rm)?|math(?:rm|bf|it|bb|cal)|operatorname|mbox|circ|degree)(?![A-Za-z])", " "),
    (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*(\w)\s*(\w)(?!\w)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)"),
    (r"\\(?:times|cdot)(?![A-Za-z])", "*"), (r"\\div(?![A-Za-z])", "/"),
    (r"\\(?:leq?|leqslant)(?![A-Za-z])", "≤"), (r"\\(?:geq?|geqslant)(?![A-Za-z])", "≥"),
))  # fmt: skip
_OPERATORS = {
    "+": "plus", "-": "minus", "−": "minus", "–": "minus", "*": "times", "×": "times", "·": "times", "/": "over",
    "÷": "over", "=": "equals", "==": "equals", "^": "power", "**": "power", "<": "below", ">": "above",
    "≤": "atmost", "<=": "atmost", "≥": "atleast", ">=": "atleast",
}  # fmt: skip
_OPERATION = re.compile(
    r"(?:(?<=[\d)}\]])|(?<=\b[A-Za-z]))[ $]*(\*\*|[<>=]=|[-+*/×÷·=<>^−–≤≥])[ $]*(?=[\d({\\$√]|-\d|[A-Za-z]\b)"
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_UNIT = re.compile(r"(?<=\d)(?=[A-Za-z])")
_DECIMAL = re.compile(r"(?<=\d)\.(?=\d)(\d*?)0*(?!\d)")
_COMPOUND = re.compile(rf"\b({'|'.join(TENS)})[- ]({'|'.join(DIGITS)})\b", re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*```\w*", re.MULTILINE)
_DIGIT = re.compile(r"\d")


def plain_text(text: str) -> str:
    """A text with normalised numbers and formulas, without code fences."""
    if "```" in text:
        text = _FENCE.sub("", text)
    if "\\" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    if "ty" in text or "TY" in text:
        text = _COMPOUND.sub(_compound, text)
    if _DIGIT.search(text) or "=" in text or "+" in text:
        text = _THOUSANDS.sub("", text)
        text = _OPERATION.sub(lambda match: f" {_OPERATORS[match[1]]} ", text)
        text = _UNIT.sub(" ", text)
        text = _DECIMAL.sub(lambda match: f"p{match[1]}" if match[1] else "", text)
    return text


def _compound(match: re.Match[str]) -> str:
    return str(int(NUMBERS[match[1].lower()]) + 1 + DIGITS.index(match[2].lower()))
