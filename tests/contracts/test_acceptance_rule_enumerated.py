"""`accept` gives back the target's distribution, summed over every draft and every coin; and the check sees each
planted fault."""

import pytest
import torch
from contracts.chances import worst_error
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


CELLS = [(name, how) for name in SHAPES for how in ("replacement", "without", "top", "mixed")]
"""Without siblings `without` is `replacement`, and `mixed` is `top`."""
CELLS = [(name, how) for name, how in CELLS if name not in ("chain", "long") or how in ("replacement", "top")]


@pytest.mark.parametrize(("name", "how"), CELLS)
def test_what_is_emitted_follows_the_target_exactly(name, how):
    """Catches any error in ratio test, residual or sibling order, with no chance of a false alarm."""
    shape = SHAPES[name]
    for is_certain in {False, how == "top"}:  # without q (`accept_top1`) and with one-hot ones the rule is the same
        assert worst_error(random_distribution(0), shape, drawn(shape, 0, how), is_certain=is_certain) < 1e-12


# ── a fault ───────────────────────────────────────────────────────────────────────────────────────────────────────────
