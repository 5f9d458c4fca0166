"""How right the answers are, and whether the drafter had seen the prompts before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.report.page.charts import MISSING, Axis, Spread, panel, say, spreads
from outrider.report.page.figure import LISTED, Colours, figure, grid, named

if TYPE_CHECKING:
    from outrider.report.schema import Clean, Report, Row, Score


def scores(report: Report, colours: Colours) -> str:
    """Scores with the drafter (full) and of the target alone (hollow)."""
    items = []
    for row in report.rows:
        if row.score is not None and (row.score.drafted is not None or row.score.plain is not None):
            items.append(_scored(row, row.score, colours[row.drafter]))
    axis = Axis("share of the answers that are right", 0, 1, lambda value: f"{value:.0%}", (0, 0.25, 0.5, 0.75, 1))
    says = (
        "The filled mark is with the drafter, the stroke is the target alone. Under the law the two must be equal at "
        "temperature 0, and differ by the luck of the draw above it."
    )
    drawing = spreads(items, axis)
    return figure("scores", "Are the answers still right?", says, panel("", drawing) if drawing else "")


def _scored(row: Row, score: Score, colour: int) -> Spread:
    ends = [value for value in (score.drafted, score.plain) if value is not None]
    text = f"{say(score.drafted, '.1f', '%', scale=100)}, alone {say(score.plain, '.1f', '%', scale=100)}"
    text += f", of {score.prompts:,}" if score.prompts else ""
    context = " · ".join(part for part in (row.task, f"T {row.temperature:g}", score.measure) if part)
    return Spread(row.drafter, context, colour, min(ends), score.drafted, max(ends), text, score.plain)


def clean(report: Report, colours: Colours) -> str:
    """All prompts beside those that the drafter can't have seen."""
    found = [(row, row.clean) for row in report.rows if row.clean is not None]
    says = (
        "Prompts that stand in what the drafter learned from, or draws from, flatter it. Each figure again without them; where "
        "the two are far apart, believe the clean one."
    )
    heads = ("", "overlapping", "tokens per step: all", "clean", "speed-up: all", "clean", "right: all", "clean")
    lines = [_line(row, part) for row, part in found]
    # drafters that learned from the same data overlap with the same prompts
    owners: dict[tuple[str, ...], list[str]] = {}
    for row, part in found:
        if part.overlapping:
            owners.setdefault(part.overlapping, []).append(row.drafter)
    rules = sorted({part.rule for _, part in found if part.rule})
    notes = [_listed(ids, drafters) for ids, drafters in owners.items()]
    note = " ".join([f"Overlap is {', or '.join(rules)}." if rules else "", *notes]).strip()
    return figure("clean", "Had the drafter seen these prompts?", says, panel("", grid(heads, lines), note) if lines else "")


def _line(row: Row, part: Clean) -> tuple[str, ...]:
    unknown = f", {row.prompts - part.checked} not known" if part.checked < row.prompts else ""
    overlap = f"{len(part.overlapping)} of {row.prompts}{unknown}" if part.checked else MISSING
    right, still = (None if score is None else score.drafted for score in (row.score, part.score))
    return (
        named(row), overlap, say(row.tokens_per_step), say(part.tokens_per_step), say(row.speedup, ".2f", "×"),
        say(part.speedup, ".2f", "×"), say(right, ".1f", "%", scale=100), say(still, ".1f", "%", scale=100),
    )  # fmt: skip


def _listed(ids: tuple[str, ...], drafters: list[str]) -> str:
    rest = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return f"{', '.join(dict.fromkeys(drafters))}: {', '.join(ids[:LISTED])}{rest}."
