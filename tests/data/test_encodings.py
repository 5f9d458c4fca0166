"""Rows in fewer bytes: how near they come back, and how many bytes they take."""

import pytest
import torch
from torch import Tensor

from outrider.data.features import encodings
from outrider.data.features.encodings import Kind
from outrider.errors import DataError

KINDS: tuple[Kind, ...] = ("bf16", "int8", "int4")


def states(rows: int = 300, width: int = 256, seed: int = 0) -> Tensor:
    """As a target's: two channels are a hundred times larger than the rest, and the first token a thousand times."""
    noise = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, width, generator=noise)
    found[:, [3, 77]] *= 100
    found[0, 3] *= 1000
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_within_their_rounding(kind: Kind) -> None:
    """Catches halves or groups that are swapped, a scale of another row."""
    rows = states()
    found = encodings.decode(kind, encodings.encode(kind, rows), torch.float32)
    ordinary = torch.ones(256, dtype=torch.bool)
    ordinary[[3, 77]] = False
    error = encodings.relative_error(found[1:, ordinary], rows[1:, ordinary])
    assert error <= encodings.TOLERANCE[kind] / (2 if kind != "int4" else 1.5)
    assert encodings.relative_error(found, rows) <= encodings.TOLERANCE[kind]
    zeros = torch.zeros(4, 16)
    assert torch.equal(encodings.decode(kind, encodings.encode(kind, zeros), torch.float32), zeros)
    # and another text's states are seen
    assert encodings.relative_error(states(seed=1), rows) > 2 * encodings.TOLERANCE[kind]
    with pytest.raises(DataError, match="int4 needs an even number of channels, got 15; choose int8"):
        encodings.encode("int4", torch.ones(2, 15))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_taken_one_by_one(kind: Kind) -> None:
    """Catches a scale that is not selected with its row, in every type that a trainer asks for."""
    parts = encodings.encode(kind, states())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole = encodings.decode(kind, parts, dtype)
        assert whole.dtype == dtype
        for rows in (slice(5, 9), torch.tensor([250, 7, 7])):
            assert torch.equal(encodings.decode(kind, encodings.select(parts, rows), dtype), whole[rows])
