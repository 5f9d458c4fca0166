"""Instructions without end: questions about installed functions, and every instruction again under another id."""

import itertools

import pytest

from outrider.data.config import Source
from outrider.data.sources.questions import functions, questions
from outrider.data.sources.readers import Skipped, instructions, rows
from outrider.demo import HELD_OUT, Module

TEXT = '''
class Box:
    """No function."""

    def fold(self, times):
        """Fold the box as often as that, along its
        longest side.

        Nothing of this paragraph is asked.
        """
        return self.side / 2**times

    def __len__(self):
        """Special methods are called by others than those who read them."""

    def short(self):
        """Too short."""


async def long():
    """A function whose source is longer than a question should be, however it is asked."""
    return "%s"
'''


def test_functions_are_those_with_a_description() -> None:
    """Catches a special method, a description's second paragraph, an indented source, one too long."""
    [one] = functions(Module("box.py", TEXT % ("x" * 600)))
    assert one.place == "box.py:5" and one.name == "fold"
    assert one.description == "Fold the box as often as that, along its longest side."
    assert one.source.startswith("def fold(self, times):\n    ") and one.source.endswith("return self.side / 2**times")
    assert not list(functions(Module("no.py", "def f(:"))) and not list(functions(Module("no.py", "\0")))
    several = [Module(f"{name}.py", TEXT % "") for name in "abcd"]
    asked = list(questions(several, "1"))
    assert {place.split(".")[0] for place, _ in asked[:4]} == set("abcd") and len(asked) == 8
    assert asked == list(questions(several, "1")) != list(questions(several, "2"))
    assert all("{" not in text for _, text in asked)


@pytest.mark.parametrize("seed", [0, 3])
def test_instructions_for_training_go_on(seed: int) -> None:
    """Catches an id that names two answers, a kind that is left behind, a held-out instruction or module."""
    source = Source(path="instructions:train", count=2200)
    found = list(rows(source, False, Skipped(), seed))
    assert len({place for place, _ in found}) == len(found) == 2200
    first, later = [row for _, row in found[:720]], [row for _, row in found[720:]]
    assert first == list(instructions("train", seed))
    again = [row["turns"] for row in later[1::2]]
    assert again[:720] == [row["turns"] for row in first] and again[720:] == again[:20]
    for row in later[::2]:
        assert row["id"].split(":")[2].split("/")[0].removesuffix(".py") not in HELD_OUT
    held_out = [row["turns"] for row in instructions("held_out", seed)]
    assert not [row for row in later if row["turns"] in held_out]
    assert list(itertools.islice(rows(source, False, Skipped(), seed), 30)) == found[:30]
