"""`outrider prepare FILE --look N`: texts as the target reads them, and which tokens are trained on."""

from pathlib import Path

from rich.text import Text

from outrider.cli import console
from outrider.cli.console import say
from outrider.runs.forecast.samples import Sample, samples

OPEN, CLOSE = "«", "»"
"""Marks around tokens that are trained on, without colours."""


def show_samples(file: Path, overrides: list[str], count: int) -> None:
    """Print samples, with tokens that are trained on in green or between « and »."""
    marks = ("", "") if console.out.color_system else (OPEN, CLOSE)
    for number, sample in enumerate(samples(file, overrides, count)):
        say(f"{number + 1}. {sample.id}: {_facts(sample)}", "bold")
        shown = Text()
        for text, trains in sample.pieces:
            text = console.written(text)
            shown.append(f"{marks[0]}{text}{marks[1]}" if trains else text, "green" if trains else "dim")
        console.out.print(shown, soft_wrap=True)
        say("")


def _facts(sample: Sample) -> str:
    parts = [f"{sample.trained} of {sample.tokens} tokens train"]
    if sample.unstable:
        parts.append(f"{sample.unstable} answers do not: their boundaries are ambiguous, or they were cut off")
    if not sample.is_answered:
        parts.append("the target's answer follows here and trains the drafter")
    return "; ".join(parts)
