"""Kernels that come compiled in the wheel, for machines without a C++ compiler.

The libraries have a C interface and use torch's (`aoti_torch_...`), so one file serves every Python and torch that
Outrider supports.  A file's name contains a hash of the sources: after a change there is none until
`scripts/prebuild.py` has run again.  Which code paths are compiled depends only on these instruction sets, so
a machine that has one of the files gains nothing by compiling.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from outrider import machine

FOLDER = Path(__file__).parent / "prebuilt"
V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Variant(NamedTuple):
    """A library for processors with certain instruction sets."""

    machine: str
    flags: tuple[str, ...]
    """Of the compiler."""
    requires: frozenset[str]
    """The processor's flags, as Linux names them."""


VARIANTS = {
    "avx512-vnni": Variant("x86_64", ("-march=x86-64-v4", "-mavx512vnni"), V4 | {"avx512_vnni"}),
    "avx512": Variant("x86_64", ("-march=x86-64-v4",), V4),
    "avx2-vnni": Variant("x86_64", ("-march=x86-64-v3", "-mavxvnni"), V3 | {"avx_vnni"}),
    "avx2": Variant("x86_64", ("-march=x86-64-v3",), V3),
    "dotprod": Variant("aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
    "neon": Variant("aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
}
"""Best first, for each machine."""


def path_of(name: str, source: bytes) -> Path:
    """The file of a variant of these sources."""
    return FOLDER / VARIANTS[name].machine / f"{name}-{hashlib.sha256(source).hexdigest()[:16]}.so"


def fitting(machine_type: str, flags: str) -> list[str]:
    """The variants for a processor with these flags, best first."""
    there = frozenset(flags.split())
    return [name for name, one in VARIANTS.items() if one.machine == machine_type and one.requires <= there]


def path(source: bytes) -> Path | None:
    """The best library of these sources for this processor; None if there is none."""
    if platform.system() != "Linux":
        return None
    files = [path_of(name, source) for name in fitting(platform.machine(), machine.cpu_flags())]
    return next((file for file in files if file.exists()), None)


def load_openmp() -> None:
    """Make torch's OpenMP visible to the libraries, which don't link one: torch's wheels rename theirs."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", ctypes.RTLD_GLOBAL)
