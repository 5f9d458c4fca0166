"""A target as stages: one after another they are the model, whatever its family does with masks and embeddings."""

import pytest
import torch
from conftest import tiny_model

from benchmarks.families import tiny
from outrider.errors import TargetError
from outrider.lab.stages import ranges, stages_of
from outrider.targets.load import load_target


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "llama4-chunks"])
def test_stages_read_what_the_model_reads(family):
    """Catches a scale applied twice, a norm in the middle, a mask or a position of another layer."""
    target = load_target(tiny(family, "sdpa"))
    layers, text = target.spec.layers, torch.arange(3, 27)[None] % target.spec.vocabulary
    hidden, taps = target.read(text, tuple(range(layers)))
    stages = stages_of(target, 2, 40, tuple(range(layers)))
    within = {"rtol": 1e-5, "atol": 1e-5} if family == "llama4-chunks" else {"rtol": 1e-9, "atol": 1e-9}
    waiting = []
    for at in range(text.shape[1]):  # the first stage is always three tokens ahead
        stages[0].begin(text[:, at : at + 1], None, at)
        waiting.append(stages[0].end())
        if at >= 3 or at == text.shape[1] - 1:
            begin = at - 3
            for number in range(begin, begin + 1 if at < text.shape[1] - 1 else text.shape[1]):
                stages[1].begin(text[:, number : number + 1], waiting[number].states, number)
                out = stages[1].end()
                both = torch.cat([waiting[number].taps, out.taps], 2)
                torch.testing.assert_close(both[:, 0], taps[:, number], **within)
                torch.testing.assert_close(out.logits[:, 0], target.head(hidden[:, number]), **within)


def test_a_model_that_stages_can_not_be_is_refused():
    """Catches a recurrent state that a dropped token would stay in."""
    with pytest.raises(TargetError, match="can't be cut into stages"):
        stages_of(load_target(tiny("mamba2")), 2, 20)
    with pytest.raises(TargetError, match="choose from 1 to 4"):
        stages_of(load_target(tiny_model()), 5, 20)
    for layers, stages in ((1, 1), (7, 3), (8, 4), (12, 5), (5, 5)):  # no layer is in none or in two
        parts = ranges(layers, stages)
        assert [layer for own in parts for layer in own] == list(range(layers))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
