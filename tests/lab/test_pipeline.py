"""`pipeline`: what training shows it is what it sees when served, in the pipeline and in the ordinary loop."""

import pytest
import torch
from conftest import batch_of

from outrider.errors import DrafterError, TargetError
from outrider.generation import batch, requests
from outrider.lab.drafters import pipeline
from outrider.lab.pipeline import cycles
from outrider.lab.stages import stages_of
from outrider.sampling.settings import Sampling

SIZES = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}


def model_of(target, **settings) -> pipeline.Model:
    torch.manual_seed(1)
    return pipeline.Model(pipeline.Config(**SIZES, **settings), target).to(getattr(torch, target.spec.dtype))


def guesses(target, model, prompt, count) -> list[tuple[list[int], int, torch.Tensor]]:
    """Of every guess: the text with the tokens in flight, how many are in flight, the logits."""
    drafter, seen = model.drafter(), []
    guess = drafter.guess

    def watched(memory, state, tokens, known):
        found = guess(memory, state, tokens, known)
        if found is not None:
            seen.append((state.tokens[0] + list(tokens), len(tokens) + 1, found))
        return found

    drafter.guess = watched
    state = batch(target, 1, ends=frozenset())
    (request,) = requests(target, prompt, count, Sampling())
    list(cycles(stages_of(target, model.config.stages, 120, model.taps), drafter, state, request))
    return seen


def test_training_shows_what_a_guess_sees(target, monkeypatch):
    """Catches a mask, a position or a kind of feature that differs, at every fill; with the planted fault, tokens in
    flight that are one stage further in training, it fails."""
    model = model_of(target, stages=4, taps=(0, 1, 3))
    seen = guesses(target, model, [3, 9, 4, 1, 7], 24)
    fills = {fill for _, fill, _ in seen}
    assert fills >= {1, 2}

    def differs() -> float:
        worst = 0.0
        for text, fill, logits in seen:
            read = batch_of(target, model.taps, torch.tensor([text]))
            at = torch.tensor([[len(text) - 2]])
            states = model.drafted(read, at, torch.full_like(at, fill))
            worst = max(worst, float((model.logits(states)[:, 0] - logits).abs().max()))
        return worst

    with torch.no_grad():
        assert differs() < 1e-9
        kind = pipeline.Model.kind
        monkeypatch.setattr(pipeline.Model, "kind", lambda self, back, fill: kind(self, back + 1, fill))
        assert differs() > 1e-4


def test_settings_that_fit_no_pipeline_are_refused(target):
    """Catches a drafter without any state one stage behind, and more stages than layers."""
    with pytest.raises(DrafterError, match="begin after the first of 4 stages"):
        model_of(target, taps=(1, 3))
    with pytest.raises(TargetError, match="choose from 1 to 4"):
        model_of(target, stages=5)
