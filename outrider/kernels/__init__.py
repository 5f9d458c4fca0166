"""C++ kernels for the few rows of a decoding step on a CPU, shipped in the wheel or compiled once per machine.

`multiply` and `gated` for weights in panels (see `kernels.prepacked`), `attend`, and `race`, which samples tokens, are
torch operators; compiled packages call them by their C names.  The acceptance rule (see `cpu_acceptance`) is called
with pointers.  The kernels use the compiler's vector types; its flags determine their width.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider import machine
from outrider.decoding import noise
from outrider.errors import first_line
from outrider.kernels import prebuilt
from outrider.kernels.pages import LargePages
from outrider.storage import cache, trusted

log = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
NATIVE: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-mcpu=native", "-fopenmp"], ["-march=native"], [])
"""Flags that not every compiler knows, best first; without OpenMP the kernels are single-threaded."""
TENSOR = "AtenTensorHandle"
SHIMS = {
    "multiply": f"AOTITorchError aoti_torch_cpu_multiply({TENSOR}, {TENSOR}, int64_t, {TENSOR}*)",
    "gated": f"AOTITorchError aoti_torch_cpu_gated({TENSOR}, {TENSOR}, int64_t, {TENSOR}*)",
    "quantized": f"AOTITorchError aoti_torch_cpu_quantized({TENSOR}, {TENSOR}, int64_t, int64_t, int64_t, {TENSOR}*)",
    "quantized_rows": f"AOTITorchError aoti_torch_cpu_quantized_rows({TENSOR}, {TENSOR}, int64_t, int64_t, {TENSOR}*)",
    "attend": f"AOTITorchError aoti_torch_cpu_attend({TENSOR}, {TENSOR}, {TENSOR}, {TENSOR}, double, {TENSOR}*)",
}
"""C declarations with which compiled packages call the operators, bypassing torch's dispatcher."""
C_TYPES = {"b": ctypes.c_bool, "n": ctypes.c_int64, "p": ctypes.c_void_p}
CALLED = {"accept": "bppnnnpppppppp", "sample": "bpnnpppp", "pack": "npnnp"}
"""Functions called with numbers and pointers to tensors, and the types of their arguments."""
TIMEOUT_S = 600


def source() -> bytes:
    """The source text of all kernels."""
    return b"".join(path.read_bytes() for path in [*SOURCES, *sorted(Path(__file__).parent.glob("*.h"))])


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, also as operators `outrider::...`; compiled on first use, None if they can't be compiled."""
    try:
        loaded = _loaded(_built())
        _check()
        noise.on_cpu = race
    except (OSError, RuntimeError, AssertionError) as error:
        log.info("kernels are not used: %s", first_line(error))
        return None
    return loaded


def _check() -> None:
    """Compare with torch.  Raises AssertionError if results differ."""
    x, weight, up = torch.randn(3, 40), torch.rand(50, 40), torch.rand(50, 40)
    torch.testing.assert_close(torch.ops.outrider.multiply(x, panels(weight), 50), F.linear(x, weight))
    gated = torch.ops.outrider.gated(x, torch.cat([panels(weight), panels(up)]), 50)
    torch.testing.assert_close(gated, F.silu(F.linear(x, weight)) * F.linear(x, up))
    q, k, v = torch.rand(1, 2, 3, 64), torch.rand(1, 1, 40, 64), torch.rand(1, 1, 40, 64)
    mask = torch.zeros(1, 1, 3, 40).masked_fill(torch.rand(1, 1, 3, 40) < 0.2, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(torch.ops.outrider.attend(q, k, v, mask, 0.125), expected)
    weights, keys, tokens = torch.randn(4, 301).softmax(-1), torch.arange(4) + 5, torch.arange(301)
    torch.testing.assert_close(race(weights, keys), noise.race(weights, keys, tokens))


@functools.cache
def _loaded(path: Path) -> ctypes.CDLL:
    if path.is_relative_to(prebuilt.FOLDER):
        prebuilt.load_openmp()
    # RTLD_GLOBAL: compiled packages look up the kernels by name
    loaded = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    loaded.outrider_digest.restype = ctypes.c_uint64
    for name, types in CALLED.items():
        function = getattr(loaded, f"outrider_{name}")
        function.argtypes, function.restype = [C_TYPES[each] for each in types], None
    for name in ("multiply", "gated"):
        torch.library.register_fake(f"outrider::{name}")(lambda x, _w, outputs: x.new_empty(*x.shape[:-1], outputs))
    torch.library.register_fake("outrider::quantized")(
        lambda x, _w, _k, outputs, _i: x.new_empty(*x.shape[:-1], outputs)
    )
    torch.library.register_fake("outrider::quantized_rows")(_looked_up)
    torch.library.register_fake("outrider::attend")(_attended)
    torch.library.register_fake("outrider::race")(lambda _weights, keys: torch.empty_like(keys))
    return loaded


def call(name: str, *arguments: int | bool | None) -> None:
    """Call one of `CALLED`; the caller keeps the tensors alive."""
    getattr(_loaded(_built()), f"outrider_{name}")(*arguments)


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """`noise.race` of weights [..., V] on the CPU and keys that broadcast to [...]."""
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.float()
    weights, keys = weights.contiguous(), keys.expand(weights.shape[:-1]).contiguous()
    tokens: Tensor = torch.ops.outrider.race(weights, keys)
    return tokens


def panel_width() -> int:
    """The number of outputs in a panel."""
    width: int = _loaded(_built()).outrider_panel()
    return width


def panels(weight: Tensor, pages: LargePages | None = None) -> Tensor:
    """The weight [outputs, inner] as `multiply` reads it: [panels, inner, words] int32, with each panel's outputs
    contiguous.

    A word is a float32, or two bfloat16 if every value is exactly representable as bfloat16; the panel's first half is
    in the lower bits.  pages: where to store it; by default, new pages.
    """
    width = panel_width()
    missing = -weight.shape[0] % width
    rounded = F.pad(weight, (0, 0, 0, missing)) if missing else weight.contiguous()  # a pad of 0 would make a copy
    bits = rounded.view(-1, width, weight.shape[1]).transpose(1, 2).view(torch.int32)
    if not bool((bits & 0xFFFF).any()):
        low, high = bits.split(width // 2, -1)
        bits = ((low >> 16) & 0xFFFF) | high
    return (pages or LargePages(bits.numel() * bits.itemsize)).stored(bits)


def _looked_up(ids: Tensor, _weights: Tensor, _kind: int, columns: int) -> Tensor:
    return ids.new_empty(*ids.shape, columns, dtype=torch.float32)


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    slots, heads, width, size = q.shape
    return q.new_empty(slots, width, heads, size).transpose(1, 2)


@functools.cache
def _built() -> Path:
    """The kernels for this machine, from the wheel or compiled.  Raises OSError if they can't be compiled."""
    if (ready := prebuilt.path(source())) is not None:
        return ready
    question = repr((torch.__version__, machine.cpu_name(), machine.cpu_flags(), source(), FLAGS, NATIVE))
    path = cache.folder() / "compiled" / f"kernels-{hashlib.sha256(question.encode()).hexdigest()[:16]}.so"
    torch_folder = Path(torch.__file__).parent
    arguments = [*map(str, SOURCES), f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
    return shared_library(path, [[*FLAGS, *native, *arguments] for native in NATIVE])


def shared_library(path: Path, commands: Iterable[Sequence[str]]) -> Path:
    """A library in the cache; if missing, it is compiled by the first of these argument lists that works.

    Raises OSError with the reason if it can't be compiled, or if another user could have written the file.
    """
    if path.exists():  # also allowed in a folder of an image, which belongs to root
        return trusted.own_file(path)
    trusted.private_folder(path.parent)
    tool = compiler()
    if tool is None:
        raise OSError("there is no C++ compiler; install g++")
    with cache.keeping(path) as part:
        for arguments in commands:
            try:
                made = subprocess.run([tool, *arguments, "-o", part], capture_output=True, text=True, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise OSError(f"{tool} took more than {TIMEOUT_S} s") from error
            if made.returncode == 0:
                break
        else:
            lines = made.stderr.splitlines() or ["it failed"]
            raise OSError(f"{tool} failed: {next((line for line in lines if 'error' in line), lines[0])}")
    return path
