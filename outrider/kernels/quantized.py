"""Linear layers and embeddings whose weights stay in the blocks of a GGUF file.

A weight is scale * number + min (see `kernels.blocks`).  Products are computed in float32, equal to those of the
dequantised weights except for the summation order; or in integers (`activations="int8"`), which is another function of
the same weights, defined by `product_in_integers`.  In both cases a row's result is bit for bit the same whatever other
rows are computed with it, and on every processor.

The kernel (`quantized.cpp`) reads weights in panels of 16 rows, packed once.  Without a C++ compiler blocks are not
packed, and every product dequantises them.

B rows of activations, R rows of weights, C columns, G groups of a row of weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import kernels
from outrider.errors import first_line
from outrider.kernels import blocks
from outrider.kernels.blocks import Parts
from outrider.kernels.pages import LINE, LargePages

log = logging.getLogger(__name__)

Activations = Literal["float32", "int8"]
PANEL = 16
"""Rows of weights in a panel."""
NUMBERS = {block.name: number for number, block in blocks.TYPES.items()}
"""ggml's numbers of types."""
PACKED = {kind: block.bytes for kind, block in blocks.BLOCKS.items()} | {
    "Q3_K": 114, "Q4_K": 148, "Q5_K": 180, "IQ4_XS": 138
}  # fmt: skip
"""Bytes of a block in a panel, where scales of 6 bits have 8."""
WIDTH = 32
"""Activations that share a scale, and floats of a row in a panel."""
ARENA = 2**26
"""Bytes of large pages allocated at once; pages that are never written take no memory."""
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Offsets of a block's scale, and of its min."""
SPREAD = {
    "Q8_0": 64.0, "Q4_0": 4.0, "Q4_1": 4.0, "Q5_0": 8.0, "Q5_1": 8.0, "Q2_K": 16.0, "Q3_K": 64.0, "Q4_K": 256.0,
    "Q5_K": 512.0, "Q6_K": 1024.0, "IQ4_NL": 64.0, "IQ4_XS": 1024.0, "MXFP4": 1.0,
}  # fmt: skip
"""Divisors of random scales, so that weights are about 1."""
LEAST = 1e-30
"""If all activations of a group are smaller than this, they count as 0."""


_plainly: ContextVar[bool] = ContextVar("plainly", default=False)


@contextmanager
def plainly() -> Iterator[None]:
    """Within this context, products in float32 are torch's with the dequantised weights, in this thread."""
    token = _plainly.set(True)
    try:
        yield
    finally:
        _plainly.reset(token)


class Quantized(nn.Module):
    """A matrix stored as rows of blocks."""

    packed: Tensor
    """Panels uint8 [panels, bytes]; without a kernel the file's blocks [R, bytes]."""
    panels: Tensor | None
    """`packed` as a parameter, while a pass is traced."""

    def __init__(self, kind: str, packed: Tensor, rows: int, columns: int):
        super().__init__()
        self.kind, self.rows, self.columns = kind, rows, columns
        self.register_buffer("packed", packed)
        self.register_parameter("panels", None)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.packed.nbytes

    def dequantized(self) -> Tensor:
        """All weights, float32 [R, C]."""
        return self.values(torch.arange(self.rows, device=self.packed.device))

    def values(self, ids: Tensor) -> Tensor:
        """The weights of these rows [n], float32 [n, C]."""
        if not is_fast():
            return blocks.dequantized(self.kind, self.packed.index_select(0, ids), self.columns)
        arguments = ids.contiguous().cpu(), self._panels().cpu(), NUMBERS[self.kind], self.columns
        values: Tensor = torch.ops.outrider.quantized_rows(*arguments)
        return values.to(self.packed.device)

    def _panels(self) -> Tensor:
        return self.packed if self.panels is None else self.panels

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.rows} x {self.columns}"


class QuantizedLinear(Quantized):
    """x times the transposed weights, computed from their blocks."""

    def __init__(
        self, kind: str, packed: Tensor, rows: int, columns: int, bias: Tensor | None, activations: Activations
    ):
        super().__init__(kind, packed, rows, columns)
        self.activations = activations
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.activations} activations"

    @classmethod
    def from_blocks(
        cls, kind: str, blocks: Tensor, columns: int, bias: Tensor | None = None, activations: Activations = "float32"
    ) -> QuantizedLinear:
        """A layer of rows of blocks uint8 [R, bytes], in ggml's layout.  bias [R] float32."""
        return cls(kind, _packed(kind, blocks, columns), len(blocks), columns, bias, activations)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] to [..., R]."""
        in_integers = self.activations == "int8" and self.kind not in blocks.PLAIN
        is_ours = in_integers or (x.dtype == torch.float32 and not _plainly.get())
        if not is_ours or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.dequantized().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        output = self._product(x.float().contiguous(), in_integers).to(x.dtype)
        return output if self.bias is None else output + self.bias

    def _product(self, x: Tensor, in_integers: bool) -> Tensor:
        if is_fast() and x.device.type == "cpu":
            arguments = x, self._panels(), NUMBERS[self.kind], self.rows, int(in_integers)
            output: Tensor = torch.ops.outrider.quantized(*arguments)
            return output
        if in_integers and not is_fast():
            return product_in_integers(x, blocks.parts(self.kind, self.packed))
        return F.linear(x, self.dequantized())


class QuantizedEmbedding(Quantized):
    """Rows looked up in their blocks."""

    def __init__(self, kind: str, packed: Tensor, rows: int, columns: int, scale: float):
        """scale: the family's factor on its embedding."""
        super().__init__(kind, packed, rows, columns)
        self.scale = scale

    @classmethod
    def from_blocks(cls, kind: str, blocks: Tensor, columns: int, scale: float = 1.0) -> QuantizedEmbedding:
        """An embedding of rows of blocks uint8 [R, bytes]."""
        return cls(kind, _packed(kind, blocks, columns), len(blocks), columns, scale)

    @classmethod
    def of(cls, linear: QuantizedLinear, scale: float = 1.0) -> QuantizedEmbedding:
        """An embedding tied to this head: the blocks are in memory only once."""
        return cls(linear.kind, linear.packed, linear.rows, linear.columns, scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] to float32 [..., C]."""
        rows = self.values(ids.flatten()).view(*ids.shape, self.columns)
        return rows if self.scale == 1.0 else rows * self.scale


# ── panels ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _packed(kind: str, raw: Tensor, columns: int) -> Tensor:
    """Blocks [R, bytes] as panels, or copied if there is no kernel."""
    expected = blocks.row_bytes(kind, columns)
    if raw.dtype != torch.uint8 or raw.ndim != 2 or raw.shape[1] != expected:
        raise ValueError(
            f"blocks of {columns} weights in {kind} are uint8 [rows, {expected}], not {raw.dtype} "
            f"{list(raw.shape)}; give the bytes of the file"
        )
    return in_panels(kind, raw.contiguous()) if is_fast() else raw.clone()


def in_panels(kind: str, raw: Tensor) -> Tensor:
    """Blocks [R, bytes] as panels [panels, bytes] for the kernel."""
    if kind in blocks.PLAIN:  # panels hold these 32 at a time
        raw = F.pad(raw, (0, -raw.shape[1] % (WIDTH * blocks.BLOCKS[kind].bytes)))
    size = blocks.BLOCKS[kind].bytes * (WIDTH if kind in blocks.PLAIN else 1)
    count = raw.shape[1] // size
    packed = PACKED[kind] * (WIDTH if kind in blocks.PLAIN else 1)
    panels = _allocated(-(-len(raw) // PANEL) * PANEL * count * packed).view(-1, PANEL * count * packed)
    kernels.call("pack", NUMBERS[kind], raw.data_ptr(), len(raw), count, panels.data_ptr())
    return panels


class _Arena:
    """Memory in which panels are contiguous, so that a compiled pass can read several as one."""

    pages: LargePages | None = None
    left = 0


def _allocated(size: int) -> Tensor:
    """Zeros uint8 [size], after those allocated before."""
    if size > ARENA // 4:
        return LargePages(size).taken(size)
    if _Arena.pages is None or size > _Arena.left:
        _Arena.pages, _Arena.left = LargePages(ARENA), ARENA
    _Arena.left -= size + -size % LINE
    return _Arena.pages.taken(size)


# ── products in integers ──────────────────────────────────────────────────────────────────────────────────────────────


def product_in_integers(x: Tensor, weights: Parts) -> Tensor:
    """x [..., C] float32 times weights of R rows: [..., R], bit for bit as the kernel computes it.

    Groups are added in the order of columns: first scale * (scale of x) times the sum of integer products, then min
    times the sum of x, each with one fused multiply-add.
    """
    numbers, x_scales = rounded(x.flatten(0, -2) if x.ndim > 1 else x[None])
    count, group = numbers.shape[1] * WIDTH // weights.numbers.shape[2], weights.numbers.shape[2]
    rows, of_x = weights.numbers.numel() // (count * group), numbers.view(len(numbers), count, group)
    integers, scales = weights.numbers.reshape(rows, count, group), weights.scales.reshape(rows, count)
    mins = scales * -weights.offset if weights.mins is None else weights.mins.reshape(rows, count)
    total = x.new_zeros(len(numbers), rows, dtype=torch.float32)
    for n in range(count):
        scale = x_scales[:, n * group // WIDTH, None]
        products = (
            of_x[:, n].double() @ integers[:, n].double().T
        ).float()  # a sum of integers: exact until it is rounded
        if weights.mins is None and not weights.offset:
            total = fused(products, scales[:, n] * scale, total)
            continue
        total = fused(products, scales[:, n] * scale, total)
        total = fused(mins[:, n].expand_as(total), scale * of_x[:, n].sum(-1, keepdim=True).float(), total)
    return total.view(*x.shape[:-1], rows)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, C] float32 as integers [B, C / 32, 32], -127 to 127, and scales [B, C / 32]: the largest magnitude of
    each 32 columns becomes 127, and halves are rounded to even."""
    parts = F.pad(x, (0, -x.shape[1] % WIDTH)).view(len(x), -1, WIDTH)
    largest = parts.abs().amax(-1)
    largest = torch.where(largest < LEAST, 0.0, largest)
    inverse = torch.where(largest == 0, 0.0, 127 / largest)
    exact = parts.double() * inverse.double()[..., None]
    return exact.round().to(torch.int64), largest / 127


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once.

    In float64 the product is exact; the sum is rounded to odd, so that rounding it to float32 gives the exact result.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    is_even = (total.view(torch.int64) & 1) == 0
    beside = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf))
    return torch.where((error != 0) & is_even, beside, total).float()


def _check() -> None:
    """Compare with torch.  Raises AssertionError if results differ."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(3, 512, generator=noise)
    for kind in blocks.BLOCKS:
        raw = example(kind, 40, 512, noise)
        panels = in_panels(kind, raw)
        plain = blocks.dequantized(kind, raw, 512)
        output = torch.ops.outrider.quantized(x, panels, NUMBERS[kind], 40, 0)
        torch.testing.assert_close(output, F.linear(x, plain), rtol=1e-4, atol=1e-4)
        assert torch.equal(torch.ops.outrider.quantized_rows(torch.arange(40), panels, NUMBERS[kind], 512), plain)
        if kind not in blocks.PLAIN:
            expected = product_in_integers(x, blocks.parts(kind, raw))
            assert torch.equal(torch.ops.outrider.quantized(x, panels, NUMBERS[kind], 40, 1), expected)


def example(kind: str, rows: int, columns: int, noise: torch.Generator) -> Tensor:
    """Blocks [rows, bytes] of random weights around 1."""
    if kind in blocks.PLAIN:
        return torch.randn(rows, columns, generator=noise).to(blocks.PLAIN[kind]).view(torch.uint8)
    size = blocks.BLOCKS[kind].bytes
    raw = torch.randint(256, (rows * columns // blocks.BLOCKS[kind].values, size), dtype=torch.uint8, generator=noise)
    for at in HALVES[kind]:
        scales = (torch.rand(len(raw), 1, generator=noise) + 0.5) / SPREAD[kind]
        raw[:, at : at + 2] = scales.half().view(torch.uint8)
    if kind == "MXFP4":  # exponents of scales
        raw[:, 0] = raw[:, 0] % 4 + 124
    return raw.view(rows, -1)


@functools.cache
def is_fast() -> bool:
    """Whether the kernel is available and agrees with `product_in_integers` and with torch."""
    if kernels.library() is None:
        return False
    try:
        _check()  # only a few rows, so fast
    except (AssertionError, RuntimeError) as error:
        log.info("every product dequantises quantised weights: %s", first_line(error))
        return False
    return True
