"""BLT-S: what is drafted on a stale latent.  The contract suite runs for it in `test_byte_suite`."""

import pytest
from byte_targets import byte_model, ends_of, exactly
from contracts.chances import emitted, follows

from outrider.generation import generate
from outrider.lab.drafters import stale_latent
from outrider.sampling.distribution import Settings
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target


@pytest.fixture(scope="module")
def own():
    return load_target(byte_model())


def test_bytes_up_to_the_end_of_the_patch_are_always_accepted(own, prompts):
    """Catches a draft that begins on another state than the target's: before a latent is missing it can't be wrong."""
    drafter, steps = stale_latent.build(stale_latent.Config(length=6), own), 0
    for prompt in prompts[:4]:
        [found] = generate(own, prompt, drafter, max_new_tokens=40)
        text, done = prompt + found.tokens, len(prompt)
        ends = ends_of(own.model, text)
        for accepted in found.accepted:
            exact = next((n for n, is_end in enumerate(ends[done - 1 :]) if is_end), 99)
            assert accepted >= min(6, exact, len(text) - done - 1)
            steps += 0 < exact < 6
            done += accepted + 1
    assert steps > 5


def test_it_keeps_the_targets_distribution():
    """Catches a q that is not what was drawn from.  False alarm 1e-6; a vocabulary of 5, every triple counted."""
    small = load_target(byte_model(vocab_size=5, patch=2.0))
    drafter, prompt = stale_latent.build(stale_latent.Config(length=3), small), [0, 1, 2, 0, 1]
    sampling = {"temperature": 0.7, "top_k": 3}
    tokens, _, accepted = emitted(small, drafter, prompt=prompt, slots=1000, sampling=sampling)
    assert accepted > 100
    assert follows(tokens, exactly(small, prompt, Settings.of([Sampling(**sampling)])))
