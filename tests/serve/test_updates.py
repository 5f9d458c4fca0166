"""An update of the drafter is due when it should save more decoding time than it takes."""

import math
import random

import numpy as np
import pytest

from outrider.serve.learning.live_acceptance import Counts
from outrider.serve.learning.updates import WINDOW, Updates

DRAFTS = 24


def texts(draw: random.Random, chance: float, count: int) -> list[Counts]:
    """Drafts of one token, accepted with this chance."""
    return [
        Counts(np.array([DRAFTS]), np.array([sum(draw.random() < chance for _ in range(DRAFTS))])) for _ in range(count)
    ]


def after(gain: float | None, cost: float = 10.0) -> Updates:
    return Updates({"gain": None if gain is None else [gain, gain, gain], "cpu_s": cost})


def test_the_first_update_is_due_and_so_is_one_after_an_unknown_gain():
    """Catches a drafter that never learns, since nothing is expected of what was never tried."""
    assert Updates().payoff(1.0).is_due and after(None).payoff(1.0).is_due
    assert math.isinf(Updates().payoff(1.0).saved)


def test_half_of_the_last_gain_is_weighed_against_the_cost():
    """1.5 times the tokens per step last time, so 1.25 times is expected: a fifth of 100 seconds of decoding."""
    assert after(1.5, 19.9).payoff(100.0).saved == pytest.approx(20.0)
    assert after(1.5, 19.9).payoff(100.0).is_due and not after(1.5, 20.1).payoff(100.0).is_due
    assert not after(0.8, 0.0).payoff(100.0).is_due  # nothing is expected of one that lost


def test_a_drop_of_acceptance_makes_an_update_due_and_noise_does_not():
    """Catches a drop with the wrong sign, or measured from before the update; 100 comparisons of noise have a false
    alarm with a probability of 0.1."""
    draw, updates = random.Random(3), after(1.0, 5.0)
    for text in texts(draw, 0.6, WINDOW + 100):
        updates.add(text)
        assert not updates.payoff(100.0).is_due
    for text in texts(draw, 0.3, WINDOW):
        updates.add(text)
    assert updates.payoff(100.0).saved == pytest.approx(100 * (1 - 1.3 / 1.6), abs=4)
    assert updates.payoff(100.0).is_due and not updates.payoff(20.0).is_due
    updates.restart()
    for text in texts(draw, 0.3, 2 * WINDOW):
        updates.add(text)
    assert not updates.payoff(100.0).is_due  # an update was tried on this traffic
    for text in texts(draw, 0.6, WINDOW):
        updates.add(text)
    assert not updates.payoff(100.0).is_due  # a rise is no reason


def test_updates_that_gain_less_than_they_cost_are_never_made():
    """Simulated: every update gains half of the one before; they end where they stop paying."""
    gain, updates, saved = 0.4, Updates(), []
    for _ in range(50):
        if not updates.payoff(1000.0).is_due:
            break
        updates.ended({"gain": [1 + gain], "cpu_s": 30.0})
        saved.append(1000 * gain / (1 + gain))
        gain /= 2
    assert len(saved) == 4 and min(saved) > 30 > 1000 * gain / (1 + gain)
