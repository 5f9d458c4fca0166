"""Intervals: they hold what they should as often as they say, and say the same twice."""

import numpy as np
import pytest
from scipy import stats

from outrider.report import bootstrap


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Would catch swapped quantiles, resampling of steps, or a level used on one side.  1,000 trials: 95 +- 3 in 100;
    the odds of a false alarm are below 1e-4 (percentile intervals of 60 prompts hold 94 in 100)."""
    noise = np.random.default_rng(5)
    held = 0
    for trial in range(1000):
        found = bootstrap.geometric_mean(np.exp(noise.normal(0.1, 0.08, 60)), draws=400, seed=trial)
        held += found.low <= np.exp(0.1) <= found.high
    assert 910 <= held <= 975


def test_a_speedup_is_a_ratio_of_totals_with_its_own_interval() -> None:
    """Catches a mean of the prompts' ratios, and an interval around another figure than the one that is shown."""
    noise = np.random.default_rng(2)
    plain, fast = noise.uniform(3, 5, 40), noise.uniform(1, 3, 40)
    values = [(100, seconds, 100, alone) for seconds, alone in zip(fast, plain, strict=True)]
    found = bootstrap.ratio_of_rates(values)
    assert found.center == pytest.approx(plain.sum() / fast.sum())
    assert found.low < found.center < found.high and found.high - found.low < 0.6
    swapped = bootstrap.ratio_of_rates([(*value[2:], *value[:2]) for value in values])
    assert swapped.center == pytest.approx(1 / found.center)


@pytest.mark.parametrize("freedom", [4, 8, 21, 199])
def test_students_quantiles_are_students(freedom: int) -> None:
    """Catches a tail and its degrees of freedom that change places."""
    for tail in (0.025, 0.005, 0.001):
        exact = stats.t.ppf(tail, freedom)
        assert bootstrap.student(tail, freedom) == pytest.approx(exact)
        assert bootstrap.student(1 - tail, freedom) == pytest.approx(-exact)
    assert bootstrap.student(0.025, np.inf) == pytest.approx(-1.959964)


def test_an_interval_of_few_prompts_is_as_wide_as_students() -> None:
    """Catches percentiles taken as they are: of 12 prompts they are a sixth too narrow at 1 in 1,000, far more
    beyond."""
    values = stats.norm.ppf((np.arange(12) + 0.5) / 12)
    table = np.stack([values, np.ones(12)], axis=1)
    drawn = bootstrap.sums(table, 40_000)
    found = bootstrap.estimate_of(0.0, drawn[:, 0] / drawn[:, 1], 12)
    for tail in (0.025, 0.001, 0.0001):
        exact = stats.t.ppf(tail, 11) * values.std(ddof=1) / 12**0.5
        assert found.bound(tail) == pytest.approx(exact, rel=0.06)
        assert found.bound(1 - tail) == pytest.approx(-exact, rel=0.06)


def test_the_chance_of_a_value_is_the_tail_whose_bound_it_is() -> None:
    """Catches sides that are swapped; and a loss that is never sure, however great."""
    estimate = bootstrap.normal(-0.03, 0.01)
    chance = estimate.chance_of(0.0)
    assert chance == pytest.approx(stats.norm.sf(3), rel=1e-6)
    assert estimate.bound(1 - chance) == pytest.approx(0, abs=1e-9)
    assert bootstrap.normal(0.01, 0.01).chance_of(0.0) == 1
    assert bootstrap.normal(-1, 0.01).chance_of(0.0) < 1e-9


def test_tied_values_have_intervals_without_width() -> None:
    """Catches a division by a spread of nothing, an interval of no prompts, and draws that no seed repeats."""
    table = np.array([[0.5, 1.0]] * 8)
    drawn = bootstrap.sums(table, 1000)
    found = bootstrap.estimate_of(0.5, drawn[:, 0] / drawn[:, 1], 8)
    assert found.interval(0.001) == (0.5, 0.5, 0.5)
    assert (found.chance_of(0.5), found.chance_of(0.6)) == (1, 1e-12)
    with pytest.raises(ValueError, match="nothing"):
        bootstrap.mean([])
    values = list(np.random.default_rng(0).normal(1, 0.1, 400))
    assert bootstrap.mean(values) == bootstrap.mean(values)
    first = bootstrap.resampled(values, lambda table: table.mean(axis=1), draws=6000)
    assert len(first) == 6000 and abs(first.std() - 0.1 / 20) < 0.0005


def test_sums_of_draws_are_those_of_the_rows_drawn() -> None:
    """Catches counts of another row: means and covariances of the sums are known."""
    table = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 0.5]])
    drawn = bootstrap.sums(table, 20_000, seed=3)
    centered = table - table.mean(axis=0)
    np.testing.assert_allclose(drawn.mean(axis=0), table.sum(axis=0), atol=0.1)
    np.testing.assert_allclose(np.cov(drawn.T), centered.T @ centered, atol=0.15)
    assert (bootstrap.sums(table, 100, seed=3) == bootstrap.sums(table, 100, seed=3)).all()


def test_holm_holds_the_surest_to_the_most_and_all_after_a_failure_to_the_same() -> None:
    """Catches Bonferroni, and no correction.  By hand: 0.001 <= .04 / 4, 0.013 <= .04 / 3, 0.03 > .04 / 2."""
    assert bootstrap.holm([0.03, 0.001, 0.5, 0.013], 0.04) == pytest.approx([0.02, 0.01, 0.02, 0.04 / 3])
    assert bootstrap.holm([0.02, 0.001], 0.04) == pytest.approx([0.04, 0.02])
    assert bootstrap.holm([], 0.04) == []
