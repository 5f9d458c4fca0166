"""Texts are the same whether caches have room at once or grow while they are written."""

import pytest
import torch
from conftest import DEVICE, Case, tiny_model
from targets.test_cuda_graphs import Tape, with_tape

from outrider.generation import generate
from outrider.sampling.settings import Sampling
from outrider.targets import cuda_graphs, stacks
from outrider.targets.load import load_target

SLOW = [pytest.param(name, 0.8, marks=pytest.mark.slow) for name in ("none", "eagle3")]


@pytest.mark.parametrize(("name", "heat"), [("dspark", 0.8), ("small_model", 0.0), *SLOW])
def test_a_cache_that_grows_in_the_middle_of_texts_changes_no_token(
    name, heat, target, prompts, drafter_of, monkeypatch
):
    """Catches buffers of target or drafter that are still read or written after others took their place."""
    drafter = None if name == "none" else drafter_of(Case(name, {"markov": "vanilla"} if name == "dspark" else {}))
    asked = {"max_new_tokens": 30, "sampling": Sampling(heat, seed=3), "slots": 2, "policy": "fixed"}
    wanted = generate(target, prompts[:3], drafter, **asked)
    monkeypatch.setattr(stacks, "FIRST", 3)
    grown, grow = [], stacks.Stacks.grow
    monkeypatch.setattr(stacks.Stacks, "grow", lambda self, *own: (grown.append(self), grow(self, *own))[1])
    assert generate(target, prompts[:3], drafter, **asked) == wanted
    assert len(grown) > 2


@pytest.mark.skipif(DEVICE != "cpu", reason="a recorder stands for CUDA graphs")
def test_captures_of_a_cache_that_grows_write_within_its_buffers(monkeypatch):
    """Catches a padded pass that writes beside its buffers, and a capture of buffers that are gone."""
    monkeypatch.setattr(cuda_graphs, "COLUMNS", 16)
    slow, tape = load_target(tiny_model(dtype=torch.float64), compile=False), Tape()
    wanted = generate(slow, [[1, 2, 3]], "ngram", max_new_tokens=60, policy="fixed")
    fast = with_tape(load_target(tiny_model(dtype=torch.float64), compile=False), tape)
    monkeypatch.setattr(stacks, "FIRST", 4)
    assert generate(fast, [[1, 2, 3]], "ngram", max_new_tokens=60, policy="fixed") == wanted
    assert tape.count["replayed"] > tape.count["cuda_graphs"] > 2
