"""Logits to the distribution that both sides mean."""

import itertools
import math

import pytest
import torch

from outrider.errors import ConfigError
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.settings import Sampling

SOME = [
    Sampling(), Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.5, top_p=0.6), Sampling(0.9, top_k=5, top_p=0.8),
    Sampling(0.0, top_k=2), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1.0, top_k=1000),
]  # fmt: skip


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(logits: list[float], settings: Sampling) -> list[float]:
    """The distribution of one row, the slow way."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if settings.temperature == 0:
        return [float(token == ranked[0]) for token in range(len(logits))]
    weights = [math.exp((value - max(logits)) / settings.temperature) for value in logits]
    if settings.top_k:
        weights = [weight if token in ranked[: settings.top_k] else 0.0 for token, weight in enumerate(weights)]
    total, before, kept = sum(weights), 0.0, [0.0] * len(weights)
    for token in ranked:
        if before < settings.top_p:
            kept[token] = weights[token] / total
        before += weights[token] / total
    return [weight / sum(kept) for weight in kept]


def test_rows_of_bfloat16_sum_to_one():
    """Catches bfloat16 that loses mass."""
    p = distribution(random_logits(len(SOME), 4, 50).bfloat16(), Settings.of(SOME))
    assert p.dtype == torch.float32
    assert float((p.sum(-1) - 1).abs().max()) < 1e-5


def test_temperature_0_is_one_hot_and_ties_go_to_the_lowest_id():
    """Catches a draw where there is nothing to draw."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0]])
    wanted = [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert distribution(logits, Settings.of([Sampling(), Sampling()])).tolist() == wanted
    # the same where another slot's heat calls for the long way
    mixed = distribution(logits, Settings.of([Sampling(), Sampling(1.0)]))
    assert mixed[0].tolist() == wanted[0]
    assert mixed[1].tolist() == [0.25] * 4


def test_a_row_is_what_it_is_by_hand():
    """Catches filters in another order, a boundary that is off by one token, and settings of a neighbour."""
    logits = random_logits(30, 12, seed=1)
    together = distribution(logits[:1].expand(len(SOME), -1), Settings.of(SOME))
    for n, settings in enumerate(SOME):
        p = distribution(logits, Settings.of([settings] * 30))
        assert p.dtype == torch.float64
        # settings travel as float32
        for row, wanted in zip(p, logits.tolist(), strict=True):
            assert row.tolist() == pytest.approx(by_hand(wanted, settings), abs=1e-6), settings
        torch.testing.assert_close(together[n], p[0], rtol=1e-12, atol=1e-12)


def test_equals_of_the_k_th_token_stay():
    """As transformers does; catches an arbitrary choice among equals."""
    p = distribution(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), Settings.of([Sampling(1.0, top_k=2)]))
    assert (p > 0).tolist() == [[True, True, True, False]]


def test_a_temperature_near_0_is_nearly_greedy():
    """Catches logits that overflow when they are divided: softmax of two infinities is NaN."""
    for temperature, dtype in itertools.product((1e-3, 1e-30, 1e-38, 1e-42, 1e-60), (torch.float32, torch.float64)):
        logits = torch.tensor([[1.0, 50.0, 30.0, -7.0, 49.0]], dtype=dtype)
        assert distribution(logits, Settings.of([Sampling(temperature)])).tolist() == [[0, 1, 0, 0, 0]]


def test_settings_without_meaning_are_refused():
    """Catches a value that would only fail, or not fail, in the middle of a text."""
    for name, value in (
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0),
        ("top_p", 1.1), ("top_p", math.nan), ("seed", 2**63), ("seed", -(2**63) - 1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            Sampling(**{name: value})
