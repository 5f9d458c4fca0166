"""A fingerprint is the same while the machine is, and says in words what is not."""

import json
from typing import Any

import pytest
import torch
from tiny import folder, talker

from outrider.measure.fingerprint import fingerprint
from outrider.report.compare import differences
from outrider.report.schema import Report
from outrider.targets.hf.transformers import TransformersTarget

__all__ = ["folder", "talker"]


def test_it_is_the_same_twice_and_survives_a_report(talker: TransformersTarget) -> None:
    """Catches a clock, an address or a free-memory figure in it, and a value that JSON changes."""
    first, second = fingerprint(talker), fingerprint(talker)
    assert first == second
    assert json.loads(Report(target="t", fingerprint=first).json_text())["fingerprint"] == first
    assert differences(first, second) == []


def test_it_says_what_times_depend_on(talker: TransformersTarget) -> None:
    """Catches a setting that changes times and leaves the fingerprint as it was."""
    found = fingerprint(talker, drafter_quantised="int8")
    assert found["torch"] == torch.__version__
    assert (found["dtype"], found["quantised"], found["compiled"], found["device"]) == ("float64", None, False, "cpu")
    assert found["drafter_quantised"] == "int8"
    assert found["cores"] and found["memory_gb"] and found["cpu"]
    assert not {"commit", "outrider", "made"} & found.keys()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        changed = fingerprint(talker, drafter_quantised="int8")
    finally:
        torch.set_num_threads(threads)
    assert differences(found, changed) == [f"threads {threads} against {threads + 1}"]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"cpu": "A"}, {"cpu": "B"}, ["cpu A against B"]),
        ({"cpu": "A", "torch": "2.9"}, {"torch": "2.9", "cpu": "A"}, []),
        ({"cpu": "A"}, {"cpu": "A", "gpu_driver": "550"}, ["gpu driver unknown against 550"]),
        ({"compiled": True, "x": 1}, {"compiled": False, "x": 1}, ["compiled yes against no"]),
        ({"gpu": None, "x": 1}, {"x": 1}, []),
        ({}, {"cpu": "A"}, ["the first report has no fingerprint"]),
        ({}, {}, ["the first report has no fingerprint", "the second report has no fingerprint"]),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2, "0": 3}, ["b 1 against 2", "a 1 against 2", "0 unknown against 3"]),
    ],
)
def test_what_differs_is_said_in_words(a: dict[str, Any], b: dict[str, Any], said: list[str]) -> None:
    """Catches two unknown machines that count as one, and a difference that is only in one of the two."""
    assert differences(a, b) == said
    assert bool(differences(b, a)) == bool(said)
