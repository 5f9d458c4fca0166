"""What a step is said to compute is what it computes, and counting changes nothing of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from outrider import machine
from outrider.nn.blocks import recompute
from outrider.targets.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers
from outrider.training.step import optimise
from outrider.training.throughput import Flops, Pace, StepFlops
from training.bench import fit, make_model, make_source

CONFIG = Config(steps=10, loss={"kl": 1.0}, dtype="float32", lr=1e-3)


def test_products_and_attention_are_counted() -> None:
    """Catches a product that is counted twice or not at all; a CPU's attention is not in torch's own table."""
    x, weight, q = torch.ones(5, 7), torch.ones(7, 3), torch.ones(1, 2, 6, 8)
    with Flops() as flops:
        x @ weight
    assert flops.count == 2 * 5 * 7 * 3
    with Flops() as flops:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert flops.count == 2 * (2 * 2 * 6 * 6 * 8)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_step_is_counted_forward_and_backward(is_recomputed: bool, talker: TransformersTarget) -> None:
    """Catches passes that are left out, and layers that are counted again where they are computed again.

    Within a tenth: the first layer's input has no gradient, so its backward pass is shorter.
    """
    model = make_model(talker, "dflash")
    recompute(model, is_recomputed)
    optimizer, flops = Optimizers(model, "adamw", talker.spec.vocabulary, 0.0), StepFlops()
    batch = make_source(talker).batch(0)
    torch.manual_seed(3)
    optimise(model, optimizer, [batch], CONFIG, 0, False, flops=flops)
    recompute(model, False)
    torch.manual_seed(3)
    with Flops() as whole:
        optimise(model, optimizer, [batch], CONFIG, 0, False)
    assert whole.count <= flops.count <= 1.1 * whole.count


def test_counting_changes_no_bit(talker: TransformersTarget) -> None:
    """Catches a count that takes another kernel, so that logged steps learn otherwise than others."""
    found = []
    for flops in (None, StepFlops()):
        model = make_model(talker)
        optimizer = Optimizers(model, "adamw", talker.spec.vocabulary, 0.0)
        torch.manual_seed(3)
        optimise(model, optimizer, [make_source(talker).batch(0)], CONFIG, 0, False, flops=flops)
        found.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_utilisation_is_flops_a_second_over_what_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens of one step divided by the time of several."""
    now = iter([0.0, 2.0, 3.0])
    monkeypatch.setattr("outrider.training.throughput.time.monotonic", lambda: next(now))
    monkeypatch.setattr(machine, "gflops", lambda *_: 1e-6)  # 1,000 FLOP/s
    pace = Pace(torch.device("cpu"), "float32", 100)
    assert pace.facts(300, 50, 250) == {"tokens_per_s": 100.0, "mfu": 0.5}
    assert pace.facts(340, 40, 200) == {"tokens_per_s": 40.0, "mfu": 0.2}


def test_every_logged_step_says_its_pace(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a row of metrics.jsonl without tokens a second and utilisation."""
    fit(tmp_path, talker, steps=3)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["tokens_per_s"] > 0 and 0 < row["mfu"] < 2 for row in rows if "loss" in row)
