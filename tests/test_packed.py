"""Packed products: the same numbers, only while they are asked for, and never those of a weight that has changed."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import machine, packed
from outrider.packed import Way

OURS = [way for way in packed.ways() if way != "plain"]
pytestmark = pytest.mark.skipif(not OURS, reason="neither torch nor a compiler has another way here")
in_panels = pytest.mark.skipif("panels" not in OURS, reason="there is no C++ compiler")


@pytest.fixture(params=OURS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """As on a machine where this way was measured to be the fastest."""
    monkeypatch.setattr(machine, "fastest", lambda question, ways, margin=1.1: request.param)
    chosen: Way = request.param
    return chosen


@pytest.fixture
def layer(way: Way) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80)
    packed.pack(nn.Sequential(layer))
    return layer


@pytest.mark.parametrize("shape", [(48,), (1, 48), (8, 48), (2, 3, 48), (200, 48), (0, 48)])
def test_the_product_is_the_same(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    """Catches a transposed weight, a lost bias, rows that are dropped or reordered."""
    x = torch.randn(shape)
    with torch.inference_mode(), packed.products():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_it_is_used_only_while_open(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model of the user's that computes otherwise outside our passes, in training or under autocast."""
    calls: list[int] = []
    real = packed.product
    monkeypatch.setattr(packed, "product", lambda *given: calls.append(1) or real(*given))
    x = torch.randn(2, 48)
    with torch.inference_mode():
        layer(x)
    with packed.products():
        layer(x)  # gradients are on
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert not calls
        with torch.no_grad():
            layer(x)
    assert calls == [1]


def test_a_changed_weight_is_not_forgotten(layer: nn.Linear) -> None:
    """Catches the packed copy of an old weight: after a step of the optimiser, after loading, after a copy of the model."""
    other = copy.deepcopy(layer)
    x = torch.randn(2, 48)
    for changed in (layer, other):
        with torch.no_grad():
            changed.weight.mul_(2)
        with torch.inference_mode(), packed.products():
            torch.testing.assert_close(changed(x), F.linear(x, changed.weight, changed.bias))
        packed.pack(nn.Sequential(changed))
        with torch.inference_mode(), packed.products():
            torch.testing.assert_close(changed(x), F.linear(x, changed.weight, changed.bias))


@pytest.mark.usefixtures("way")
def test_large_models_and_wrapped_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second copy of weights that fill the memory, and a forward of others' that is overwritten."""
    wrapped = nn.Linear(8, 8)
    wrapped.forward = F.relu  # type: ignore[method-assign, assignment]
    packed.pack(nn.Sequential(wrapped))
    assert wrapped.forward is F.relu  # type: ignore[comparison-overlap]
    large = nn.Linear(8, 8)
    monkeypatch.setattr(packed, "MOST_BYTES", large.weight.nbytes - 1)
    packed.pack(nn.Sequential(large))
    assert "forward" not in vars(large)


def test_layers_are_packed_only_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy of all weights for nothing; all ways are really run, on the layers' own shapes.

    One layer is tied to a weight that is wider than it says, as in some families.
    """
    asked: list[str] = []

    def plain_wins(question: str, ways: Callable[[], Mapping[str, Callable[[], object]]], margin: float = 1.1) -> str:
        asked.append(question)
        found = ways()
        for run in found.values():
            run()
        assert list(found) == packed.ways()
        return "plain"

    monkeypatch.setattr(machine, "fastest", plain_wins)
    layer = nn.Linear(48, 80)
    tied = nn.Linear(48, 80)
    tied.weight = nn.Parameter(torch.randn(80, 96))
    packed.pack(nn.Sequential(layer, nn.ReLU(), tied))
    assert "forward" not in vars(layer)
    assert asked == [f"float32 products of linear layers [((80, 48), 1), ((80, 96), 1)]: {packed.ways()}"]


# ── our kernel ────────────────────────────────────────────────────────────────────────────────────────────────────────


def times(x: Tensor, weight: Tensor) -> Tensor:
    return packed.product(x, "panels", packed.packed(weight, "panels"), len(weight))


@in_panels
@pytest.mark.parametrize("is_half", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("inner", [1, 7, 256])
def test_the_kernel_says_what_its_plain_twin_says(outputs: int, inner: int, is_half: bool) -> None:
    """Catches a panel's edge, a row block's edge, swapped halves of a word, a lost last k.  Whole numbers: sums are exact."""
    noise = torch.Generator().manual_seed(outputs * inner)
    weight = torch.randint(-99, 100, (outputs, inner), generator=noise).float()
    # odd numbers above 256 have nine bits, and a bfloat16 eight
    weight = weight if is_half else 2 * weight + 501
    assert (packed.packed(weight, "panels").shape[2] * 2 == packed.packed(weight * 0 + 257, "panels").shape[2]) is is_half
    for rows in (1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 25, 70):
        x = torch.randint(-9, 10, (rows, inner), generator=noise).float()
        assert torch.equal(times(x, weight).double(), x.double() @ weight.double().T), rows


@in_panels
def test_a_row_says_the_same_alone_and_among_others() -> None:
    """Catches an order of summation that hangs on the number of rows, so that a verified token is not the one written alone."""
    torch.manual_seed(1)
    for weight in (torch.randn(150, 333), torch.randn(150, 333).bfloat16().float()):
        x = torch.randn(40, 333)
        alone = torch.cat([times(row[None], weight) for row in x])
        for rows in (2, 5, 8, 13, 40):
            assert torch.equal(times(x[:rows], weight), alone[:rows])
        # as bfloat16 and as float32 the same weights give the same bits
        whole = weight.clone()
        whole[-1, -1] = 1 + 2.0**-20
        assert torch.equal(times(x, whole)[:, :-1], alone[:, :-1])


@in_panels
def test_strange_values_and_strides_are_multiplied_as_torch_does() -> None:
    """Catches an infinity, a NaN or a negative zero lost by widening, and rows that are read as if they lay side by side."""
    weight = torch.tensor([[1.0, -0.0, 2.0], [float("inf"), 1.0, -1.0], [float("nan"), 0.0, 0.0], [2.0**-126, 2.0**-133, 0.0]])
    x = torch.tensor([[1.0, 2.0, -3.0]])
    torch.testing.assert_close(times(x, weight), F.linear(x, weight), equal_nan=True, rtol=0, atol=0)
    wide = torch.randn(6, 9).T  # [9, 6], columns side by side
    weight = torch.randn(40, 6)
    torch.testing.assert_close(times(wide, weight), F.linear(wide, weight))


@in_panels
def test_threads_multiply_side_by_side() -> None:
    """Catches a kernel with something of its own between calls."""
    torch.manual_seed(2)
    weight, inputs = torch.randn(512, 512), [torch.randn(9, 512) for _ in range(4)]
    held, wanted = packed.packed(weight, "panels"), [times(x, weight) for x in inputs]
    failed: list[int] = []

    def run(n: int) -> None:
        for _ in range(30):
            if not torch.equal(packed.product(inputs[n], "panels", held, 512), wanted[n]):
                failed.append(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing was compiled yet."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(packed, "kernel", functools.cache(packed.kernel.__wrapped__))


@pytest.mark.parametrize("command", ["/nowhere/c++", "false", "true"])
def test_without_a_compiler_that_works_all_goes_on(
    afresh: None, command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a missing compiler, one that fails and one that writes nothing taken for the end; and silence about it."""
    caplog.set_level("INFO", logger="outrider.packed")
    monkeypatch.setattr(packed, "compiler", lambda: None if command.startswith("/") else command)
    assert packed.kernel() is None
    assert "panels" not in packed.ways()
    assert "products in panels are left out: " in caplog.text


@in_panels
def test_a_kernel_that_multiplies_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: weights in another order than the kernel reads them."""
    real, library = packed.panels, packed.kernel()
    assert library is not None
    # a second copy of an operator's library would end the process
    monkeypatch.setattr(packed, "_built", lambda: Path(library._name))
    assert packed.kernel.__wrapped__() is not None
    monkeypatch.setattr(packed, "panels", lambda weight, width: real(weight.flip(0), width))
    assert packed.kernel.__wrapped__() is None
