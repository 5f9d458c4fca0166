"""Scores are called equivalent seldom where they are not, and often where enough prompts were asked."""

import numpy as np
import pytest

from outrider.errors import DataError
from outrider.gate.statistics.equivalence import equivalence


def test_a_few_equal_scores_prove_nothing() -> None:
    """Catches a bootstrap that resamples zeros and calls ten equal scores a proof."""
    few = equivalence([1.0] * 10, [1.0] * 10)
    assert few.verdict == "not enough prompts"
    assert 300 <= few.needed <= 360
    assert equivalence([1.0] * few.needed, [1.0] * few.needed).verdict == "equivalent"


def test_a_score_that_fell_is_different_and_one_that_rose_too() -> None:
    """Catches a one-sided judgement, and a difference of the wrong sign."""
    noise = np.random.default_rng(0)
    old = (noise.random(400) < 0.7).astype(float)
    new = old * (noise.random(400) > 0.1)
    assert equivalence(new, old).verdict == "different"
    assert equivalence(new, old).difference.high < 0
    assert equivalence(old, new).difference.low > 0


def test_a_difference_of_the_margin_is_seldom_called_equivalent() -> None:
    """Catches intervals too narrow: at a true difference of one point 5 % may pass; 11 of 100 by chance once in 100."""
    noise, passed = np.random.default_rng(1), 0
    for seed in range(100):
        lot = noise.random(1000)
        new = np.where(lot < 0.02, 1.0, np.where(lot < 0.03, -1.0, 0.0))
        passed += equivalence(new, np.zeros(1000), draws=400, seed=seed).verdict == "equivalent"
    assert passed <= 11


def test_as_many_prompts_as_are_said_to_be_needed_are_enough() -> None:
    """Catches a number of prompts that would not do: 40 of 50 expected, fewer than 30 by chance once in 1000."""
    noise = np.random.default_rng(2)

    def gained(prompts: int) -> np.ndarray:
        return noise.choice([1.0, -1.0, 0.0], prompts, p=[0.05, 0.05, 0.9])

    first = gained(300)
    needed = equivalence(first, np.zeros(300), margin=0.03).needed
    assert needed > 300
    found = [equivalence(gained(needed), np.zeros(needed), margin=0.03, draws=400).verdict for _ in range(50)]
    assert found.count("equivalent") >= 30


def test_scores_of_other_prompts_are_refused() -> None:
    """Catches a comparison of scores that are no pairs."""
    with pytest.raises(DataError, match="same prompts"):
        equivalence([1.0], [1.0, 0.0])
    with pytest.raises(DataError, match="finite numbers, got nan .* index 1"):
        equivalence([0.5, float("nan")], [0.5, 1.0])
