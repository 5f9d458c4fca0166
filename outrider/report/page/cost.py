"""What a million tokens cost before and after, and when a drafter has paid for itself.

The figures stand in the page as text for the settings below; the page's script puts in the reader's own.  Both compute the
same way, and a test holds them together.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from outrider.report.page.charts import MISSING, many, tag
from outrider.report.page.figure import Colours, figure, named

if TYPE_CHECKING:
    from outrider.report.schema import Report, Row


class Setting(NamedTuple):
    """A number that the reader may change in the page."""

    name: str
    says: str
    value: float


SETTINGS = (
    Setting("price", "Machine, $ an hour", 2.5),
    Setting("tokens", "Tokens a day, millions", 10),
    Setting("other", "Other cost of a drafter, $", 0),
)
COLUMNS = (
    ("before", "per million, alone"), ("after", "drafted"), ("saved", "saved a day"),
    ("hours", "machine hours a day"), ("built", "to build"), ("payback", "paid back after"),
)  # fmt: skip


class Costs(NamedTuple):
    """Dollars; hours of the machine a day; days, None where training was not measured, infinite where it never pays."""

    before: float
    after: float
    saved: float
    hours: tuple[float, float]
    built: float | None
    payback: float | None


def costs(plain: float, fast: float, trained_s: float | None, price: float, tokens: float, other: float) -> Costs:
    """plain, fast: tokens/s; price: $ an hour; tokens: millions a day; other: $."""
    before, after = (price / 3600 / speed * 1e6 for speed in (plain, fast))
    saved = (before - after) * tokens
    hours = (tokens * 1e6 / plain / 3600, tokens * 1e6 / fast / 3600)
    built = None if trained_s is None and not other else (trained_s or 0) / 3600 * price + other
    payback = float("inf") if saved <= 0 else None if built is None else built / saved
    return Costs(before, after, saved, hours, built, payback)


def cost(report: Report, colours: Colours) -> str:
    rows = [row for row in report.rows if row.tokens_per_s and row.plain_tokens_per_s]
    if not rows:
        return figure("cost", "What it costs", "")
    inputs = "".join(
        tag(
            "label",
            tag("span", escape(name)) + f'<input type="number" min="0" step="any" data-setting="{key}" value="{value:g}">',
        )
        for key, name, value in SETTINGS
    )
    heads = tag("td") + "".join(tag("th", escape(title), scope="col") for _, title in COLUMNS)
    body = "".join(_line(report, row) for row in rows)
    table = f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    sizes = sorted({row.batch for row in rows if row.batch})
    batch = f" at {' and '.join(many(size, 'request') for size in sizes)} at once" if sizes else ""
    says = (
        f"Price of the machine over the tokens/s measured here{batch}. A server that is full speculates less and shares its "
        "passes among many: measure at your own load before you count on it. Put in your own numbers."
    )
    note = "To build: the machine's price over the hours that this run trained for, and other cost: data, people, a licence. "
    note += "The figures follow as you type; without scripts they stay at the numbers first shown."
    inside = f'<div class="inputs">{inputs}</div>{table}<p class="note">{note}</p>'
    return figure("cost", "What it costs", says, f'<div class="panel">{inside}</div>')


def _line(report: Report, row: Row) -> str:
    training = report.training.get(row.drafter)
    trained = training.seconds if training is not None else None
    plain, fast = row.plain_tokens_per_s or 1.0, row.tokens_per_s or 1.0
    found = costs(plain, fast, trained, *(setting.value for setting in SETTINGS))
    cells = "".join(
        tag("td", escape(text), data_cell=name, class_="missing" if text == MISSING else "")
        for name, text in said(found).items()
    )
    # repr: the script must begin from the same numbers
    data = {"data_plain": repr(plain), "data_fast": repr(fast), "data_trained": "" if trained is None else repr(trained)}
    return tag("tr", tag("th", escape(named(row)), scope="row") + cells, **data)


def said(found: Costs) -> dict[str, str]:
    return {
        "before": money(found.before), "after": money(found.after), "saved": money(found.saved),
        "hours": f"{found.hours[0]:,.1f} → {found.hours[1]:,.1f}",
        "built": MISSING if found.built is None else money(found.built), "payback": duration(found.payback),
    }  # fmt: skip


def money(value: float) -> str:
    sign, size = "−" if value < 0 else "", abs(value)
    places = 0 if size >= 1000 else 2 if size >= 0.1 or size == 0 else 4
    return f"{sign}${size:,.{places}f}"


def duration(days: float | None) -> str:
    if days is None:
        return MISSING
    if days > 3650:
        return "never" if days == float("inf") else "over 10 years"
    if days == 0:
        return "at once"
    return f"{days * 24:,.1f} hours" if days < 2 else f"{days:,.1f} days"
