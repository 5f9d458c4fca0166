"""Kernels that come in the wheel: the right one is chosen, it loads without a compiler, and arm64 computes the same."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_quantized_products import NARROW, SOURCE, examples, product
from torch import Tensor

from outrider.kernels import blocks, prebuilt, quantized

ROOT = Path(__file__).resolve().parent.parent
SERVER = "avx avx2 bmi1 bmi2 f16c fma movbe avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(("machine", "flags", "names"), [
    ("x86_64", "avx avx2 bmi1 bmi2 f16c fma movbe", ["avx2"]),
    ("x86_64", "avx avx2 bmi1 bmi2 f16c fma movbe avx_vnni", ["avx2-vnni", "avx2"]),
    ("x86_64", SERVER, ["avx512", "avx2"]), ("x86_64", f"{SERVER} avx512_vnni", ["avx512-vnni", "avx512", "avx2"]),
    ("x86_64", "sse2 avx", []), ("aarch64", "fp asimd asimddp", ["dotprod", "neon"]), ("riscv64", SERVER, []),
])  # fmt: skip
def test_a_processor_gets_the_best_it_can_run(machine: str, flags: str, names: list[str]) -> None:
    """Catches an instruction that a processor does not have, which ends the process."""
    assert prebuilt.fitting(machine, flags) == names


def test_other_sources_take_no_old_library() -> None:
    """Catches a library of older sources, whose products would be another function's."""
    assert prebuilt.path_of("avx2", b"new") != prebuilt.path_of("avx2", b"old")
    assert prebuilt.path(b"neither") is None


CHECK = """
from outrider import kernels
from outrider.kernels import prebuilt, quantized
assert kernels.compiler() is None and kernels._built().is_relative_to(prebuilt.FOLDER)
assert kernels.library() is not None and quantized.is_fast()
"""


@pytest.mark.slow
def test_it_is_used_without_a_compiler(tmp_path: Path) -> None:
    """Catches a library that needs one to be loaded, or that fails its own checks; `scripts/prebuild.py` makes it."""
    from outrider import kernels

    if prebuilt.path(kernels.source()) is None:
        pytest.skip("scripts/prebuild.py has not run since the sources changed")
    alone = {"PATH": str(tmp_path), "OUTRIDER_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", CHECK], env={**os.environ, **alone, "CXX": "none"}, check=True)


DRIVER = r"""
#include <cstdint>
#include <cstdio>
#include <vector>
extern "C" void outrider_pack(int64_t, const void*, int64_t, int64_t, void*);
extern "C" void outrider_product(int64_t, bool, const float*, int64_t, int64_t, const void*, float*, int64_t);
int main() {  // of each case: kind, in integers, rows, columns, outputs, blocks of a row, bytes of blocks and of panels
  int64_t n[8];
  while (std::fread(n, sizeof n, 1, stdin) == 1) {
    std::vector<char> raw(n[6]), panels(n[7]);
    std::vector<float> x(n[2] * n[3]), y(n[2] * n[4]);
    if (std::fread(raw.data(), 1, raw.size(), stdin) != raw.size()) return 1;
    if (std::fread(x.data(), 4, x.size(), stdin) != x.size()) return 1;
    outrider_pack(n[0], raw.data(), n[4], n[5], panels.data());
    outrider_product(n[0], n[1], x.data(), n[2], n[3], panels.data(), y.data(), n[4]);
    std::fwrite(y.data(), 4, y.size(), stdout);
  }
}
"""
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


def case_of(kind: str, x: Tensor, in_integers: bool) -> bytes:
    """The input of one product with 40 rows of weights."""
    columns, size = x.shape[1], blocks.BLOCKS[kind].bytes * (quantized.WIDTH if kind in blocks.PLAIN else 1)
    raw = examples(kind, 40, columns)
    raw = F.pad(raw, (0, -raw.shape[1] % size)).contiguous()
    panels = quantized.in_panels(kind, examples(kind, 40, columns)).nbytes
    numbers = (quantized.NUMBERS[kind], in_integers, *x.shape, 40, raw.shape[1] // size, raw.nbytes, panels)
    return struct.pack("<8q", *numbers) + raw.numpy().tobytes() + x.contiguous().numpy().tobytes()


@pytest.mark.slow
@pytest.mark.skipif(not (CROSS and EMULATOR), reason="apt-get install g++-aarch64-linux-gnu qemu-user")
@pytest.mark.parametrize("name", ["neon", "dotprod"])
def test_arm64_computes_the_same(name: str, tmp_path: Path) -> None:
    """Catches a text that depends on the processor: products of every type, bit for bit, in an emulator."""
    (tmp_path / "driver.cpp").write_text(DRIVER)
    include = Path(torch.__file__).parent / "include"
    flags = ["-O1", "-std=c++17", "-static", "-DOUTRIDER_UNREGISTERED", "-Wl,--unresolved-symbols=ignore-all"]
    program = [str(CROSS), *flags, *prebuilt.VARIANTS[name].flags, f"-I{include}", str(SOURCE)]
    subprocess.run([*program, str(tmp_path / "driver.cpp"), "-o", str(tmp_path / "driver")], check=True)
    torch.manual_seed(1)
    cases = [(kind, torch.randn(5, NARROW[kind]), one) for kind in blocks.BLOCKS for one in (False, True)]
    sent = b"".join(case_of(*case) for case in cases)
    done = subprocess.run([str(EMULATOR), "-cpu", "max", str(tmp_path / "driver")], input=sent, capture_output=True)
    results = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(-1, 5, 40)
    assert len(results) == len(cases), done.stderr
    differing = {
        kind for (kind, x, one), y in zip(cases, results, strict=True)
        if not torch.equal(y, product(kind, examples(kind, 40, x.shape[1]), x, one))
    }  # fmt: skip
    assert not differing
