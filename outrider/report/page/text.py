"""The text itself, coloured by what the target decided at each token.  Reads without a script; one makes the tips nicer.

Colour says it and so does an underline, so that neither print nor a colour-blind reader loses it.  Kept tokens darken with
depth: a long draft reads as a wave.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from outrider.report.page.charts import many, tag
from outrider.report.page.figure import Colours, figure

if TYPE_CHECKING:
    from outrider.report.schema import Observed, Report, Row, Tested

MOST = 1600
"""Tokens drawn on one page: each takes about 150 bytes, most of it the tip."""
LONGEST = 400
"""Tokens drawn of one text."""
SHADES = 5


class Sample(NamedTuple):
    """One prompt under one drafter."""

    row: Row
    text: Observed


def observed(report: Report, colours: Colours) -> str:
    """Texts side by side, the drafters of one prompt together."""
    groups, left = _samples(report), MOST
    body, hidden = "", 0
    for number, samples in enumerate(groups):
        size = sum(min(len(sample.text.tokens), LONGEST) for sample in samples)
        if size > left and number:
            hidden += len(samples)
            continue
        left -= size
        first = samples[0]
        head = tag("h3", escape(f"{first.text.id} · {first.row.conditions}"))
        texts = "".join(_text(sample, colours) for sample in samples)
        body += tag("div", head + tag("div", texts, class_=f"texts of-{min(len(samples), 3)}"), class_="prompt")
    if not body:
        return figure("text", "Where the target said no", "")
    note = f'<p class="note">{many(hidden, "more text")} in report.json.</p>' if hidden else ""
    says = (
        "Every token of a few prompts as it was written. Shaded tokens were drafted and kept, the stronger the deeper in "
        "their draft; underlined ones stand where the target turned a drafted token down and wrote its own; bare ones nobody "
        "drafted. "
        "Point at a token, or step through them with the arrow keys, for the odds that both models gave it."
    )
    return figure("text", "Where the target said no", says, f'<div class="reading">{_key()}{body}{note}</div>')


def _samples(report: Report) -> list[list[Sample]]:
    """Samples by prompt; the first prompt of every task comes before any task's second."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for row in report.rows:
        for text in row.observed:
            if text.tokens:
                groups.setdefault((row.conditions, text.id), []).append(Sample(row, text))
    seen: dict[str, int] = {}
    ordered = []
    for (conditions, _), samples in groups.items():
        seen[conditions] = seen.get(conditions, 0) + 1
        ordered.append((seen[conditions], samples))
    return [samples for _, samples in sorted(ordered, key=lambda pair: pair[0])]


def _key() -> str:
    waves = "".join(tag("i", class_=f"swatch k{shade}") for shade in range(1, SHADES + 1))
    # spaces between them: without one a line can't break
    key = tag("span", waves + " kept, depth 1 to 5 and on", class_="key") + " "
    key += tag("span", '<b class="r">no</b> turned down', class_="key") + " "
    key += tag("span", "own, nothing drafted", class_="key")
    choice = '<label class="key choice"><input type="checkbox" id="ghosts"> show what was turned down</label>'
    return tag("p", key + choice, class_="keys flush")


def _text(sample: Sample, colours: Colours) -> str:
    row, tokens = sample.row, sample.text.tokens
    kept = sum(token.kept for token in tokens)
    refused = sum(not token.kept and token.drafted is not None for token in tokens)
    own = len(tokens) - kept - refused
    said = f"{many(len(tokens), 'token')}: {kept} drafted and kept, {refused} turned down, {own} not drafted"
    shown = "".join(_token(token) for token in tokens[:LONGEST])
    rest = len(tokens) - LONGEST
    shown += tag("span", f" … and {many(rest, 'token')} more in report.json", class_="missing") if rest > 0 else ""
    name = tag("h4", tag("i", class_=f"c{colours[row.drafter] % 7} swatch") + escape(row.drafter) + tag("small", escape(said)))
    label = f"{row.drafter}, {sample.text.id}: {said}"
    paper = tag("div", shown, class_="tokens", tabindex="0", role="group", dir="auto", aria_label=label)
    return tag("div", name + paper, class_="text")


def _token(token: Tested) -> str:
    text = escape(token.text).replace("\n", '<i class="nl">⏎</i>\n') if token.text else '<i class="nl">∅</i>'
    if token.drafted is None:
        class_ = "o"
    elif token.kept:
        class_ = f"k{min(max(token.depth or 1, 1), SHADES)}"
    else:
        class_ = "r"
        text = tag("s", escape(_visible(token.drafted))) + text
    return f'<span class="{class_}" title="{escape(_tip(token))}">{text}</span>'


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥") or "∅"


def _tip(token: Tested) -> str:
    """What was judged here, and every number known of it."""
    numbers = [f"target's entropy {token.entropy:.2f} nats"] if token.entropy is not None else []
    if token.drafted is None:
        return "\n".join(["the target's own; nothing was drafted", *numbers])
    where = f" at depth {token.depth}" if token.depth is not None else ""
    verdict = "drafted and kept" if token.kept else f"turned down “{_visible(token.drafted)}”"
    odds = [] if token.p is None else [f"p {_chance(token.p)} target"]
    odds.append("q – certain" if token.q is None else f"q {_chance(token.q)} drafter")
    ranks = [f"rank {token.rank:,}"] if token.rank is not None else []
    return "\n".join([verdict + where, " · ".join(odds), " · ".join([*ranks, *numbers, *([token.kind] if token.kind else [])])])


def _chance(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.1e}"
