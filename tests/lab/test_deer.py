"""DEER: independent positions, one pass that is the same in training and at serving, and what its two stages weigh."""

import pytest
import torch
from conftest import batch_of

from outrider.lab.drafters import deer

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "anchors": 16}


def made(target, **settings):
    torch.manual_seed(1)
    return deer.Model(deer.Config(**(SIZES | settings)), target).double()


@pytest.mark.parametrize(
    ("progress", "refine", "stage"),
    [(0.49, 0.5, 1), (0.5, 0.5, 2), (0.99, 1.0, 1), (0.0, 0.0, 2)],
)
def test_the_second_stage_begins_where_it_says(progress, refine, stage, target):
    """Catches a stage that never comes, and rows of the first that weigh unequally. R of 48 blocks."""
    model = made(target, refine=refine, alpha=2.0, anchors=12)
    model.progress = progress
    torch.manual_seed(0)
    weights = model.predict(batch_of(target, (), torch.randint(64, (4, 24)))).weight.unflatten(0, (-1, 4))
    blocks = {tuple(block) for block in weights.tolist()}
    whole = {(1, 1, 1, 1)} if stage == 1 else {(1, 0, 0, 0), (2, 1, 0, 0), (4, 2, 1, 0), (8, 4, 2, 1)}
    # the end of a text cuts blocks short
    short = {block[:n] + (0,) * (4 - n) for block in whole for n in range(1, 4)}
    assert whole <= blocks <= whole | short
