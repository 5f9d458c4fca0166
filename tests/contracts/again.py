"""The tests of every drafter again, over other cases; the file that asks has fixtures of its own."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest


def of_cases(module: types.ModuleType, cases: Sequence[Any]) -> Iterator[tuple[str, Callable[..., None]]]:
    """Name and test of each test of `module` that runs for every drafter, for these cases."""
    for name, test in vars(module).items():
        marks = getattr(test, "pytestmark", [])
        if any(is_of_case(mark) for mark in marks):
            again = types.FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
            others = [mark for mark in marks if not is_of_case(mark)]
            again.pytestmark = [*others, pytest.mark.parametrize("case", cases, ids=str).mark]
            again.__doc__ = test.__doc__
            yield name, again


def is_of_case(mark: pytest.Mark) -> bool:
    return mark.name == "parametrize" and mark.args[0] == "case"
