"""What a step is said to compute is what it computes."""

import pytest
import torch

from outrider import machine
from outrider.training.progress.throughput import Flops, Pace


def test_products_and_attention_are_counted() -> None:
    """Catches a product that is counted twice or not at all; a CPU's attention is not in torch's own table."""
    x, weight, q = torch.ones(5, 7), torch.ones(7, 3), torch.ones(1, 2, 6, 8)
    with Flops() as flops:
        x @ weight
    assert flops.count == 2 * 5 * 7 * 3
    with Flops() as flops:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert flops.count == 2 * (2 * 2 * 6 * 6 * 8)


def test_utilisation_is_flops_a_second_over_what_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens of one step divided by the time of several."""
    now = iter([0.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr("outrider.training.progress.throughput.time.monotonic", lambda: next(now))
    monkeypatch.setattr(machine, "gflops", lambda *_: 1e-6)  # 1,000 FLOP/s
    pace = Pace(torch.device("cpu"), "float32", 100)
    assert pace.facts(300, 50, 250) == {"tokens_per_s": 100.0, "mfu": 0.5}
    assert pace.facts(340, 40, 200) == {"tokens_per_s": 40.0, "mfu": 0.2}
    assert pace.facts(380, 40, 1200) == {"tokens_per_s": 40.0}, "more than the device can"
