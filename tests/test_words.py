"""The words of the package: names that say what a thing is, and English that an engineer would say to a colleague."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "outrider"
VAGUE = frozenset({"found", "own", "given", "asked", "wanted", "known", "told", "said"})
"""Not names of variables or parameters: the name of the thing is."""
PHRASES = {
    "that is none,": "say what it is not: `not a valid number`",
    "of which there is": "begin a sentence",
    "there is no X here": "say `unknown`",
    "brings what": "say what is installed or loaded",
    "it goes on where": "say `resumes`",
    "at what one": "say `the settings people change first`",
    "hangs on": "say `depends on`",
    "nobody could ask": "say `no request`",
}


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each variable and parameter that has a vague name."""
    fields = set[ast.Name]()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None:
            fields.add(node.target)  # of a class: a key of a stored file, perhaps
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE and node not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg


def test_variables_are_named_after_what_they_are() -> None:
    """Catches `found = ...`: in a package of 400 files it says nothing."""
    places = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in vague_names(ast.parse(path.read_text("utf-8")))
    ]
    assert not places, "name the thing instead: " + "; ".join(places[:10])


@pytest.mark.parametrize("phrase", PHRASES)
def test_sentences_are_plain_english(phrase: str) -> None:
    """Catches a sentence that reads as translated."""
    pattern = re.compile(re.escape(phrase))
    places = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not places, f"{PHRASES[phrase]}: {', '.join(places[:10])}"


def test_a_vague_name_would_be_seen() -> None:
    """Catches a check that looks at nothing."""
    tree = ast.parse(
        "def f(given):\n    for found in given:\n        own, rest = found\n    return [said for said in own]"
    )
    assert {name for _, name in vague_names(tree)} == {"given", "found", "own", "said"}
