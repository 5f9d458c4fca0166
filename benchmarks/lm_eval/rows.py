"""Rows of our own lm-eval tasks, from library modules that the demo's models never saw.  Nothing of them is stored."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from typing import Any

import datasets

from outrider import demo

CHARACTERS = 500
"""Of text before what is asked."""
ASSIGNMENT = re.compile(r"^( +self)(\._?(\w+) = \3\n)", re.MULTILINE)


def assignments(count: int, **_: Any) -> datasets.DatasetDict:
    """Text up to `self`, where the line goes on as `.name = name`; the line's rest is wanted."""
    found = [row for module in demo.modules("held_out") for row in _assignments(module.text)]
    return _shuffled(found, count)


def _assignments(text: str) -> Iterator[dict[str, Any]]:
    for match in ASSIGNMENT.finditer(text):
        before = _before(text, match.start())
        if before and re.search(rf"\b{match[3]}\b", before):
            yield {"text": before + match[1], "line": match[2].rstrip("\n")}


def bodies(count: int, **_: Any) -> datasets.DatasetDict:
    """A function's head and two lines: its body's first, and another function's."""
    found = [row for module in demo.modules("held_out") for row in _heads(module.text)]
    order = random.Random(1)
    for row, other in zip(found, order.sample(found, len(found)), strict=True):
        row["label"] = order.randrange(2)
        row["choices"] = [row["first"], other["first"]][:: 1 - 2 * row["label"]]
    return _shuffled(found, count)


def _heads(text: str) -> Iterator[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
            first = node.body[0].lineno - 1
            before = _before(text, starts[first])
            if before:
                yield {"text": before, "first": lines[first]}


def _before(text: str, place: int) -> str:
    """Whole lines before a place, or nothing where there are too few."""
    return text[place - CHARACTERS : place].partition("\n")[2] if place > CHARACTERS else ""


def _shuffled(rows: list[dict[str, Any]], count: int) -> datasets.DatasetDict:
    random.Random(0).shuffle(rows)
    return datasets.DatasetDict(test=datasets.Dataset.from_list(rows[:count]))
