"""Expected steps over a written text."""

import random

import pytest
import torch

from outrider.diagnosis.walk import Steps, expected_steps


def simulated(chances: torch.Tensor, draws: int) -> float:
    """The mean number of steps of this many walks."""
    noise, steps = random.Random(0), 0
    rows = chances.tolist()
    for _ in range(draws):
        position = 0
        while position < len(rows):
            steps += 1
            accepted = next((k for k, chance in enumerate(rows[position]) if noise.random() >= chance), len(rows[0]))
            position += accepted + 1
    return steps / draws


def test_expected_steps_are_those_of_walking_the_text() -> None:
    """Catches a sum over positions that counts one it does not visit.  4,000 walks of about 12 steps have a standard
    error of 0.02: a false alarm is one in 10^6."""
    chances = torch.rand(30, 4, generator=torch.Generator().manual_seed(1))
    assert abs(expected_steps(chances) - simulated(chances, 4000)) < 0.12


def test_a_certain_draft_takes_one_step_per_block_and_an_impossible_one_a_step_per_token() -> None:
    """Catches a walk that loses or repeats the token after the draft."""
    assert expected_steps(torch.ones(30, 4)) == 6
    assert expected_steps(torch.zeros(30, 4)) == 30


def test_a_sample_of_the_positions_stands_for_all() -> None:
    """Catches fewer rows than positions being taken for a shorter text."""
    half = torch.full((10, 1), 0.5)
    assert Steps.of(half, 20) == pytest.approx(Steps(20.0, 20 / 1.5))
