"""What a report says in words: a headline, alarms, a table for a terminal or a README.  Every word follows from a number."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table
from rich.text import Text

from outrider.report.schema import Report, Row

MISSING = "not measured"
NOT_EXACT = "NOT EXACT"
SKEW = 0.05
"""How far below what training expected acceptance may lie without a word."""


def say(value: float | None, spec: str = ".2f", unit: str = "", *, scale: float = 1, missing: str = MISSING) -> str:
    """A number with its unit; None is said, not hidden."""
    return missing if value is None else f"{value * scale:,{spec}}{unit}"


def many(count: int, noun: str) -> str:
    """`count` with its noun, in the plural where there is not one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def conditions(row: Row) -> str:
    """Task, temperature and prompts: rows that share them can be compared."""
    return " · ".join(part for part in (row.task, f"T {row.temperature:g}", many(row.prompts, "prompt")) if part)


def named(row: Row) -> str:
    """A row in one line of a table."""
    return " · ".join(part for part in (row.drafter, row.task, f"T {row.temperature:g}") if part)


def crossing(row: Row) -> str:
    """That it was trained beside another precision, and what that lost, in words; empty where it was not."""
    if not row.crosses_precisions:
        return ""
    lost = row.tokens_per_step_lost
    by_it = "" if lost is None else f", {abs(lost):.2f} tokens per step {'fewer' if lost >= 0 else 'more'} by it"
    return f"trained on {row.trained_on}, served on {row.precision}{by_it}"


def skew(row: Row) -> str:
    """That less is kept than training expected, at the depth where most is missing; empty where it is not so.

    More than 5 points, and more than three standard errors: depths are many, and the steps of a text are alike.
    """
    short = []
    for depth, (wanted, kept) in enumerate(zip(row.predicted_by_depth, row.accepted_by_depth, strict=False), 1):
        if wanted is None or kept is None:
            continue
        drafts = sum(sum(counts) for counts in row.accepted_histogram[depth:])
        error = math.sqrt(wanted * (1 - wanted) / drafts) if drafts else 0.0
        if wanted - kept > max(SKEW, 3 * error):
            short.append((wanted - kept, depth, wanted, kept))
    if not short:
        return ""
    _, depth, wanted, kept = max(short)
    return (
        f"{row.drafter}{f' on {row.task}' if row.task else ''} at temperature {row.temperature:g} keeps "
        f"{100 * kept:.0f} % of its drafts to depth {depth}, where its training expected {100 * wanted:.0f} %: it is fed "
        "other inputs than in training, or these texts are unlike those it learnt from."
    )


def loss(row: Row) -> str:
    """What a lossy rule did, in words; empty under the exact rule."""
    if row.lossless is not False:
        return ""
    return f"not lossless, by rule {row.rule or 'unknown'}: {say(row.distance, '.3g')} from the exact distribution per token"


def compared(row: Row) -> int | None:
    """Tokens that were compared with the target's own; None where none were."""
    return None if row.exact is None and not row.is_inexact else row.compared_tokens


def differing(row: Row) -> list[str]:
    """The prompts whose text differs, with the place of the first token that does."""
    return [
        prompt.id + ("" if prompt.first_difference is None else f" (after {many(prompt.first_difference, 'token')})")
        for prompt in row.different
    ]


def left_out_names(report: Report) -> list[str]:
    """The prompts that were left out, each with its reason."""
    return [
        f"{out.id} ({'one token' if out.reason == 'short' else say(out.fresh_share, '.0f', '%', scale=100) + ' fresh'})"
        for out in report.left_out
    ]


def headline(report: Report, *, with_alarms: bool = True) -> str:
    """What was found, in one sentence; with `with_alarms`, one more for every other row whose text is not the target's own,
    and for every row that keeps less than its training expected."""
    row = report.lead
    if row is None:
        return "Nothing was measured: the report has no rows."
    alone = len({(row.task, row.temperature) for row in report.rows}) == 1
    where = "" if alone else f"On {row.task or 'its prompts'} at temperature {row.temperature:g}, "
    crossed = f" ({crossing(row)})" if row.crosses_precisions else ""
    first = f"{where}{row.drafter}{crossed} {_pace_said(row)}; {_truth_said(row)}."
    if not with_alarms:
        return first
    return " ".join([first, *(alarm for other, alarm in alarms(report) if other is not row), *skews(report)])


def left_out_because(report: Report) -> str:
    """Why prompts were left out, as half a sentence."""
    short = sum(left_out.reason == "short" for left_out in report.left_out)
    if not short:
        return "because the target's own text loops there"
    if short == len(report.left_out):
        return "because the target answers them with one token"
    return f"because the target's own text loops there, or in {short} is one token"


def skews(report: Report) -> list[str]:
    """A sentence for every row that keeps less than its training expected."""
    return [said for row in report.rows if (said := skew(row))]


def alarms(report: Report) -> list[tuple[Row, str]]:
    """A sentence for every row whose text is not the target's own."""
    return [
        (row, f"NOT EXACT: {row.drafter}{f' on {row.task}' if row.task else ''} at temperature {row.temperature:g}; "
              f"{_truth_said(row)}.")
        for row in report.rows if row.is_inexact
    ]  # fmt: skip


def table(report: Report) -> Table:
    """Every row, for a terminal; a text that is not the target's own stands in white on red."""
    title = Text(f"{report.target}: drafters against the target alone")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=0, show_edge=False)
    # least widths: at 80 columns names and lists wrap, but no number is cut
    table.add_column("drafter", overflow="fold")
    table.add_column("task", overflow="fold")
    table.add_column("T", justify="right", no_wrap=True)
    table.add_column("tokens\n/step", justify="right", min_width=6)
    table.add_column("kept at\ndepth\n1 2 … %")
    for name, least in (
        ("tokens\n/s", 6), ("plain\n/s", 5), ("speed\n-up", 5), ("exact", 5), ("draft/\nverify/\nother %", 7),
        ("loop\n%", 4), ("TTFT\nms\np50", 4), ("ITL\np50\np95", 4),
    ):  # fmt: skip
        table.add_column(name, justify="right", min_width=least)
    for row in report.rows:
        accepted = " ".join(f"{_dash(value, '.0f', scale=100):>2}" for value in row.accepted_by_depth)
        share = "/".join(_dash(v, ".0f", scale=100) for v in (row.share.draft, row.share.verify, row.share.other))
        itl = f"{_digits(row.itl_ms.p50)} {_digits(row.itl_ms.p95)}"
        table.add_row(
            Text(row.drafter), Text(row.task), f"{row.temperature:g}", _dash(row.tokens_per_step, ".2f"),
            accepted or "–", _digits(row.tokens_per_s), _digits(row.plain_tokens_per_s), _dash(row.speedup, ".2f", "×"),
            _exact_mark(row),
            share, _dash(row.loop_overhead, ".1f", scale=100), _digits(row.ttft_ms.p50), itl,
        )  # fmt: skip
    return table


def markdown(report: Report) -> str:
    """The short table for a README; tasks are named where there is more than one."""
    tasks = len({row.task for row in report.rows}) > 1
    heads = ["drafter", *["task"] * tasks, "temperature", "tokens per step", "speed-up"]
    heads += ["tokens/s", "plain tokens/s", "exact"]
    left = 1 + tasks
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * left + "---:|" * (len(heads) - left - 1) + "---|"]
    for row in report.rows:
        cells = [
            _cell(row.drafter), *[_cell(row.task)] * tasks, f"{row.temperature:g}", _dash(row.tokens_per_step, ".2f"),
            _dash(row.speedup, ".2f", "×"), _dash(row.tokens_per_s, ".1f"),
            _dash(row.plain_tokens_per_s, ".1f"), _exact_said(row),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _dash(value: float | None, spec: str, unit: str = "", scale: float = 1) -> str:
    return say(value, spec, unit, scale=scale, missing="–")


def _exact_mark(row: Row) -> Text:
    """Yes, no or not compared, with the distance that a lossy rule had: NO and a lossy rule must not be missed."""
    mark = Text("NO", "bold white on red") if row.is_inexact else Text("yes" if row.exact else "–")
    if row.lossless is False:
        mark.append(Text(f" lossy {_dash(row.distance, '.3f')}", "bold white on red"))
    return mark


def _digits(value: float | None) -> str:
    """A number with a decimal while it is below 100."""
    return _dash(value, ".1f" if value is not None and value < 99.95 else ".0f")


def _cell(text: str) -> str:
    """Text that can't end a Markdown cell or start markup in it."""
    text = " ".join(text.split())
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, "\\" + mark)
    return text


def _pace_said(row: Row) -> str:
    """Tokens per pass and speed, as far as they were measured."""
    speed, depth = row.speedup, ""
    if row.tokens_per_step is not None:
        depth = f"writes {row.tokens_per_step:.1f} tokens per target pass and "
    if speed is None:
        return depth + "was not timed"
    if 0.97 < speed < 1.03:
        return depth + "is about as fast as the target alone"
    if speed < 1:
        return depth + f"is slower than the target alone, at {speed:.2f}× its speed"
    return depth + f"is {speed:{'.1f' if speed >= 1.2 else '.2f'}}× as fast as the target alone"


def _truth_said(row: Row) -> str:
    """Whether the texts are the target's own, as half a sentence."""
    return "; ".join(part for part in (loss(row), _equality_said(row)) if part)


def _equality_said(row: Row) -> str:
    if row.is_inexact:
        if not row.different:
            return "its text is not the target's own"
        count, first = len(row.different), row.different[0]
        said = f"{count} of {many(row.prompts, 'text')} {'differs' if count == 1 else 'differ'} from the target's own"
        at = "" if first.first_difference is None else f" after {many(first.first_difference, 'token')}"
        return f"{said}{': ' if count == 1 else ', such as '}{first.id}{at}"
    if row.exact is None:
        sampled = f"are drawn at temperature {row.temperature:g} and so not compared word for word"
        return "its texts " + (sampled if row.temperature > 0 else "were not compared with the target's own")
    every = "its one text" if row.prompts == 1 else f"every one of {many(row.prompts, 'text')}"
    compared = "" if row.compared_tokens is None else f", {row.compared_tokens:,} tokens compared"
    return f"{every} is identical to the target's own{compared}"


def _exact_said(row: Row) -> str:
    compared = "" if row.compared_tokens is None else f", {row.compared_tokens:,} tokens compared"
    said = f"**NO**{compared}" if row.is_inexact else "–" if row.exact is None else f"yes{compared}"
    return f"{said}; {_cell(loss(row))}" if loss(row) else said
