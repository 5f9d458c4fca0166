"""A target as stages: one after another they are the model, whatever its family does with masks and embeddings."""

import pytest
import torch
from conftest import tiny_model

from benchmarks.families import tiny
from outrider.errors import TargetError
from outrider.generation import batch, requests
from outrider.lab.drafters import pipeline
from outrider.lab.pipeline import cycles
from outrider.lab.stage_processes import in_processes
from outrider.lab.stages import ranges, stages_of
from outrider.sampling.settings import Sampling
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


@pytest.mark.slow
def test_stages_in_processes_write_the_same_text(tmp_path, plain):
    """Catches states, taps, logits or starts that are mixed up on their way between processes."""
    tiny_model().save_pretrained(tmp_path)
    target, prompt = load_target(tmp_path, dtype="float64"), [3, 9, 4, 1, 7, 2]
    torch.manual_seed(1)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
    drafter = pipeline.build(pipeline.Config(stages=3, **sizes), target)
    found = []
    with in_processes(target, str(tmp_path), 3, 80, drafter.taps) as remote:
        for stages in (stages_of(target, 3, 80, drafter.taps), remote, remote):
            state = batch(target, 1, ends=frozenset())
            (request,) = requests(target, prompt, 30, Sampling())
            committed = list(cycles(stages, drafter, state, request))
            found.append((state.tokens[0][len(prompt) :], committed))
    assert found[0] == found[1] == found[2]
    other = load_target(tiny_model(seed=1))
    with pytest.raises(TargetError, match="its weights are others"), in_processes(other, str(tmp_path), 2, 80):
        pass
    assert found[0][0] == plain(target, prompt, 30)
