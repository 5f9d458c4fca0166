"""Jacobi: the window is the target's own last word on every place, exact above temperature 0."""

import pytest
import torch
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import OnAndOff, TableTarget
from drafters.proposals import exact, watch

from outrider.lab.drafters.jacobi import Config, build
from outrider.retrieval.pool import Pool
from outrider.sampling.settings import Sampling

TABLE = TableTarget.random(5)


def test_a_greedy_window_is_the_fixed_point_iteration_by_hand(target, prompts):
    """Catches a window that moves on by one too many or too few, and rows of another pass.  Beside a slow twin."""
    for prompt in prompts[:3]:
        drafter = build(Config(window=5, init="repeat"), target)
        seen = watch(drafter)
        plainly = exact(target, prompt, drafter, max_new_tokens=30, slots=1)[0].tokens
        text, carried = list(prompt), []
        for (before,), _, draft in seen:
            assert list(before) == text
            guesses = (carried + [([*text, *carried])[-1]] * 5)[: draft.live[0]]
            assert draft.ids[0][: draft.live[0]] == guesses
            best = target.head(target.read(torch.tensor([text + guesses]))[0])[0, len(text) - 1 :].argmax(-1).tolist()
            kept = next(
                (n for n, (guess, true) in enumerate(zip(guesses, best, strict=False)) if guess != true), len(guesses)
            )
            text += best[: kept + 1]
            carried = best[kept + 1 :]
        assert text[: len(prompt) + 28] == (prompt + plainly)[: len(prompt) + 28]


@pytest.mark.parametrize(
    ("config", "policy"),
    [(Config(window=3, branches=2, ngram=3), OnAndOff(5)), (Config(window=3, init="repeat"), None)],
    ids=["tree", "repeat"],
)
def test_trees_and_windows_keep_the_distribution(config, policy):
    """Catches a q that is not what was drawn from, and a window that outlives a pause.  False alarm 1e-6."""
    assert keeps_the_distribution(TABLE, build(config, TABLE), policy, prompt=[0, 1, 2, 0, 1], slots=1500)
    _, _, kept = emitted(TABLE, build(config, TABLE), slots=200)
    assert 60 < kept < 200 * 3 * 3


def test_with_a_seed_the_text_is_plain_decodings_and_guesses_foresee_it(target, prompts):
    """Catches a draft that leaves traces in a seeded text, and one drawn from other noise than the target's."""
    drafter = build(Config(window=4, branches=3), target)
    found = exact(target, prompts[:4], drafter, max_new_tokens=24, sampling=Sampling(0.7, seed=3), slots=3)
    assert sum(sum(one.accepted) for one in found) > 10


def test_a_pool_prefers_the_longest_match_then_the_latest_and_forgets_the_oldest():
    """Catches an order of preferences turned round, and a pool that grows without end."""
    pool = Pool(longest=2, most=8192, siblings=2)
    pool.learn([1, 2, 3, 9, 2, 4, 1, 2])
    assert pool.after([1, 2]) == [3, 4]
    assert pool.after([7, 2]) == [4, 3]
    assert pool.after([8]) == []
    small = Pool(longest=1, most=3, siblings=1)
    small.learn([1, 2, 3, 4, 5, 6])
    assert list(small.follows) == [(3,), (4,), (5,)]
