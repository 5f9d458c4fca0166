"""A report in words: headline, alarms, and formatted numbers."""

from __future__ import annotations

import math

from outrider.report.bootstrap import MIN_PROMPTS, ratio_of_rates
from outrider.report.parts import PositionRange, Range
from outrider.report.schema import Report, Row
from outrider.targets.text.cuts import sentence

MISSING = "not measured"
NOT_EXACT = "NOT EXACT"
UNDER_LOAD = "measured under load, not to be trusted"
BUSY = 0.05
"""Share of time lost to other programs above which a report mentions it."""
SKEW = 0.05
"""How far acceptance may fall below that measured in training without a warning."""


def say(value: float | None, spec: str = ".2f", unit: str = "", *, scale: float = 1, missing: str = MISSING) -> str:
    """A number with its unit; `missing` for None."""
    return missing if value is None else f"{value * scale:,{spec}}{unit}"


def many(count: int, noun: str) -> str:
    """`count` with its noun, in the plural unless it is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def conditions(row: Row) -> str:
    """Task, temperature and prompts; rows that share them are comparable."""
    return " · ".join(part for part in (row.task, f"T {row.temperature:g}", many(row.prompts, "prompt")) if part)


def named(row: Row) -> str:
    """A row in one line of a table."""
    return " · ".join(part for part in (row.drafter, row.task, f"T {row.temperature:g}") if part)


def by_group(report: Report) -> list[str]:
    """Tokens per step by the prompts' language or category, a line for each row that has several."""
    return [
        f"{named(row)}, tokens per step: "
        + ", ".join(f"{group_name(group.name)} {say(group.tokens_per_step, '.2f')}" for group in row.by_group)
        for row in report.rows
        if len(row.by_group) > 1
    ]


def by_position(report: Report) -> list[str]:
    """Tokens per step by position in the text, a line for each of `long_rows`."""
    return [
        f"{named(row)}, tokens per step: "
        + ", ".join(f"{range_name(part)} {say(part.tokens_per_step, '.2f')}" for part in row.by_position)
        for row in long_rows(report)
    ]


def long_rows(report: Report) -> list[Row]:
    """Rows whose texts span several ranges of positions."""
    return [row for row in report.rows if len(row.by_position) > 1]


def before_and_after(report: Report, before: str) -> list[str]:
    """How the last drafter compares with the one it was fine-tuned from, a line for each task and temperature."""
    after = report.rows[-1].drafter
    rows = {(row.drafter, row.task, row.temperature): row for row in report.rows}
    lines = []
    for (drafter, task, temperature), row in rows.items():
        base = rows.get((before, task, temperature))
        if drafter != after or base is None:
            continue
        earlier = {each.id: each for each in base.per_prompt}
        same = [(each, earlier[each.id]) for each in row.per_prompt if each.id in earlier]
        pairs = [
            (now.tokens, now.steps, then.tokens, then.steps)
            for now, then in same
            if now.tokens and now.steps and then.tokens and then.steps
        ]
        if len(pairs) < MIN_PROMPTS:
            continue
        center, low, high = (100 * (value - 1) for value in ratio_of_rates(pairs))
        lines.append(
            f"{task} · T {temperature:g}: {say(row.tokens_per_step)} tokens per step, "
            f"{say(base.tokens_per_step)} before: {center:+.0f} % ({low:+.0f} to {high:+.0f})"
        )
    return lines


def range_name(part: PositionRange) -> str:
    return f"from {part.begin:,} tokens" if part.end is None else f"{part.begin:,} to {part.end - 1:,}"


def group_name(name: str) -> str:
    return name or "not named"


def interval(figure: Range | None, unit: str = "") -> str:
    """The ends of an interval, such as `1.35 to 1.59`; empty without one."""
    if figure is None or figure.low is None or figure.high is None:
        return ""
    return f"{figure.low:.2f}{unit} to {figure.high:.2f}{unit}"


def crossing(row: Row) -> str:
    """A sentence, with the loss, if the drafter was trained on another precision of the target; otherwise empty."""
    if not row.crosses_precisions:
        return ""
    lost = row.tokens_per_step_lost
    by_it = "" if lost is None else f", {abs(lost):.2f} tokens per step {'fewer' if lost >= 0 else 'more'} by it"
    return f"trained on {row.trained_on}, served on {row.precision}{by_it}"


def skew(row: Row) -> str:
    """A sentence if less is accepted than measured in training, at the depth with the largest gap; otherwise empty.

    The gap must exceed 5 points and three standard errors: there are many depths, and steps of a text are correlated.
    """
    short = []
    for depth, (expected, accepted) in enumerate(zip(row.predicted_by_depth, row.accepted_by_depth, strict=False), 1):
        if expected is None or accepted is None:
            continue
        drafts = sum(sum(counts) for counts in row.accepted_histogram[depth:])
        error = math.sqrt(expected * (1 - expected) / drafts) if drafts else 0.0
        if expected - accepted > max(SKEW, 3 * error):
            short.append((expected - accepted, depth, expected, accepted))
    if not short:
        return ""
    _, depth, expected, accepted = max(short)
    return (
        f"{row.drafter}{f' on {row.task}' if row.task else ''} at temperature {row.temperature:g}: the target accepts "
        f"{100 * accepted:.0f} % of the drafts to depth {depth}, where training measured {100 * expected:.0f} %. "
        "Either the drafter's inputs differ from training, or these texts are unlike those it was trained on."
    )


def distrust(report: Report) -> str:
    """Which speed-ups can't be trusted, and why, as a sentence; empty if all can."""
    rows = [row for row in report.rows if row.under_load is not None]
    if not rows:
        return ""
    others = f", and {many(len(rows) - 1, 'more row')}" if len(rows) > 1 else ""
    return f"{named(rows[0])}{others}: {UNDER_LOAD}, because {rows[0].under_load}. Measure again on a quiet machine."


def busy(report: Report) -> str:
    """The maximum share of time that other programs took, as a sentence; empty if it was small or `distrust` mentions
    it."""
    lost, name = max(((row.contention or 0.0, named(row)) for row in report.rows), default=(0.0, ""))
    if lost <= BUSY or distrust(report):
        return ""
    return f"Other programs took up to {100 * lost:.0f} % of the time ({name}): measure again on a quiet machine."


def loss(row: Row) -> str:
    """The effect of a lossy rule, in words; empty under the exact rule."""
    if row.lossless is not False:
        return ""
    distance = say(row.distance, ".3g")
    return f"not lossless, by rule {row.rule or 'unknown'}: {distance} from the exact distribution per token"


def compared(row: Row) -> int | None:
    """Tokens compared with the target's own; None if none were."""
    return None if row.exact is None and not row.is_inexact else row.compared_tokens


def differing(row: Row) -> list[str]:
    """The prompts whose text differs, with the index of the first different token."""
    return [
        prompt.id + ("" if prompt.first_difference is None else f" (after {many(prompt.first_difference, 'token')})")
        for prompt in row.different
    ]


def left_out_names(report: Report) -> list[str]:
    """The prompts left out, with reasons."""
    share = lambda out: f"{say(out.first_ngram_share, '.0f', '%', scale=100)} not repeated"
    return [f"{out.id} ({'one token' if out.reason == 'short' else share(out)})" for out in report.left_out]


def cut_sentence(report: Report) -> str:
    """Which prompts were cut, in one line; empty if none was."""
    return sentence(report.cut)


def headline(report: Report, *, with_alarms: bool = True) -> str:
    """One sentence: which drafter is how much faster, with its interval, and whether the texts are equal.

    with_alarms: one more for every other row whose text is not the target's own, and for every row that accepts less
    than measured in training.
    """
    row = report.lead
    if row is None:
        return "Nothing was measured: the report has no rows."
    alone = len({(row.task, row.temperature) for row in report.rows}) == 1
    where = "" if alone else f"On {row.task or 'its prompts'} at temperature {row.temperature:g}, "
    crossed = f" ({crossing(row)})" if row.crosses_precisions else ""
    doubt = f", {UNDER_LOAD}" if row.under_load and row.speedup is not None else ""
    first = f"{where}{row.drafter}{crossed} {_pace(row)}{doubt}; {_truth(row)}.{baseline(report)}"
    if not with_alarms:
        return first
    return " ".join([first, *(alarm for other, alarm in alarms(report) if other is not row), *skews(report)])


def baseline(report: Report) -> str:
    """A sentence if the target alone was not measured with its fastest steps; otherwise empty."""
    why = report.provenance.get("slow_baseline")
    return f" The target alone was measured by plain steps, though {why}: its fastest are faster." if why else ""


def left_out_because(report: Report) -> str:
    """Why prompts were left out, as a clause."""
    short = sum(left_out.reason == "short" for left_out in report.left_out)
    if not short:
        return "because the target's own text loops there"
    if short == len(report.left_out):
        return "because the target answers them with a single token"
    return f"because the target's own text loops there, or in {short} is one token"


def skews(report: Report) -> list[str]:
    """A sentence for every row that accepts less than measured in training."""
    return [sentence for row in report.rows if (sentence := skew(row))]


def alarms(report: Report) -> list[tuple[Row, str]]:
    """A sentence for every row whose text is not the target's own."""
    return [
        (row, f"NOT EXACT: {row.drafter}{f' on {row.task}' if row.task else ''} at temperature {row.temperature:g}; "
              f"{_truth(row)}.")
        for row in report.rows if row.is_inexact
    ]  # fmt: skip


def _pace(row: Row) -> str:
    """The speed-up with its interval, if measured."""
    speed, ends = row.speedup, row.speedup_range
    if speed is None:
        return "was not timed" if row.under_load is None else f"has no speed-up, since {row.under_load}"
    within = f" (95 % interval {interval(ends)})" if interval(ends) else ""
    if ends is not None and ends.low is not None and ends.high is not None:
        is_even = ends.low <= 1 <= ends.high
    else:
        is_even = 0.97 < speed < 1.03
    if is_even:
        return f"is about as fast as the target alone, {speed:.2f}×{within}{_rates(row)}"
    if speed < 1:
        return f"is slower than the target alone, at {speed:.2f}× its speed{within}{_rates(row)}"
    return f"is {speed:.2f}× as fast as the target alone{within}{_rates(row)}"


def _rates(row: Row) -> str:
    """Tokens per second of both; empty if not measured."""
    if row.tokens_per_s is None or row.plain_tokens_per_s is None:
        return ""
    return f", {row.tokens_per_s:,.0f} tokens/s beside {row.plain_tokens_per_s:,.0f}"


def _truth(row: Row) -> str:
    """Whether the texts are the target's own, as a clause."""
    return "; ".join(part for part in (loss(row), _equality(row)) if part)


def _equality(row: Row) -> str:
    if row.is_inexact:
        if not row.different:
            return "its text is not the target's own"
        count, first = len(row.different), row.different[0]
        texts = f"{count} of {many(row.prompts, 'text')} {'differs' if count == 1 else 'differ'} from the target's own"
        at = "" if first.first_difference is None else f" after {many(first.first_difference, 'token')}"
        return f"{texts}{': ' if count == 1 else ', such as '}{first.id}{at}"
    if row.exact is None:
        sampled = f"are drawn at temperature {row.temperature:g} and so not compared word for word"
        return "its texts " + (sampled if row.temperature > 0 else "were not compared with the target's own")
    every = "its one text" if row.prompts == 1 else f"each of its {many(row.prompts, 'text')}"
    return f"{every} is identical to the target's own"
