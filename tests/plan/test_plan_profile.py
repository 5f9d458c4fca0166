"""What a plain step waits for on a GPU."""

import pytest
import torch

from outrider import load_target
from outrider.plan.measured import profile
from outrider.plan.subject import load_subject


def test_kernels_side_by_side_are_counted_once() -> None:
    """Catches a device that is busy for more than all of the time."""
    assert profile.busy_seconds([(0, 10), (5, 20), (6, 7), (30, 40)]) == pytest.approx(30e-6)
    assert profile.busy_seconds([]) == 0


@pytest.mark.parametrize(
    ("shares", "said"), [((0.7, 0.2, 0.1), "launch"), ((0.1, 0.8, 0.3), "memory"), ((0.0, 0.4, 0.6), "compute")]
)
def test_a_step_is_bound_by_what_takes_most_of_it(shares: tuple[float, float, float], said: str) -> None:
    assert profile.bound(*shares) == said


@pytest.mark.gpu
def test_a_gpu_is_profiled() -> None:
    """Catches spans that are not the device's, and a copy or a product that is not waited for."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    loaded = load_target("demo", device="cuda")
    found = profile.profile(loaded, load_subject("demo", ["ngram"]).model, 1, 64)
    assert found is not None and 0 < found.busy <= 1
    assert 0 < found.memory < 1 and 0 < found.compute < 1
