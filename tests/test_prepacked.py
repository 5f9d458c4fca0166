"""Packed products: the same numbers, only while they are asked for, and never those of a weight that has changed."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from torch import nn

from outrider import checkpoint, load_drafter, load_target, machine
from outrider.drafters import dspark
from outrider.kernels import prepacked
from outrider.kernels.prepacked import Way

OURS = [way for way in prepacked.ways() if way != "plain"]


@pytest.fixture(params=OURS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """As on a machine where this way was measured to be the fastest."""
    monkeypatch.setattr(machine, "fastest", lambda question, ways, margin=1.1: request.param)
    return request.param


@pytest.fixture
def layer(way: Way) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80)
    prepacked.pack(nn.Sequential(layer))
    return layer


@pytest.mark.parametrize("shape", [(48,), (2, 3, 48), (200, 48), (0, 48)])
def test_the_product_is_the_same(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    """Catches a transposed weight, a lost bias, rows that are dropped or reordered."""
    x = torch.randn(shape)
    with torch.inference_mode(), prepacked.enabled():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_it_is_used_only_while_open(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model of the user's that computes otherwise outside our passes, in training or under autocast."""
    calls: list[int] = []
    real = prepacked.product
    monkeypatch.setattr(prepacked, "product", lambda *given: calls.append(1) or real(*given))
    x = torch.randn(2, 48)
    with torch.inference_mode():
        layer(x)
    with prepacked.enabled():
        layer(x)  # gradients are on
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert not calls
        with torch.no_grad():
            layer(x)
    assert calls == [1]


def test_a_changed_weight_is_not_forgotten(layer: nn.Linear) -> None:
    """Catches the packed copy of an old weight."""
    other = copy.deepcopy(layer)
    x = torch.randn(2, 48)
    for changed in (layer, other):
        with torch.no_grad():
            changed.weight.mul_(2)
        with torch.inference_mode(), prepacked.enabled():
            torch.testing.assert_close(changed(x), F.linear(x, changed.weight, changed.bias))
        prepacked.pack(nn.Sequential(changed))
        with torch.inference_mode(), prepacked.enabled():
            torch.testing.assert_close(changed(x), F.linear(x, changed.weight, changed.bias))


@pytest.mark.usefixtures("way")
def test_large_models_and_wrapped_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second copy of weights that fill the memory, and a forward of others' that is overwritten."""
    wrapped = nn.Linear(8, 8)
    wrapped.forward = F.relu  # type: ignore[method-assign, assignment]
    prepacked.pack(nn.Sequential(wrapped))
    assert wrapped.forward is F.relu  # type: ignore[comparison-overlap]
    large = nn.Linear(8, 8)
    monkeypatch.setattr(machine, "free_memory", lambda: large.weight.nbytes)
    prepacked.pack(nn.Sequential(large))
    assert "forward" not in vars(large)


def test_a_loaded_drafter_reads_half_the_bytes(tmp_path: Path) -> None:
    """Catches a rounded embedding, rounded weights of the model that trains, a wide product in a served draft."""
    target = load_target(tiny_model().float())
    config = dspark.Config(layers=1, taps=(0, 1), rank=8)
    model = dspark.Model(config, target)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.1)
    checkpoint.save(tmp_path / "one", model)
    served = load_drafter(tmp_path / "one", target).model
    products = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert {"markov_head.markov_w2.weight", "backbone.layers.0.mlp.gate_proj.weight"} < products
    for (name, own), loaded in zip(model.named_parameters(), served.parameters(), strict=True):
        assert torch.equal(loaded, own.bfloat16().float() if name in products else own), name
