"""Logits to the distribution that both sides mean."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_row_sums_to_one(dtype):
    """Catches a filter that forgets to normalise, and bfloat16 that loses mass."""
    p = distribution(random_logits(len(SOME), 4, 50).to(dtype), Settings.of(SOME))
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float((p.sum(-1) - 1).abs().max()) < 1e-5
    assert float(p.min()) >= 0


def test_temperature_0_is_one_hot_and_ties_go_to_the_lowest_id():
    """Catches a draw where there is nothing to draw."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0]])
    wanted = [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert distribution(logits, Settings.of([Sampling(), Sampling()])).tolist() == wanted
    # the same where another slot's heat calls for the long way
    mixed = distribution(logits, Settings.of([Sampling(), Sampling(1.0)]))
    assert mixed[0].tolist() == wanted[0]
    assert mixed[1].tolist() == [0.25] * 4


@pytest.mark.parametrize("settings", SOME, ids=str)
def test_a_row_is_what_it_is_by_hand(settings):
    """Catches filters in another order, and a boundary that is off by one token."""
    logits = random_logits(30, 12, seed=1)
    p = distribution(logits, Settings.of([settings] * 30))
    # settings travel as float32
    for row, wanted in zip(p, logits.tolist(), strict=True):
        assert row.tolist() == pytest.approx(by_hand(wanted, settings), abs=1e-6)
    n = SOME.index(settings)  # beside others, of which none is broadcast to a neighbour
    together = distribution(logits[:1].expand(len(SOME), -1), Settings.of(SOME))
    torch.testing.assert_close(together[n], p[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [s for s in SOME if s.temperature and s.top_k != 1000], ids=str)
def test_a_row_is_what_transformers_makes_of_it(settings):
    """Catches a meaning of top_k or top_p that users do not know from elsewhere."""
    logits = random_logits(40, 30, seed=2)
    scores = TemperatureLogitsWarper(settings.temperature)(None, logits)
    if settings.top_k:
        scores = TopKLogitsWarper(settings.top_k)(None, scores)
    if settings.top_p < 1:
        scores = TopPLogitsWarper(settings.top_p)(None, scores)
    torch.testing.assert_close(
        distribution(logits, Settings.of([settings] * 40)), scores.softmax(-1), rtol=1e-5, atol=1e-6
    )


def test_equals_of_the_k_th_token_stay():
    """As transformers does; catches an arbitrary choice among equals."""
    p = distribution(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), Settings.of([Sampling(1.0, top_k=2)]))
    assert (p > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_near_0_is_nearly_greedy(dtype):
    """Catches logits that overflow when they are divided: softmax of two infinities is NaN."""
    logits = torch.tensor([[1.0, 50.0, 30.0, -7.0, 49.0]], dtype=dtype)
    for temperature in (1e-3, 1e-30, 1e-38, 1e-42, 1e-60):
        assert distribution(logits, Settings.of([Sampling(temperature)])).tolist() == [[0, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1}, {"top_p": float("nan")}, {"seed": 2**63}, {"seed": -(2**63) - 1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_without_meaning_are_refused(wrong):
    """Catches a value that would only fail, or not fail, in the middle of a text."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
