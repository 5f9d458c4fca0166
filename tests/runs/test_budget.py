"""A planned run fits into its minutes, uses them, and says what would be enough where they are too few."""

import pytest

from outrider.drafters import kinds
from outrider.errors import ConfigError
from outrider.runs.file import RunConfig
from outrider.runs.forecast import budget
from outrider.runs.forecast.budget import Rates
from outrider.targets.sketch import sketch

RATES = Rates(answer=0.2, alone=0.007, reference=0.05, read=0.1, step=0.8)
SETTINGS = RunConfig(
    name="planned",
    target={"name": "demo"},
    drafter={"kind": "dspark"},
    prepare={"max_new_tokens": 224},
    train={"steps": 1, "batch": 8},
    evaluate={"tasks": ["stdlib"], "temperatures": [0.0, 0.7], "baselines": ["ngram", "suffix"]},
)


def seconds_of(plan: budget.Plan, rates: Rates) -> float:
    """Counted here once more, from what the plan says it will do."""
    answers = plan.answers * (rates.answer + rates.read)
    measuring = plan.prompts * 96 * (4 * 2 * rates.alone + rates.reference)
    return budget.STARTING_S + answers + plan.steps * rates.step + budget.COMPILING_S + measuring


@pytest.mark.parametrize("speed", [0.3, 1.0, 3.0])
def test_a_plan_fits_its_minutes_and_uses_them(speed: float) -> None:
    """Catches a stage that is not counted, and time that is left over."""
    rates, before = Rates(*(value / speed for value in RATES)), 0
    for minutes in (15, 30, 60, 240):
        plan = budget.planned(SETTINGS, rates, 60 * minutes, None)
        usable = budget.PLANNED * 60 * minutes
        assert 0.95 * usable < seconds_of(plan, rates) <= usable
        assert sum(plan.minutes.values()) == pytest.approx(seconds_of(plan, rates) / 60)
        assert budget.PASSES - 0.2 < 8 * plan.steps / plan.answers < budget.PASSES + 0.5
        assert plan.steps > before
        before = plan.steps


def test_few_prompts_are_not_learnt_by_heart() -> None:
    """Catches steps without end over the prompts that there are."""
    plan = budget.planned(SETTINGS, RATES, 24 * 3600, 100)
    assert plan.answers == 100 and plan.steps == budget.MOST_PASSES * 100 // 8


def test_too_few_minutes_are_refused_with_how_many_would_do() -> None:
    """Catches a run of nothing, and advice that is refused in its turn."""
    for left in (-60.0, 0.0, 60.0, 150.0):
        with pytest.raises(ConfigError, match="minutes are left") as refused:
            budget.planned(SETTINGS, RATES, left, None)
        more = int(str(refused.value).partition("give about ")[2].partition(" ")[0])
        assert 1 <= more <= 5
        assert budget.planned(SETTINGS, RATES, left + 60 * more, None).steps >= budget.FEWEST_STEPS
    with pytest.raises(ConfigError, match="1 answers|0 answers"):
        budget.planned(SETTINGS, RATES, 900, 1)


def test_sizes_are_settings_that_the_kind_has() -> None:
    for kind in kinds():
        for vocabulary in (300, 49_152):
            for key in budget.sizes(kind, vocabulary):
                assert key in budget.find(kind).Config.model_fields
    assert budget.sizes("dspark", 49_152)["vocabulary"] == budget.DRAFTED
    assert "vocabulary" not in budget.sizes("dspark", 300) and budget.sizes("eagle3", 49_152) == {}


def test_a_target_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = sketch("demo")
    budget.refuse_too_large(target)
    monkeypatch.setattr(budget.machine, "free_memory", lambda: 3 * target.parameters)
    with pytest.raises(ConfigError, match="smaller target"):
        budget.refuse_too_large(target)
