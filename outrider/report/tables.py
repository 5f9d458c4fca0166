"""The table of a report: for a terminal of any width, and for a README in Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from outrider.report.parts import Range
from outrider.report.schema import Report, Row
from outrider.report.summary import UNDER_LOAD, by_group, by_position, loss, named, say

ALARM = "bold white on red"


class Measure(NamedTuple):
    """A measure of every row."""

    head: str
    """At most two lines."""
    cell: Callable[[Row], Text]
    is_number: bool = True
    name: str = ""
    """The head on one line, if it is not simply its lines joined."""

    @property
    def title(self) -> str:
        return self.name or " ".join(self.head.split())


@dataclass(frozen=True)
class SummaryTable:
    """Every row for a terminal, with the columns that fit; if the main ones do not fit, each row is a block."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.report.target}: drafters against the target alone")
        columns, width = _columns(self.report), options.max_width
        fitting, details = columns[: -len(_DETAILS)], columns[-len(_DETAILS) :]
        if _width(self.report, fitting, gap=1) > width:
            yield from self._blocks()
        else:
            for column in details:
                if _width(self.report, [*fitting, column], gap=2) <= width:
                    fitting.append(column)
            yield self._table(fitting, gap=2 if _width(self.report, fitting, gap=2) <= width else 1)
        if any(row.under_load for row in self.report.rows):
            yield Text(f"! {UNDER_LOAD}", ALARM)
        yield from (Text(line) for line in (*by_group(self.report), *by_position(self.report)))

    def _table(self, columns: list[Measure], gap: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
        for column in columns:
            table.add_column(column.head, justify="right" if column.is_number else "left", no_wrap=True)
        for row in self.report.rows:
            table.add_row(*(column.cell(row) for column in columns))
        return table

    def _blocks(self) -> RenderResult:
        """A line per measure, for terminals too narrow or names too long for a table."""
        for row in self.report.rows:
            yield Text()
            yield Text(named(row), "bold", no_wrap=True, overflow="ignore")
            block = Table.grid(Column(), Column(no_wrap=True), padding=(0, 2, 0, 0))
            for measure in (*_MEASURES[1:], *_DETAILS):
                block.add_row(Text(measure.title, "dim"), measure.cell(row))
            yield block


def _width(report: Report, columns: list[Measure], gap: int) -> int:
    """Width in characters of a table with these columns."""
    texts = [[*column.head.split("\n"), *(column.cell(row).plain for row in report.rows)] for column in columns]
    return sum(max(map(len, text)) for text in texts) + gap * (len(columns) - 1)


def markdown(report: Report) -> str:
    """The table for a README."""
    columns = _columns(report)[: -len(_DETAILS)]
    lines = ["| " + " | ".join(column.title for column in columns) + " |"]
    lines.append("|" + "".join("---:|" if column.is_number else "---|" for column in columns))
    lines += ["| " + " | ".join(_markdown_cell(column.cell(row)) for column in columns) + " |" for row in report.rows]
    if any(row.under_load for row in report.rows):
        lines += ["", f"! {UNDER_LOAD}"]
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: Text) -> str:
    """Text escaped for a Markdown cell; alarms are bold."""
    text = " ".join(cell.plain.split())
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, "\\" + mark)
    return f"**{text}**" if cell.style == ALARM else text


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _columns(report: Report) -> list[Measure]:
    """All columns, the most important first; with the task if there are several."""
    tasks = {row.task for row in report.rows}
    task = [Measure("task", lambda row: Text(row.task), is_number=False)] if len(tasks) > 1 else []
    return [Measure("drafter", lambda row: Text(row.drafter), is_number=False), *task, *_MEASURES, *_DETAILS]


def _number(value: Callable[[Row], float | None], spec: str) -> Callable[[Row], Text]:
    return lambda row: Text(_dash(value(row), spec))


def _dash(value: float | None, spec: str, scale: float = 1) -> str:
    return say(value, spec, scale=scale, missing="–")


def _speedup(row: Row) -> Text:
    text = say(row.speedup, ".2f", "×", missing="–") + _ends(row.speedup_range)
    return Text(f"{text} !", ALARM) if row.under_load else Text(text)


def _ends(figure: Range | None) -> str:
    return (
        "" if figure is None or figure.low is None or figure.high is None else f" ({figure.low:.2f}–{figure.high:.2f})"
    )


def _equal(row: Row) -> Text:
    """Yes, NO or not compared, with the distance of a lossy rule; NO and lossy rules stand out."""
    answer = "NO" if row.is_inexact else "yes" if row.exact else "–"
    return Text(
        answer + (f" lossy {_dash(row.distance, '.3f')}" if loss(row) else ""),
        ALARM if row.is_inexact or loss(row) else "",
    )


def _shares(row: Row) -> Text:
    return Text("/".join(_dash(value, ".0f", 100) for value in (row.share.draft, row.share.verify, row.share.other)))


def _accepted(row: Row) -> Text:
    return Text(" ".join(f"{_dash(value, '.0f', 100):>2}" for value in row.accepted_by_depth) or "–")


_MEASURES = (
    Measure("T", lambda row: Text(f"{row.temperature:g}"), name="temperature"),
    Measure("tokens\n/step", _number(lambda row: row.tokens_per_step, ".2f"), name="tokens per step"),
    Measure("speed-up\n(95 %)", _speedup),
    Measure("tokens\n/s", _number(lambda row: row.tokens_per_s, ".0f"), name="tokens/s"),
    Measure("\nalone", _number(lambda row: row.plain_tokens_per_s, ".0f"), name="tokens/s alone"),
    Measure("ms per\ntoken", _number(lambda row: row.tpot_ms.p50, ".1f")),
    Measure("\nalone", _number(lambda row: row.plain_tpot_ms.p50, ".1f"), name="ms per token alone"),
    Measure("texts\nequal", _equal, is_number=False),
)
_DETAILS = (
    Measure("accepted to\ndepth 1, 2, … %", _accepted, is_number=False),
    Measure("first\ntoken ms", _number(lambda row: row.ttft_ms.p50, ".0f"), name="first token ms"),
    Measure("draft/verify\n/other %", _shares, name="draft, verify, other %"),
)
