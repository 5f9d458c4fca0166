"""A peak is that of its own stretch: it rises with what is used, and falls when it is reset."""

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.measure import peak_memory

CPU = torch.device("cpu")
SIZE = 64 * 2**20


def used(size: int) -> None:
    """Touch so much memory and give it back."""
    np.ones(size // 8)


@pytest.fixture
def can_reset() -> None:
    if not peak_memory.reset(CPU):
        pytest.skip("clear_refs")


def test_a_peak_rises_with_what_is_used_and_falls_when_it_is_reset(can_reset: None) -> None:
    """Catches a later drafter that is charged with an earlier one's memory."""
    before = peak_memory.peak_bytes(CPU)
    used(SIZE)
    high = peak_memory.peak_bytes(CPU)
    assert before is not None and high is not None
    assert high - before > 0.8 * SIZE
    # the planted fault: without a reset, the peak stays
    used(8)
    assert peak_memory.peak_bytes(CPU) == high
    peak_memory.reset(CPU)
    assert peak_memory.peak_bytes(CPU) < high - 0.8 * SIZE


def test_what_the_system_does_not_have_is_not_known(tmp_path: Path) -> None:
    """Catches a zero, or a peak of all time, where nothing can be reset."""
    assert peak_memory.reset(CPU, tmp_path / "none") is False
    assert peak_memory.peak_bytes(CPU, tmp_path / "none") is None
    (tmp_path / "status").write_text("Name: x\nVmHWM:\t    12 kB\n")
    assert peak_memory.peak_bytes(CPU, tmp_path) == 12 * 1024
    (tmp_path / "status").write_text("Name: x\n")
    assert peak_memory.peak_bytes(CPU, tmp_path) is None
