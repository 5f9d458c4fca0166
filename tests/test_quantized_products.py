"""Products with the quantised weights of GGUF files: right, and the same for a row whatever is computed beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import kernels
from outrider.kernels import blocks, quantized
from outrider.kernels.quantized import QuantizedEmbedding, QuantizedLinear

KINDS = list(blocks.BLOCKS)
INTEGERS = [kind for kind in KINDS if kind not in blocks.PLAIN]
NARROW = {
    "F32": 33, "F16": 40, "BF16": 7, "Q8_0": 96, "Q4_0": 32, "Q4_1": 288, "Q5_0": 544, "Q5_1": 64, "Q2_K": 512,
    "Q3_K": 768, "Q4_K": 768, "Q5_K": 256, "Q6_K": 256, "IQ4_NL": 160, "IQ4_XS": 512, "MXFP4": 320,
}  # fmt: skip
"""Columns: odd, fewer than a part of a panel, and no whole number of parts."""


def examples(kind: str, rows: int, columns: int) -> Tensor:
    return quantized.example(kind, rows, columns, torch.Generator().manual_seed(rows + columns))


def product(kind: str, given: Tensor, x: Tensor, in_integers: bool = False) -> Tensor:
    activations = "int8" if in_integers else "float32"
    return QuantizedLinear.from_blocks(kind, given, x.shape[-1], None, activations)(x)


@pytest.mark.parametrize("kind", INTEGERS)
def test_blocks_are_what_llama_cpps_library_reads_in_them(kind: str) -> None:
    """Catches a reference that is wrong as the kernels are: every weight of random bytes, bit for bit."""
    size = blocks.BLOCKS[kind]
    raw = torch.randint(256, (200, size.bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with np.errstate(all="ignore"):  # scales that are no numbers
        exact = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
    assert torch.equal(blocks.dequantized(kind, raw, size.values).nan_to_num(7), exact.nan_to_num(7))


@pytest.mark.parametrize("outputs", [1, 16, 83])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantised_weights(kind: str, outputs: int) -> None:
    """Catches a wrong order of nibbles, a neighbour's scale, a min that is ignored, scales of K types unpacked wrongly;
    the edges of panels, parts and tiles."""
    torch.manual_seed(outputs)
    given = examples(kind, outputs, NARROW[kind])
    exact = blocks.dequantized(kind, given, NARROW[kind]).double()
    assert quantized.is_fast()
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 17, 64):
        x = torch.randn(rows, NARROW[kind])
        # of a weight min + scale * number both may be as large as the row's largest
        allowed = 1e-6 * x.abs().double().sum(-1, keepdim=True) * exact.abs().amax(-1)
        found = product(kind, given, x)
        assert found.shape == (rows, outputs) and found.dtype == torch.float32
        assert bool(((found.double() - x.double() @ exact.T).abs() <= allowed).all()), rows


@pytest.mark.parametrize("kind", INTEGERS)
def test_products_in_integers_are_the_function_that_defines_them(kind: str) -> None:
    """Catches everything that the test before does, sums that int16 does not hold, and one rounding more or less."""
    torch.manual_seed(0)
    given, columns = examples(kind, 40, NARROW[kind]), NARROW[kind]
    for rows in (1, 2, 3, 4, 5, 8, 17, 64):
        x = torch.randn(rows, columns) * torch.logspace(-20, 20, rows)[:, None]
        x[0, :32], x[-1, -1] = 0, 1e5  # a block of zeros, and one with an outlier
        assert torch.equal(
            product(kind, given, x, True), quantized.product_in_integers(x, blocks.parts(kind, given))
        ), rows


@pytest.mark.parametrize("kind", INTEGERS)
def test_the_largest_integers_fit(kind: str) -> None:
    """Catches int16 sums that saturate: every weight and every value at its largest, of both signs."""
    given = examples(kind, 16, 256)
    for byte in (0x00, 0xFF, 0x7F, 0x80):
        extreme = torch.full_like(given, byte)
        for at in quantized.HALVES[kind]:
            for begin in range(0, given.shape[1], blocks.BLOCKS[kind].bytes):
                extreme[:, begin + at : begin + at + 2] = torch.tensor([0, 0x3C], dtype=torch.uint8)  # 1.0
        if kind == "MXFP4":
            extreme[:, :: blocks.BLOCKS[kind].bytes] = 128  # also 1.0
        for x in (torch.ones(1, 256), -torch.ones(1, 256)):
            wanted = quantized.product_in_integers(x, blocks.parts(kind, extreme))
            assert torch.equal(product(kind, extreme, x, True), wanted), byte
            exact = x.double() @ blocks.dequantized(kind, extreme, 256).double().T
            torch.testing.assert_close(wanted.double(), exact, rtol=1e-5, atol=1e-5)  # ones are 127 of 127


@pytest.mark.parametrize("in_integers", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_and_among_others(kind: str, in_integers: bool) -> None:
    """Catches an order of sums that depends on the number of rows or of threads: a verified token would not be the one
    generated alone."""
    torch.manual_seed(3)
    layer = QuantizedLinear.from_blocks(kind, examples(kind, 48, 512), 512, None, "int8" if in_integers else "float32")
    x = torch.randn(300, 512)
    alone = torch.cat([layer(row[None]) for row in x[:64]])
    for rows in range(1, 65):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
    assert torch.equal(layer(x)[:64], alone)  # more than are prepared at once
    assert torch.equal(layer(x.view(3, 100, 512))[0, :64], alone)
    assert torch.equal(layer(x.T.contiguous().T)[:64], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up_bit_for_bit(kind: str) -> None:
    """Catches a neighbour's lane or block, and an index that reads beyond the weights."""
    given = examples(kind, 40, NARROW[kind])
    layer = QuantizedLinear.from_blocks(kind, given, NARROW[kind])
    embedding, exact = QuantizedEmbedding.of(layer), blocks.dequantized(kind, given, NARROW[kind])
    ids = torch.tensor([[0, 39, 16], [15, 7, 7]])
    assert torch.equal(embedding(ids), exact[ids])
    assert torch.equal(layer.dequantized(), exact)
    assert embedding.packed.data_ptr() == layer.packed.data_ptr()
    with pytest.raises(RuntimeError, match="beyond the rows"):
        embedding(torch.tensor([48]))


def test_strange_values_stay_in_their_row() -> None:
    """Catches an infinity or a NaN that reaches another row, or is lost."""
    x = torch.randn(4, 64)
    x[1, 3], x[2, 40] = torch.inf, torch.nan
    for kind in INTEGERS[:4]:
        for in_integers in (False, True):
            found = product(kind, examples(kind, 20, 64), x, in_integers)
            assert found[[0, 3]].isfinite().all() and not found[[1, 2]].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_the_file(kind: str) -> None:
    """Catches a float copy of the weights: at most 5 % more than the file's bytes."""
    given = examples(kind, 640, 1024)
    assert QuantizedLinear.from_blocks(kind, given, 1024).weight_bytes <= 1.05 * given.nbytes


def test_a_gradient_and_float64_pass_through_the_dequantised_weights() -> None:
    """Catches a drafter that learns nothing through a quantised head, and a float64 check that is none."""
    given, bias = examples("Q4_1", 20, 64), torch.randn(20)
    layer = QuantizedLinear.from_blocks("Q4_1", given, 64, bias)
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(3, -1))
    exact = F.linear(x.detach().double(), layer.dequantized().double(), bias.double())
    assert torch.equal(layer(x.detach().double()), exact)
    torch.testing.assert_close(layer(x.detach()), exact.float())


def test_wrong_blocks_are_refused() -> None:
    """Catches bytes of another kind, which would be read as weights."""
    with pytest.raises(ValueError, match=r"uint8 \[rows, 40\], not torch.uint8 \[4, 36\]"):
        QuantizedLinear.from_blocks("Q4_1", torch.zeros(4, 36, dtype=torch.uint8), 64)
    with pytest.raises(ValueError, match="blocks of 256"):
        QuantizedLinear.from_blocks("Q6_K", torch.zeros(4, 36, dtype=torch.uint8), 64)


def test_one_rounding_is_one_rounding() -> None:
    """Catches a fused multiply-add of the definition that rounds twice: compared with exact fractions."""
    from fractions import Fraction

    noise = torch.Generator().manual_seed(7)
    a, b = (torch.randn(400, generator=noise) for _ in range(2))
    c = torch.where(torch.arange(400) % 2 == 0, -(a * b), torch.randn(400, generator=noise) * 2.0**24)
    tie = torch.tensor([1 + 2.0**-12]), torch.tensor([1 + 2.0**-12]), torch.tensor([2.0**13])  # half a unit and a bit
    for x, y, z in zip(*(torch.cat(each) for each in zip((a, b, c), tie, strict=True)), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        found = float(quantized.fused(x, y, z))
        for beside in torch.nextafter(torch.tensor(found), torch.tensor([-torch.inf, torch.inf])).tolist():
            assert abs(Fraction(found) - exact) <= abs(Fraction(beside) - exact)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler_products_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches another function where there is no kernel."""
    given, x = examples(kind, 20, NARROW[kind]), torch.randn(3, NARROW[kind])
    fast = [product(kind, given, x, in_integers) for in_integers in (False, True)]
    monkeypatch.setattr(quantized, "is_fast", lambda: False)
    plain = [product(kind, given, x, in_integers) for in_integers in (False, True)]
    torch.testing.assert_close(plain[0], fast[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(plain[1], fast[1]) or kind in blocks.PLAIN
    embedding = QuantizedEmbedding.from_blocks(kind, given, NARROW[kind])
    assert torch.equal(embedding(torch.tensor([3])), embedding.dequantized()[3:4])


SOURCE = Path(kernels.__file__).with_name("quantized.cpp")
VECTORS = {"16 bytes": (), "32 bytes": ("-march=native",), "64 bytes": ("-march=native", "-DOUTRIDER_BYTES=64")}
"""As plain C++, as this processor has them, and as wide as AVX-512's by other instructions."""


def compiled(source: Path, flags: Sequence[str], path: Path) -> ctypes.CDLL:
    """The products of a source, beside the kernels that this process has."""
    torch_folder = Path(torch.__file__).parent
    given = [str(source), f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu", *flags]
    # symbolic: else its functions are those of the same name in the kernels that are loaded already
    command = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-DOUTRIDER_UNREGISTERED", *given]
    library = ctypes.CDLL(str(kernels.shared_library(path, [command])))
    library.outrider_product.argtypes = [kernels.C_TYPES[each] for each in "nbpnnppn"]
    library.outrider_product.restype = None
    library.outrider_pack.argtypes = [kernels.C_TYPES[each] for each in "npnnp"]
    library.outrider_pack.restype = None
    return library


def differing(library: ctypes.CDLL) -> set[str]:
    """Kinds whose products by this library differ from those by ours."""
    found = set()
    for kind in KINDS:
        given, x, size = examples(kind, 40, NARROW[kind]), torch.randn(19, NARROW[kind]), blocks.BLOCKS[kind].bytes
        panels = torch.zeros_like(quantized.in_panels(kind, given))
        whole = F.pad(given, (0, -given.shape[1] % (size * quantized.WIDTH))) if kind in blocks.PLAIN else given
        count = whole.shape[1] // (size * quantized.WIDTH if kind in blocks.PLAIN else size)
        library.outrider_pack(quantized.NUMBERS[kind], whole.data_ptr(), 40, count, panels.data_ptr())
        for in_integers in (False, True):
            y, number = torch.empty(19, 40), quantized.NUMBERS[kind]
            library.outrider_product(
                number, in_integers, x.data_ptr(), 19, NARROW[kind], panels.data_ptr(), y.data_ptr(), 40
            )
            if not torch.equal(y, product(kind, given, x, in_integers)):
                found.add(kind)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", VECTORS)
def test_results_are_the_same_with_vectors_of_any_width(name: str, tmp_path: Path) -> None:
    """Catches a text that depends on the processor: each width is compiled and compared bit for bit."""
    assert not differing(compiled(SOURCE, VECTORS[name], tmp_path / "kernels.so"))


FAULTS = {
    "nibbles": ("return nibbles(from + 4 * PANEL, q % 4, lane, q / 4);", "q / 4", "1 - q / 4", "Q4_1"),
    "neighbour": ("to.scales + block * PANEL + lane, widened(from + 2 * lane)", "2 * lane", "2 * (lane ^ 1)", "Q8_0"),
    "min": ("to.mins + block * PANEL + lane, widened(from + 2 * (", "widened", "0.f * widened", "Q4_1"),
    "listed": ("return looked_up(IQ4, nibbles(from + 10 * PANEL", "IQ4", "E2M1", "IQ4_XS"),
    "high bits": ("twos(from + 50 * PANEL, b, q, lane) | ones", "b, q", "b ^ 1, q", "Q3_K"),
    "exponent": ("(e - 1) << 23", "e - 1", "e - 2", "MXFP4"),
    "scales": ("(six[b + 4] & 15) | (six[b - 4] >> 6) << 4", "six[b + 4]", "six[b]", "Q4_K"),
}
"""Where a fault is planted, what is replaced there, and the kind that shows it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, tmp_path: Path) -> None:
    """Catches comparisons that would hold whatever is unpacked; the texts stand in the source once each, or twice."""
    place, old, new, kind = FAULTS[name]
    for file in SOURCE.parent.glob("*.[hc]*"):
        text = file.read_text()
        assert place in text or file.name != "quantized.h"
        before, found, after = text.rpartition(place)
        (tmp_path / file.name).write_text(before + found.replace(old, new, 1) + after)
    wrong = differing(compiled(tmp_path / SOURCE.name, VECTORS["32 bytes"], tmp_path / "kernels.so"))
    assert kind in wrong and len(wrong) <= 2, wrong


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = QuantizedLinear.from_blocks("Q8_0", examples("Q8_0", 50, 64), 64)
        self.embedding = QuantizedEmbedding.of(self.head)
        self.one = QuantizedLinear.from_blocks("Q4_1", examples("Q4_1", 40, 64), 64, torch.randn(40))
        self.two = QuantizedLinear.from_blocks("Q4_1", examples("Q4_1", 24, 64), 64)
        self.three = QuantizedLinear.from_blocks("Q4_1", examples("Q4_1", 64, 64), 64, None, "int8")

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(ids)
        return self.one(x), self.two(x), self.head(torch.tanh(self.three(x)))


@pytest.mark.slow
def test_products_in_a_compiled_package_are_the_same(tmp_path: Path) -> None:
    """Catches a copy of the weights in a package, two layers' weights swapped, products of one input that are not
    joined."""
    from outrider.fast import Graph
    from outrider.fast.packages.build import build_package, builds

    model, ids = Model(), torch.arange(6).view(2, 3)
    [options] = builds(model).values()
    with torch.no_grad():
        build_package(tmp_path / "step.pt2", model, (ids,), [{0: torch.export.Dim("rows", min=2, max=64)}], options)
        graph = Graph(tmp_path / "step.pt2", model)
        assert not graph.package.has_weights
        assert (
            sum(name.startswith("panels_") for name in graph.package.names) == 3
        )  # one and two are joined, embedding and head are one
        for rows in (1, 2, 7):
            ids = torch.randint(50, (rows, 3))
            for found, wanted in zip(graph.forward(ids), model(ids), strict=True):
                assert torch.equal(found, wanted) or torch.allclose(found, wanted, rtol=0, atol=1e-5)
