"""Distributions are told apart where they differ, and as seldom as promised where they do not."""

import numpy as np
import pytest
import torch

from outrider.decoding.accept import accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.errors import DataError
from outrider.gate.statistics.two_samples import detectable, two_samples

VOCABULARY, DEPTH = 8, 3
P = torch.tensor([0.3, 0.2, 0.15, 0.12, 0.1, 0.06, 0.04, 0.03], dtype=torch.float64)
Q = torch.tensor([0.25, 0.05, 0.3, 0.1, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)


def speculated(count: int, seed: int, draft_argmax: bool = False) -> list[list[int]]:
    """Texts of four tokens under P, drafted from Q by the distribution's own code; or the classic fault, Q's argmax
    under soft Q."""
    noise = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(Q.expand(count * DEPTH, -1), 1, generator=noise).view(count, DEPTH)
    tokens = torch.full_like(drawn, int(Q.argmax())) if draft_argmax else drawn
    draft = Draft.chain(tokens, torch.full((count,), DEPTH), Q.expand(count, DEPTH, -1))
    streams = Streams(torch.arange(count) + (seed << 20), torch.zeros(count, dtype=torch.int64))
    kept = accept(draft, P.expand(count, DEPTH + 1, -1), streams)
    rest = plain(count, seed + 1)
    return [
        ([tokens[b, n].item() for n in path] + [following] + later)[: DEPTH + 1]
        for b, (path, following, later) in enumerate(zip(kept.paths, kept.next_tokens, rest, strict=True))
    ]


def plain(count: int, seed: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(seed)
    return torch.multinomial(P.expand(count * (DEPTH + 1), -1), 1, generator=noise).view(count, DEPTH + 1).tolist()


def test_the_exact_distribution_raises_as_few_alarms_as_promised() -> None:
    """Catches a chance that is too small: marginals that share cells across prompts, labels drawn over prompts, no
    Holm.

    60 seeds at 5 %: at most 3 alarms expected, more than 10 by chance once in 4000; none at all is a blind test.
    """
    alarms = 0
    for seed in range(60):
        found = two_samples([plain(100, 4 * seed)], [speculated(100, 4 * seed + 2)], alpha=0.05, draws=299, seed=seed)
        alarms += found.verdict == "different"
    assert 1 <= alarms <= 10


def test_an_argmax_tested_against_a_soft_q_is_caught_with_400_texts() -> None:
    """Catches tests that look where such a fault does not show.  It moves the first token by a total variation of
    0.2."""
    for seed in range(4):
        found = two_samples([plain(400, seed)], [speculated(400, seed + 100, draft_argmax=True)], draws=999, seed=seed)
        assert found.verdict == "different"
        assert found.tests[0].differs


def test_what_is_said_to_be_detectable_is_detected_four_times_in_five() -> None:
    """Catches a power that is promised and not there: in 20 trials 16 are expected, fewer than 10 by chance once in
    1000."""
    samples, cells, tests, alpha = 300, 4, 3, 0.05
    moved = detectable(cells - 1, samples, alpha / tests)
    distribution = np.full(cells, 1 / cells)
    other = distribution + moved * np.array([0.5, 0.5, -0.5, -0.5])
    noise, found = np.random.default_rng(5), 0
    for seed in range(20):
        ours, theirs = (
            noise.choice(cells, (samples, 1), p=distribution).tolist() for distribution in (distribution, other)
        )
        result = two_samples([ours], [theirs], positions=1, alpha=alpha, draws=299, seed=seed)
        assert result.detectable == pytest.approx(moved)
        found += result.tests[0].differs
    assert 10 <= found <= 19


def test_each_question_sees_what_the_others_can_not() -> None:
    """Catches a test that is wired to the wrong statistic: lengths alone differ, or pairs alone, and only that is
    said."""
    noise = np.random.default_rng(3)
    bits = noise.integers(0, 2, (300, 6))
    repeated = np.repeat(noise.integers(0, 2, (300, 3)), 2, axis=1)
    found = two_samples([bits.tolist()], [repeated.tolist()], draws=999)
    assert [test.name for test in found.tests if test.differs] == ["3-grams"]
    lengths = [[0] * int(n) for n in noise.integers(12, 16, 300)], [[0] * int(n) for n in noise.integers(13, 20, 300)]
    found = two_samples([lengths[0]], [lengths[1]], positions=4, draws=999)
    assert {test.name for test in found.tests if test.differs} == {"lengths", "3-grams"}


def test_prompts_of_unlike_distributions_are_compared_each_with_its_own() -> None:
    """Catches labels that change places between prompts, which hides a difference behind what prompts differ in
    anyway."""
    noise = np.random.default_rng(4)
    easy, hard = noise.integers(0, 2, (2, 200, 2)), noise.integers(50, 90, (2, 200, 2))
    found = two_samples([easy[0].tolist(), hard[0].tolist()], [easy[1].tolist(), hard[1].tolist()], draws=999)
    assert found.verdict == "no difference"
    assert (found.prompts, found.samples) == (2, 200)
    easy[1] |= noise.random((200, 2)) < 0.4
    found = two_samples([easy[0].tolist(), hard[0].tolist()], [easy[1].tolist(), hard[1].tolist()], draws=999)
    assert found.verdict == "different"


def test_distributions_of_many_rare_tokens_are_told_apart_too() -> None:
    """Catches a pool of all rare tokens, which is blind; and a power that is claimed where nothing can be seen."""
    noise = np.random.default_rng(6)
    one, other = noise.integers(0, 2000, (400, 1)), 4 * noise.integers(0, 500, (400, 1))
    found = two_samples([one.tolist()], [other.tolist()], positions=1, draws=999)
    assert found.tests[0].differs
    assert found.detectable < 0.3
    same = two_samples([[[1]] * 50], [[[1]] * 50], draws=999)
    assert (same.verdict, same.detectable) == ("no difference", 1.0)


def test_sets_that_do_not_match_are_refused() -> None:
    """Catches a comparison of two sets of unequal size, for which the statistics do not hold."""
    with pytest.raises(DataError, match="equally many"):
        two_samples([[[1]]], [[[1], [2]]])
    with pytest.raises(DataError, match="use at least"):
        two_samples([[[1]]], [[[1]]], draws=99)
