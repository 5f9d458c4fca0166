"""The noise of the slots: uniform, independent, fair races, and hung on seed, place and purpose alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.decoding import noise
from outrider.decoding.noise import Purpose, Streams, race


def many(count: int = 20_000) -> Streams:
    return Streams(torch.arange(count), torch.full((count,), 3))


def test_uniforms_are_uniform():
    """Catches a hash with holes, over seeds, places and salts.  Kolmogorov-Smirnov; false alarm 1e-6, and seeds are
    fixed."""
    one = Streams(torch.tensor([7]), torch.tensor([0]))
    for uniforms in (
        many().uniform(0, Purpose.ACCEPT),
        Streams(torch.full((20_000,), 7), torch.arange(20_000)).uniform(0, Purpose.ACCEPT),
        torch.cat([one.uniform(0, Purpose.ACCEPT, salt=n) for n in range(2000)]),
    ):
        assert stats.kstest(uniforms.numpy(), "uniform").pvalue > 1e-6


def test_neighbouring_numbers_are_independent():
    """Catches keys that run into each other, and a draft and a verification that share their luck: rank correlation
    over seeds, and chi-square.  False alarm 1e-6 for each pair."""
    streams = many()
    further = Streams(streams.seeds + 1, streams.index)
    pairs = {
        "depth": (streams.uniform(0, Purpose.ACCEPT), streams.uniform(1, Purpose.ACCEPT)),
        "purpose": (streams.uniform(0, Purpose.ACCEPT), streams.uniform(0, Purpose.DRAFT)),
        "depth and purpose": (streams.uniform(1, Purpose.ACCEPT), streams.uniform(0, Purpose.TARGET)),
        "salt": (streams.uniform(0, Purpose.ACCEPT), streams.uniform(0, Purpose.ACCEPT, salt=1)),
        "seed": (streams.uniform(0, Purpose.ACCEPT), further.uniform(0, Purpose.ACCEPT)),
    }
    for name, (one, other) in pairs.items():
        assert not torch.equal(one, other), name
        assert stats.spearmanr(one.numpy(), other.numpy()).pvalue > 1e-6, name
    weights = torch.ones(20_000, 4)
    both = streams.draw(weights, 0, Purpose.DRAFT) * 4 + streams.draw(weights, 0, Purpose.TARGET)
    assert stats.chisquare(torch.bincount(both, minlength=16).numpy()).pvalue > 1e-6


@pytest.mark.parametrize("purpose", list(Purpose))
def test_draws_follow_their_weights(purpose):
    """Catches a race that is not fair.  Chi-square; false alarm 1e-6, and seeds are fixed."""
    weights = torch.tensor([0.05, 0.0, 0.5, 0.2, 0.25]) * 7  # a weight need not be a probability
    drawn = torch.bincount(many().draw(weights.expand(20_000, -1), 2, purpose), minlength=5)
    assert drawn[1] == 0
    live = weights > 0
    expected = weights[live] / weights.sum() * 20_000
    assert stats.chisquare(drawn[live].numpy(), expected.double().numpy()).pvalue > 1e-6


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(0, 10_000), st.integers(0, 4))
def test_a_slots_noise_does_not_depend_on_its_neighbours(seeds, index, slot):
    """Catches a text that changes with who shares the batch."""
    slot %= len(seeds)
    weights = torch.rand(len(seeds), 9, generator=torch.Generator().manual_seed(index))
    together = Streams(torch.tensor(seeds), torch.full((len(seeds),), index))
    alone = Streams(torch.tensor(seeds[slot : slot + 1]), torch.tensor([index]))
    for purpose in Purpose:
        assert together.uniform(1, purpose, 2)[slot] == alone.uniform(1, purpose, 2)[0]
        assert together.draw(weights, 1, purpose)[slot] == alone.draw(weights[slot : slot + 1], 1, purpose)[0]


def test_the_unit_interval_is_open_at_both_ends():
    """Catches log(1) = 0 in the race's exponentials: weight 0 over 0 is NaN, and NaN wins every argmax."""
    ends = noise._to_unit(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert bool(((ends > 0) & (ends < 1)).all())
    weights = torch.zeros(5000, 6)
    weights[:, 4] = 1e-30
    assert set(many(5000).draw(weights, 0, Purpose.TARGET).tolist()) == {4}


def test_a_place_is_drafted_anew_in_every_step_and_judged_as_before():
    """Catches a draft whose noise an earlier one used up for the same place: a policy may have seen what stood there.

    Index i at depth d + 1 is the place of index i + 1 at depth d.  Chi-square; false alarm 1e-6, and seeds are fixed.
    """
    near = many()
    far = Streams(near.seeds, near.index + 1)
    weights = torch.ones(20_000, 4)
    for depth in range(3):
        for purpose in (Purpose.TARGET, Purpose.ACCEPT):
            assert torch.equal(near.key(depth + 1, purpose), far.key(depth, purpose))
            assert torch.equal(near.draw(weights, depth + 1, purpose), far.draw(weights, depth, purpose))
        assert not (near.key(depth + 1, Purpose.DRAFT) == far.key(depth, Purpose.DRAFT)).any()
        before, again = near.draw(weights, depth + 1, Purpose.DRAFT), far.draw(weights, depth, Purpose.DRAFT)
        assert not torch.equal(before, again)
        assert stats.chisquare(torch.bincount(before * 4 + again, minlength=16).numpy()).pvalue > 1e-6


@pytest.mark.parametrize("shape", [(7,), (7, 3)], ids=str)
def test_a_race_of_few_among_many_is_the_race_of_all(shape):
    """Catches the short way for wide vocabularies: another token, equals in another order, a row without any weight."""
    generator = torch.Generator().manual_seed(1)
    wide = noise.SPARSE_FROM + 100
    weights = torch.rand(*shape, wide, generator=generator, dtype=torch.float64)
    weights[torch.rand(weights.shape, generator=generator) > 0.01] = 0
    weights[0] = 0
    weights[1] = 0
    weights[1, ..., [5, wide - 1]] = 0.5
    streams = Streams(torch.arange(7), torch.arange(7))
    salt = torch.arange(3) if len(shape) == 2 else None
    key = streams.key(2, Purpose.DRAFT, salt)
    assert torch.equal(streams.draw(weights, 2, Purpose.DRAFT, salt), race(weights, key, torch.arange(wide)))
