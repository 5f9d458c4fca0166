"""Our kernels say what torch says, row by row the same whatever is computed beside it."""

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from outrider import kernels, machine
from outrider.decoding import noise
from outrider.fast.packages import rewrite
from outrider.kernels import pages, prepacked


def times(x: Tensor, weight: Tensor) -> Tensor:
    return prepacked.product(x, "panels", kernels.panels(weight), len(weight))


@pytest.mark.parametrize("is_half", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("outputs", "inner"), [(1, 1), (33, 7), (200, 256)])
def test_the_kernel_says_what_its_plain_twin_says(outputs: int, inner: int, is_half: bool) -> None:
    """Catches a panel's edge, a row block's edge, swapped halves of a word, a lost last k. Whole numbers."""
    noise = torch.Generator().manual_seed(outputs * inner)
    weight = torch.randint(-99, 100, (outputs, inner), generator=noise).float()
    # odd numbers above 256 have nine bits, and a bfloat16 eight
    weight = weight if is_half else 2 * weight + 501
    assert (kernels.panels(weight).shape[2] * 2 == kernels.panels(weight * 0 + 257).shape[2]) is is_half
    for rows in (1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 25, 70, 150):
        x = torch.randint(-9, 10, (rows, inner), generator=noise).float()
        assert torch.equal(times(x, weight).double(), x.double() @ weight.double().T), rows


def test_a_row_says_the_same_alone_and_among_others() -> None:
    """Catches an order of summation that hangs on the number of rows, so that a verified token is not the one written
    alone."""
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


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    kernels.library()  # registers it, where no test before did
    return torch.ops.outrider.gated(x, torch.cat([kernels.panels(gate), kernels.panels(up)]), len(gate))


@pytest.mark.parametrize("is_half", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("outputs", [1, 33, 200])
def test_a_gated_product_says_what_its_plain_twin_says(outputs: int, is_half: bool) -> None:
    """Catches a panel of the other matrix, an output that is not gated."""
    torch.manual_seed(outputs)
    gate, up = (weight.bfloat16().float() if is_half else weight for weight in torch.randn(2, outputs, 40))
    for rows in (1, 2, 8, 13, 70, 150):
        x = torch.randn(rows, 40)
        found, (by, times_) = gated(x, gate, up), (F.linear(x.double(), weight.double()) for weight in (gate, up))
        torch.testing.assert_close(found.double(), F.silu(by) * times_, rtol=1e-5, atol=1e-4)
        assert torch.equal(found[-1:], gated(x[-1:], gate, up))
    # an exponential that overflows, and a NaN
    by = torch.tensor([-torch.inf, torch.inf, torch.nan, -200.0, -87.5, -1e-30, 0.0, 88.0, 1e30])
    odd = gated(torch.ones(1, 1), by[:, None], torch.full((9, 1), 2.1))[0]
    torch.testing.assert_close(odd, 2.1 * F.silu(by), equal_nan=True, rtol=1e-6, atol=1e-30)


def test_strange_values_and_strides_are_multiplied_as_torch_does() -> None:
    """Catches an infinity, a NaN or a negative zero lost by widening, and rows read as if they lay side by side."""
    inf, nan = float("inf"), float("nan")
    weight = torch.tensor([[1.0, -0.0, 2.0], [inf, 1.0, -1.0], [nan, 0.0, 0.0], [2.0**-126, 2.0**-133, 0.0]])
    x = torch.tensor([[1.0, 2.0, -3.0]])
    torch.testing.assert_close(times(x, weight), F.linear(x, weight), equal_nan=True, rtol=0, atol=0)
    wide, weight = torch.randn(6, 9).T, torch.randn(40, 6)  # [9, 6], columns side by side
    torch.testing.assert_close(times(wide, weight), F.linear(wide, weight))


def attention(slots: int, heads: tuple[int, int], width: int, text: int, size: int) -> tuple[Tensor, ...]:
    """q, k, v and a mask in which rows see different columns; keys and values are a part of longer buffers."""
    torch.manual_seed(text)
    q = torch.randn(slots, width, heads[0], size).transpose(1, 2)
    k, v = (torch.randn(slots, heads[1], text + 9, size)[:, :, :text] for _ in range(2))
    mask = torch.zeros(slots, 1, width, text).masked_fill(torch.rand(slots, 1, width, text) < 0.3, -torch.inf)
    mask[..., :1] = 0
    return q, k, v, mask


def attends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    kernels.library()  # registers it, where no test before did
    return torch.ops.outrider.attend(q, k, v, mask, q.shape[-1] ** -0.5)


@pytest.mark.parametrize(
    ("size", "heads", "text"),
    [(16, (1, 1), 1), (64, (4, 2), 15), (72, (6, 1), 16), (256, (1, 1), 255), (64, (6, 1), 256), (80, (6, 1), 257),
     (64, (4, 2), 700)],
)  # fmt: skip
def test_attention_is_torchs(text: int, heads: tuple[int, int], size: int) -> None:
    """Catches the edge of a vector and of a block, a head of others' keys."""
    for slots, width in ((1, 1), (1, 5), (3, 2), (2, 90)):
        q, k, v, mask = attention(slots, heads, width, text, size)
        if width == 90 and text > 90:
            mask = mask.masked_fill(torch.ones(width, text).triu(text - width + 1).bool(), -torch.inf)
        wanted = F.scaled_dot_product_attention(*(each.double() for each in (q, k, v, mask)), enable_gqa=True)
        output = attends(q, k, v, mask)
        torch.testing.assert_close(output.double(), wanted, rtol=0, atol=5e-6)
        assert output.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(attends(q.contiguous(), k, v, mask), output, rtol=0, atol=0)
        assert torch.equal(
            attends(q, k, v, mask[:1]), attends(q, k, v, mask[:1].expand(slots, -1, -1, -1).contiguous())
        )


def test_what_is_hidden_counts_for_nothing() -> None:
    """Catches a hidden key, whatever stands there, with a weight of nearly 0; and a block that is hidden as a whole."""
    q, k, v, mask = attention(1, (2, 1), 3, 900, 32)
    mask[..., 300:800] = -torch.inf
    wanted = attends(q, k, v, mask)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :, 300:800], dirty_v[:, :, 300:800] = 1e4, 1e30
    assert torch.equal(attends(q, dirty_k, dirty_v, mask), wanted)
    large = mask.clone()
    large[..., 0] = 1e4  # all others are e^-10000
    torch.testing.assert_close(attends(q, k, v, large), v[:, :, :1].expand(1, 2, 3, 32), rtol=1e-6, atol=0)


def test_a_row_attends_alike_alone_and_among_others() -> None:
    """Catches an order of summation that hangs on rows, slots or the columns that others may look at."""
    q, k, v, mask = attention(2, (4, 2), 7, 300, 64)
    mask[:, :, :, 200:] = -torch.inf
    whole = attends(q, k, v, mask)
    for row in range(7):
        alone = attends(q[1:, :, row : row + 1], k[1:, :, :200], v[1:, :, :200], mask[1:, :, row : row + 1, :200])
        assert torch.equal(alone[0, :, 0], whole[1, :, row])


def rewritten(function: object, *given: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    names = [node.target for node in module.graph.nodes if node.op == "get_attr"]
    rewrite.with_kernels(module.graph, {name: number for number, name in enumerate(names)})
    module.recompile()
    return module


def called(module: fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in module.graph.nodes if "outrider" in str(node.target)]


def test_products_of_one_input_become_one_to_the_last_bit() -> None:
    """Catches a slice that is one panel off, padding taken for outputs, halves joined with wholes, another input's
    product."""
    torch.manual_seed(3)
    sizes = (64, 33, 100)
    weights = [torch.randn(size, 48).bfloat16().float() for size in sizes]
    held, single = [kernels.panels(weight) for weight in weights], kernels.panels(torch.randn(40, 48))
    multiply = torch.ops.outrider.multiply

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        parts = [multiply(x, own, size) for own, size in zip(held, sizes, strict=True)]
        return *parts, multiply(x, single, 40), multiply(y, held[0], 64)

    given = torch.randn(2, 3, 48), torch.randn(5, 48)
    module = rewritten(run, *given)
    assert called(module) == ["multiply.default"] * 3
    weights = [node.args[1].target for node in module.graph.nodes if node.target is multiply.default]
    assert [len(rewrite.numbers_of(name) or []) for name in weights] == [3, 1, 1]
    assert rewrite.numbers_of("model.norm.weight") is None
    for found, wanted in zip(module(*given), run(*given), strict=True):
        assert torch.equal(found, wanted)


def test_a_gate_is_multiplied_within_the_product_where_nobody_else_reads_it() -> None:
    """Catches a part that another reads and that is gone, gate and up in the wrong places."""
    torch.manual_seed(4)
    held = [kernels.panels(weight.bfloat16().float()) for weight in torch.randn(4, 64, 48)]
    short, single = kernels.panels(torch.randn(40, 48).bfloat16().float()), kernels.panels(torch.randn(64, 48))
    multiply = torch.ops.outrider.multiply

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gate, up = (multiply(x, own, 64) for own in held[:2])
        apart, read = (multiply(y, own, 64) for own in held[2:])
        return (
            F.silu(gate) * up, up * F.silu(read), read, multiply(y, single, 64) * F.silu(apart),
            F.silu(multiply(x, held[2], 64)) * multiply(y, held[3], 64),
            F.silu(multiply(y, short, 40)) * multiply(y, held[0], 64)[:, :40],
        )  # fmt: skip

    def both(x: Tensor) -> tuple[Tensor, ...]:
        parts = [multiply(x, own, 64) for own in held]
        return parts[1] * F.silu(parts[0]), F.silu(parts[2]) * parts[3], multiply(x, short, 40)

    given = torch.randn(5, 48), torch.randn(5, 48)
    left, module = rewritten(run, *given), rewritten(both, given[0])
    assert "gated.default" not in called(left)
    assert called(module) == ["gated.default", "gated.default", "multiply.default"]
    for found, wanted in zip([*left(*given), *module(given[0])], [*run(*given), *both(given[0])], strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-5)


def test_panels_are_joined_once_and_stay_each_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second copy in memory, a layer that reads another's panels."""
    monkeypatch.setattr(machine, "fastest", lambda question, ways, margin=1.1: "panels")
    layers = [nn.Linear(16, size, bias=False) for size in (40, 64, 7)]
    large = [nn.Linear(500, size, bias=False) for size in (400, 333, 400)]
    prepacked.pack(nn.Sequential(*large))
    first = prepacked.panels_of([large[0]])
    assert first.data_ptr() % pages.PAGE == 0 and prepacked.panels_of(large).data_ptr() == first.data_ptr()
    prepacked.pack(nn.Sequential(*layers))
    apart = [prepacked.panels_of([layer]).clone() for layer in layers]
    joined = prepacked.panels_of(layers)
    assert torch.equal(joined, torch.cat(apart))
    assert prepacked.panels_of(layers).data_ptr() == joined.data_ptr()
    second = prepacked.panels_of([layers[1]]).data_ptr()
    assert prepacked.panels_of(layers[1:]).data_ptr() == second != joined.data_ptr()
    x = torch.randn(3, 16)
    with torch.inference_mode(), prepacked.enabled():
        for layer in layers:
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
    both = torch.zeros(2, *apart[0].shape, dtype=torch.int32)
    for layer, part in zip(layers[:2], both, strict=True):
        # side by side in memory, and each in a storage of its own
        own = torch.frombuffer(part.numpy(), dtype=torch.int32).view(part.shape)
        prepacked._weights[layer] = prepacked._weights[layer]._replace(weight=own)
    assert prepacked.panels_of(layers[:2]).shape[0] == 2 * len(apart[0])


def test_what_has_no_room_on_large_pages_is_stored_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tensor that is written over its neighbour, one that is not copied."""
    values = torch.arange(pages.PAGE // 8).view(2, -1)  # half of a page's words, 8 bytes each
    own = pages.LargePages(pages.PAGE)
    stored = [own.stored(values.T) for _ in range(4)]
    for copy in stored:
        assert torch.equal(copy, values.T) and copy.is_contiguous() and copy.data_ptr() != values.data_ptr()
    assert len({copy.untyped_storage().data_ptr() for copy in stored}) > 1

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert torch.equal(pages.LargePages(pages.PAGE).stored(values), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_becomes_ours_where_it_may(dtype: torch.dtype) -> None:
    """Catches attention in float64 read as float32, and a scale or a mask that is lost."""
    q, k, v, mask = (each.to(dtype) for each in attention(1, (2, 2), 3, 50, 32))

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        masked = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=0.3)[0]
        return masked + torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    module = rewritten(run, q, k, v, mask)
    assert called(module) == (["attend.default"] if dtype == torch.float32 else [])
    torch.testing.assert_close(module(q, k, v, mask), run(q, k, v, mask))


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing was compiled yet."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "_built", kernels._built.__wrapped__)
    monkeypatch.setattr(kernels, "library", functools.cache(kernels.library.__wrapped__))


@pytest.mark.parametrize("command", ["/nowhere/c++", "false", "true"])
def test_without_a_compiler_that_works_all_goes_on(afresh, command, monkeypatch, caplog):
    """Catches a missing compiler, one that fails and one that writes nothing taken for the end."""
    caplog.set_level("INFO", logger="outrider.kernels")
    monkeypatch.setattr(kernels, "compiler", lambda: None if command.startswith("/") else command)
    assert kernels.library() is None
    assert "panels" not in prepacked.ways()
    assert "kernels are not used: " in caplog.text


def test_kernels_that_say_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: weights in another order than the kernel reads them; torch says something else of attention."""
    again = kernels.library.__wrapped__
    assert again() is not None
    with monkeypatch.context() as patched:
        real = kernels.panels
        patched.setattr(kernels, "panels", lambda weight: real(weight.flip(0)))
        assert again() is None
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_, **__: q)
    assert again() is None


@pytest.mark.parametrize("vocabulary", [1, 33, 8193, 50_257])
def test_a_race_has_the_winners_of_its_textbook_form(vocabulary: int) -> None:
    """Catches a bound that leaves a winner out, a chunk's edge, tokens of weight 0, strides, keys of other rows."""
    noise_of, tokens = torch.Generator().manual_seed(vocabulary), torch.arange(vocabulary)
    for peak in (0.0, 2.0, 9.0):
        for dtype in (torch.float32, torch.float64):
            weights = (peak * torch.randn(3, 2, 2, vocabulary, generator=noise_of)).softmax(-1).to(dtype)
            weights = (weights * (torch.rand(weights.shape, generator=noise_of) < 0.7))[:, :, 1]
            keys = torch.randint(-(2**62), 2**62, (3, 2), generator=noise_of)
            assert torch.equal(kernels.race(weights, keys), noise.race(weights, keys, tokens))
            keys = keys[:, :1]
            assert torch.equal(kernels.race(weights, keys), noise.race(weights, keys, tokens))


def test_draws_are_made_by_the_kernel_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.library() is not None and noise.on_cpu is kernels.race
    streams, weights = noise.Streams(torch.tensor([1, 2]), torch.tensor([0, 5])), torch.rand(2, 3, 9000)
    found = streams.draw(weights, 1, noise.Purpose.DRAFT, salt=torch.arange(3))
    monkeypatch.setattr(noise, "on_cpu", None)
    assert torch.equal(found, streams.draw(weights, 1, noise.Purpose.DRAFT, salt=torch.arange(3)))
