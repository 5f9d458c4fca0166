"""`accept` gives back the target's distribution, summed over every draft and every coin; and the check sees each
planted fault."""

from __future__ import annotations

import pytest
import torch
from contracts.chances import worst_error
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from outrider.decoding import accept as accepting

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
    for seed in range(2):
        error = worst_error(random_distribution(seed), shape, drawn(shape, seed, how), is_certain=how == "top")
        assert error < 1e-12, (shape, how, seed)


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


def test_the_general_rule_and_its_deterministic_way_keep_the_same_distribution():
    """Without q (`accept_top1`) and with one-hot ones the rule is the same."""
    for seed in range(3):
        for shape in SHAPES.values():
            proposal = drawn(shape, seed, "top")
            assert worst_error(random_distribution(seed), shape, proposal, is_certain=False) < 1e-12
            assert worst_error(random_distribution(seed), shape, proposal, is_certain=True) < 1e-12


def test_an_invalid_q_or_id_is_verified_as_deterministic_and_keeps_the_distribution():
    """Catches a NaN, an unnormalised row or an id outside the vocabulary that moves the output."""

    def half(tokens: list[int]) -> Tensor:
        return drawn([-1, -1, 0], 5, "without")(tokens) * 0.5

    def broken(tokens: list[int]) -> Tensor:
        q = drawn([-1, -1, 0], 5, "without")(tokens).clone()
        q[0] = float("nan")
        return q

    def none_at_own(tokens: list[int]) -> Tensor:
        return torch.zeros(V, dtype=torch.float64)

    for claim in (half, broken, none_at_own):
        assert worst_error(random_distribution(1), [-1, -1, 0], drawn([-1, -1, 0], 5, "without"), q_of=claim) < 1e-12


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────


def flat(p: list[float]):
    return lambda _path: torch.tensor(p, dtype=torch.float64)


def even(tokens: list[int]) -> Tensor:
    return torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_dropping_a_token_for_its_own_probability_is_caught():
    """Planted fault 1.  The token that q thinks unlikely is not shown to the target."""
    q = torch.tensor([0.8, 0.2], dtype=torch.float64)
    error = worst_error(flat([0.5, 0.5]), [-1], lambda _: q, depth=1, keep=lambda tokens: int(q[tokens[0]] >= 0.5))
    assert error > 0.05


def test_looking_ahead_over_confidences_is_caught():
    """Planted fault 2.  Two nodes or none, by the second's confidence, which knows the first token: (.85, .15) for (.7,
    .3)."""
    error = worst_error(flat([0.7, 0.3]), [-1, 0], even, depth=1, keep=lambda tokens: 2 if tokens[0] == 0 else 0)
    assert error == pytest.approx(0.15, abs=1e-12)


def test_stopping_by_confidences_of_elder_nodes_is_no_fault():
    """The twin of the fault above: keeping the first node and dropping the second by the same confidence is exact."""
    assert worst_error(flat([0.7, 0.3]), [-1, 0], even, keep=lambda tokens: 2 if tokens[0] == 0 else 1) < 1e-12


def test_a_soft_q_for_argmax_tokens_is_caught():
    """Planted fault 3.  The draft is the argmax; q says it was drawn."""
    q = torch.tensor([0.6, 0.4], dtype=torch.float64)
    error = worst_error(
        flat([0.5, 0.5]), [-1], lambda _: torch.tensor([1.0, 0.0], dtype=torch.float64), depth=1, q_of=lambda _: q
    )
    assert error > 0.05


def test_resampling_from_p_instead_of_the_residual_is_caught(monkeypatch):
    """Planted fault 4."""
    monkeypatch.setattr(accepting, "residual", lambda left, q: left)
    assert worst_error(random_distribution(0), [-1, 0], drawn([-1, 0], 0, "without")) > 0.01


def test_pruning_a_sampled_token_that_the_target_cannot_emit_is_caught():
    """Planted fault 5.  Token 2 is illegal; pruned, the next is drawn from p as if nothing had been tried.  TV 0.24."""
    distribution, q = flat([0.9, 0.1, 0.0]), torch.tensor([0.1, 0.4, 0.5], dtype=torch.float64)
    assert worst_error(distribution, [-1], lambda _: q, depth=1, keep=lambda tokens: int(tokens[0] != 2)) > 0.05
    assert worst_error(distribution, [-1], lambda _: q, depth=1) < 1e-12
