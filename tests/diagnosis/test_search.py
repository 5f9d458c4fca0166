"""The search for causes, on set-ups whose steps follow from a rule."""

import random
from collections.abc import Callable

from outrider.diagnosis import search
from outrider.diagnosis.bench import Setup
from outrider.diagnosis.changes import Change
from outrider.diagnosis.search import Diagnosis, Texts
from outrider.diagnosis.walk import Steps

TEXTS = 24


def change(field: str, value: object) -> Change:
    return Change(field, field, value, "wrong", "right", "correct it")


ALTERNATIVES = [
    change(f"settings.{name}", value) for name in ("taps", "rope", "eps", "mask") for value in ("right", "odd")
]


def measured_by(rule: Callable[[Setup], float]) -> search.Measure:
    """Texts of 100 tokens whose difficulty is their own, and whose steps also have noise of each set-up."""

    def measure(setup: Setup, only: slice) -> list[Steps]:
        noise = random.Random(repr(setup))
        every = [Steps(100.0, 100 / rule(setup) * (0.8 + i / 60) * noise.gauss(1, 0.01)) for i in range(TEXTS)]
        return every[only]

    return measure


def diagnosed(rule: Callable[[Setup], float], setup: Setup, *differing: Change) -> Diagnosis:
    return search.diagnose(measured_by(rule), setup, differing, ALTERNATIVES)[0]


def names(diagnosis: Diagnosis) -> list[str]:
    return sorted(cause.name for cause in diagnosis.causes)


def test_nothing_is_named_where_nothing_helps() -> None:
    """Catches noise that is taken for a cause: 40 sound set-ups, eight alternatives each, none of which may pass."""
    for number in range(40):
        assert names(diagnosed(lambda setup: 2.5, Setup(temperature=number / 40))) == []


def test_one_cause_is_named_with_its_cost() -> None:
    """Catches an alternative that is not tried, and a cost with the wrong sign."""
    result = diagnosed(lambda setup: 2.5 if setup.settings.get("rope") == "right" else 2.0, Setup())
    assert names(result) == ["settings.rope"]
    assert 0.3 < result.causes[0].cost.low < 0.5 < result.causes[0].cost.high < 0.7


def test_two_causes_that_hide_each_other_are_both_named() -> None:
    """Catches a search that changes one part at a time: with either fault alone nothing is accepted."""

    def rule(setup: Setup) -> float:
        return 2.5 if (setup.settings.get("taps"), setup.settings.get("mask")) == ("right", "right") else 1.05

    assert names(diagnosed(rule, Setup())) == ["settings.mask", "settings.taps"]


def test_a_recorded_cause_is_named_although_an_unrecorded_one_hides_it() -> None:
    """Catches a cost that is measured in the faulty set-up, where changing one part back gains nothing."""

    def rule(setup: Setup) -> float:
        return 2.5 if setup.temperature == 0.5 and setup.settings.get("taps") == "right" else 1.2

    assert names(diagnosed(rule, Setup(temperature=2.0), change("temperature", 0.5))) == [
        "settings.taps",
        "temperature",
    ]


def test_a_difference_without_a_cost_is_not_a_cause() -> None:
    """Catches a cause that is named because it differs."""
    result = diagnosed(lambda setup: 2.0, Setup(temperature=1.0), change("temperature", 0.5))
    assert names(result) == []
    assert [each.name for each in result.no_effect] == ["temperature"]
    result = diagnosed(
        lambda setup: 2.5 if setup.settings.get("rope") == "right" else 2.0, Setup(temperature=1.0),
        change("temperature", 0.5),
    )  # fmt: skip
    assert names(result) == ["settings.rope"]


def test_texts_are_compared_with_those_of_the_training() -> None:
    """Catches a gap that is blamed on texts of the same kind, and one that is not named by what differs."""
    code, chat = Texts({"English": 1.0}, {"code": 1.0}), Texts({"English": 1.0}, {"chat": 1.0})
    german = Texts({"German": 1.0}, {"code": 1.0})
    steps = measured_by(lambda setup: 2.0)(Setup(), slice(None))
    better = measured_by(lambda setup: 2.6)(Setup(), slice(None))
    for texts, expected, name in (
        (chat, better, "domain"), (german, better, "language"), (code, better, "prompts"), (chat, steps, None),
    ):  # fmt: skip
        result = diagnosed(lambda setup: 2.0, Setup())
        search.compare_texts(result, steps, expected, texts, code)
        assert names(result) == ([] if name is None else [name])
