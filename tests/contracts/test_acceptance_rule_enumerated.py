"""`accept` gives back the target's distribution, summed over every draft and every coin; and the check sees each
planted fault."""

import pytest
import torch
from contracts.chances import worst_error
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

V = 3


def random_distribution(seed: int, vocabulary: int = V):
    """A distribution over paths: equal paths, equal p."""

    def distribution(path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + hash(path) % 1_000_003)
        return torch.randn(vocabulary, dtype=torch.float64, generator=generator).mul(1.5).softmax(-1)

    return distribution


def drawn(parents: list[int], seed: int, how: str):
    """A proposal that may look at all tokens drawn before; siblings come as `how` says."""
    distribution = random_distribution(seed + 77)

    def proposal(tokens: list[int]) -> Tensor:
        n = len(tokens)
        elders = [tokens[m] for m in range(n) if parents[m] == parents[n]]
        q = distribution((parents[n], *tokens)).clone()
        if how != "replacement":
            q[elders] = 0
            q = q / q.sum()
        if how == "top" or (how == "mixed" and not elders):
            q = torch.nn.functional.one_hot(q.argmax(), V).double()
        return q

    return proposal


SHAPES = {
    "chain": [-1, 0],
    "siblings": [-1, -1],
    "both": [-1, -1, 0],
    "three siblings": [-1, -1, -1],
    "long": [-1, 0, 1],
}


@pytest.mark.parametrize("how", ["replacement", "without", "top", "mixed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_is_emitted_follows_the_target_exactly(shape, how):
    """Catches any error in ratio test, residual or sibling order, with no chance of a false alarm."""
    for is_certain in {False, how == "top"}:  # without q (`accept_top1`) and with one-hot ones the rule is the same
        assert worst_error(random_distribution(0), shape, drawn(shape, 0, how), is_certain=is_certain) < 1e-12


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=3),
    st.integers(0, 10_000),
    st.sampled_from(["replacement", "without"]),
)
@examples(max_examples=8)
def test_any_tree_keeps_the_distribution(choices, seed, how):
    """Catches shapes the list above forgot."""
    parents = [choice % (n + 1) - 1 for n, choice in enumerate(choices)]
    assert worst_error(random_distribution(seed), parents, drawn(parents, seed, how)) < 1e-12


# ── a fault ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def flat(p: list[float]):
    return lambda _path: torch.tensor(p, dtype=torch.float64)


def even(tokens: list[int]) -> Tensor:
    return torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_looking_ahead_over_confidences_is_caught():
    """Guards the enumeration.  Two nodes or none, by the second's confidence, which knows the first token, gives
    (.85, .15) for (.7, .3); keeping the first and dropping the second by the same confidence is exact."""
    error = worst_error(flat([0.7, 0.3]), [-1, 0], even, depth=1, keep=lambda tokens: 2 if tokens[0] == 0 else 0)
    assert error == pytest.approx(0.15, abs=1e-12)
    assert worst_error(flat([0.7, 0.3]), [-1, 0], even, keep=lambda tokens: 2 if tokens[0] == 0 else 1) < 1e-12
