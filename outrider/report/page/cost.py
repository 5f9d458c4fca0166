"""The cost of a million tokens with and without a drafter, and when the drafter has paid for itself.

The page shows the figures for the settings below; its script recomputes them for the reader's own.  A test checks that
both compute the same.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.report.schema import Report, Row
from outrider.report.summary import MISSING, named

SETTINGS = (
    ("price", "Machine, $ an hour", 2.5),
    ("tokens", "Tokens a day, millions", 10),
    ("other", "Other cost of a drafter, $", 0),
)
"""Numbers that the reader can change on the page: (name, label, value)."""


class Costs(NamedTuple):
    """Dollars; machine hours per day; days until payback, None if training was not measured, infinite for never."""

    before: float
    after: float
    saved: float
    hours: tuple[float, float]
    built: float | None
    payback: float | None


class CostLine(NamedTuple):
    """One row's costs, and the numbers from which the script computes them."""

    name: str
    data: dict[str, float]
    texts: dict[str, str]


def costs(plain: float, fast: float, trained_s: float | None, price: float, tokens: float, other: float) -> Costs:
    """plain, fast: tokens/s; price: $ an hour; tokens: millions a day; other: $."""
    before, after = (price / 3600 / speed * 1e6 for speed in (plain, fast))
    saved = (before - after) * tokens
    hours = (tokens * 1e6 / plain / 3600, tokens * 1e6 / fast / 3600)
    built = None if trained_s is None and not other else (trained_s or 0) / 3600 * price + other
    payback = float("inf") if saved <= 0 else None if built is None else built / saved
    return Costs(before, after, saved, hours, built, payback)


def cost_lines(report: Report) -> list[CostLine]:
    """A line for every row that was timed."""
    return [line for row in report.rows if (line := cost_line(report, row)) is not None]


def cost_line(report: Report, row: Row) -> CostLine | None:
    """One row's costs at the default settings; None if it was not timed."""
    if not row.tokens_per_s or not row.plain_tokens_per_s:
        return None
    training = report.training.get(row.drafter)
    trained = {} if training is None or training.seconds is None else {"trained": training.seconds}
    data = {"plain": row.plain_tokens_per_s, "fast": row.tokens_per_s} | trained
    settings = {name: value for name, _, value in SETTINGS}
    figures = costs(data["plain"], data["fast"], data.get("trained"), **settings)
    return CostLine(named(row), data, texts(figures) | {"price": money(settings["price"])})


def texts(figures: Costs) -> dict[str, str]:
    return {
        "before": money(figures.before), "after": money(figures.after), "saved": money(figures.saved),
        "hours": f"{figures.hours[0]:,.1f} → {figures.hours[1]:,.1f}",
        "built": MISSING if figures.built is None else money(figures.built), "payback": duration(figures.payback),
    }  # fmt: skip


def money(value: float) -> str:
    sign = "−" if value < 0 else ""
    size = abs(value)
    decimals = 0 if size >= 1000 else 2 if size >= 0.1 or size == 0 else 4
    return f"{sign}${size:,.{decimals}f}"


def duration(days: float | None) -> str:
    if days is None:
        return MISSING
    if days > 3650:
        return "never" if days == float("inf") else "over 10 years"
    if days == 0:
        return "at once"
    return f"{days * 24:,.1f} hours" if days < 2 else f"{days:,.1f} days"
