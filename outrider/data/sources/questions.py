"""Questions for chat models about the functions of installed Python source, one per function.

The source is only parsed: it is not shipped, imported or run.
"""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from outrider.demo import Module

SHORT, LONG = 40, 600
"""Minimum characters of a docstring's first paragraph, maximum characters of a function's source."""

TEMPLATES = (
    "Write a Python function `{name}` with this description:\n\n{description}",
    "What does this Python function do? Go through it line by line.\n\n```python\n{source}\n```",
    "Write three unit tests for this function.\n\n```python\n{source}\n```",
    "Put this into plain words for somebody who has just begun to program: {description}",
    "Rewrite this function in JavaScript, and say what had to change.\n\n```python\n{source}\n```",
    "Name a use of a function `{name}` that is described as follows, and give a short example of calling it.\n\n"
    "{description}",
    "How could this function be made easier to read? Show the new version.\n\n```python\n{source}\n```",
    "List what can go wrong when `{name}` is called.\n\n```python\n{source}\n```",
)


class Function(NamedTuple):
    """A function of a module, as source text."""

    place: str
    """Its module and first line number."""
    name: str
    description: str
    """First paragraph of its docstring, on one line."""
    source: str


def questions(modules: Iterable[Module], seed: str) -> Iterator[tuple[str, str]]:
    """(id, question) for every function of these modules that has a description, shuffled by `seed`.

    The first function of every module comes before the second of any.
    """
    noise, ranked = random.Random(seed), []
    for module in modules:
        described = list(functions(module))
        noise.shuffle(described)
        ranked += [(turn + noise.random(), function) for turn, function in enumerate(described)]
    for _, function in sorted(ranked):
        yield function.place, noise.choice(TEMPLATES).format(**function._asdict())


def functions(module: Module) -> Iterator[Function]:
    """The short functions of a module that have a description; none if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns about string escapes in that source
            tree = ast.parse(module.text)
    except (SyntaxError, ValueError):
        return
    lines = module.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
            continue
        description = " ".join(inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0].split())
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if len(description) >= SHORT and len(source) <= LONG:
            yield Function(f"{module.name}:{node.lineno}", node.name, description, source)
