"""Texts, token by token: which samples fit on the page, and the tooltip of each token."""

from __future__ import annotations

from typing import NamedTuple

from outrider.report.parts import TracedPrompt, TracedToken
from outrider.report.schema import Report, Row
from outrider.report.summary import conditions

MAX_ALL = 1600
"""Maximum number of tokens on one page: each takes about 150 bytes, most of it for the tooltip."""
MAX_TOKENS = 400
"""Maximum number of tokens drawn of one text."""
SHADES = 5


class Sample(NamedTuple):
    """One prompt under one drafter."""

    row: Row
    text: TracedPrompt


def samples(report: Report) -> tuple[list[list[Sample]], int]:
    """The samples of each prompt that fit on the page, and how many do not; the first prompt of every task first."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for row in report.rows:
        for text in row.traced:
            if text.tokens:
                groups.setdefault((conditions(row), text.id), []).append(Sample(row, text))
    ranks: dict[str, int] = {}
    ranked = []
    for (name, _), group in groups.items():
        ranks[name] = ranks.get(name, 0) + 1
        ranked.append((ranks[name], group))
    shown: list[list[Sample]] = []
    left, hidden = MAX_ALL, 0
    for _, group in sorted(ranked, key=lambda pair: pair[0]):
        size = sum(min(len(sample.text.tokens), MAX_TOKENS) for sample in group)
        if size > left and shown:
            hidden += len(group)
        else:
            left -= size
            shown.append(group)
    return shown, hidden


def class_of(token: TracedToken) -> str:
    """The CSS class: `o` not drafted, `r` rejected, `k1` to `k5` accepted, by depth."""
    return "o" if token.drafted is None else f"k{min(max(token.depth or 1, 1), SHADES)}" if token.accepted else "r"


def printable(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥") or "∅"


def tip(token: TracedToken) -> str:
    """What was judged here, with all numbers."""
    numbers = [f"target's entropy {token.entropy:.2f} nats"] if token.entropy is not None else []
    if token.drafted is None:
        return "\n".join(["the target's own, nothing was drafted", *numbers])
    where = f" at depth {token.depth}" if token.depth is not None else ""
    outcome = "drafted and accepted" if token.accepted else f"rejected “{printable(token.drafted)}”"
    odds = [] if token.p is None else [f"p {_chance(token.p)} target"]
    odds.append("q – deterministic" if token.q is None else f"q {_chance(token.q)} drafter")
    ranks = [f"rank {token.rank:,}"] if token.rank is not None else []
    return "\n".join(
        [outcome + where, " · ".join(odds), " · ".join([*ranks, *numbers, *([token.kind] if token.kind else [])])]
    )


def _chance(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.1e}"
