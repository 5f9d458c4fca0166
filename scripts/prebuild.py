"""Compile the kernels for every instruction set, as they come in the wheel: outrider/kernels/prebuilt.

    python scripts/prebuild.py [VARIANT ...]      # by default all that this machine's compilers can build

arm64 takes Debian's cross compiler (g++-aarch64-linux-gnu).  Any Python and any supported torch can load the files;
only torch's headers are needed here.  Exits with 1 if a file needs a newer glibc than the wheel's tag names.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from outrider import kernels
from outrider.kernels import prebuilt

ROOT = Path(__file__).resolve().parent.parent
GLIBC = (2, 29)
"""The newest that the tag of the wheel names: exp and log of C have been its since then."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variants", nargs="*", choices=[[], *prebuilt.VARIANTS], help="by default all")
    names = parser.parse_args().variants or [*prebuilt.VARIANTS]
    current = {prebuilt.path_of(name, kernels.source()) for name in prebuilt.VARIANTS}
    for stale in set(prebuilt.FOLDER.glob("*/*.so")) - current:
        stale.unlink()
    for name in names:
        tool = compiler(prebuilt.VARIANTS[name].machine)
        path = prebuilt.path_of(name, kernels.source())
        if tool is None:
            print(f"{name}: there is no compiler for {prebuilt.VARIANTS[name].machine} here, left out")
            continue
        if not path.exists():
            build(tool, prebuilt.VARIANTS[name].flags, path)
        if (needed := glibc(path)) > GLIBC:
            print(f"{path.name} needs glibc {needed}, and the wheel names {GLIBC}", file=sys.stderr)
            return 1
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} KB", flush=True)
    return 0


def compiler(machine: str) -> str | None:
    tools = [kernels.compiler()] if platform.machine() == machine else []
    return next(filter(None, [*tools, shutil.which(f"{machine}-linux-gnu-g++")]), None)


def build(tool: str, flags: tuple[str, ...], path: Path, optimise: str = "-O3") -> None:
    """Compile and link without naming OpenMP, which is torch's (see `prebuilt.load_openmp`)."""
    include = Path(torch.__file__).parent / "include"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in kernels.SOURCES:
            objects.append(Path(folder) / f"{source.stem}.o")
            command = [tool, *FLAGS, optimise, *flags, f"-I{include}", "-c", source, "-o", objects[-1]]
            subprocess.run(command, check=True)
        torch_cpu = Path(folder) / "libtorch_cpu.so"  # so that the file names it, also for another machine
        subprocess.run([tool, "-shared", "-Wl,-soname,libtorch_cpu.so", "-o", torch_cpu], check=True)
        linked = ["-Wl,--no-as-needed", f"-L{folder}", "-ltorch_cpu", "-Wl,-s"]
        part = path.with_suffix(".part")
        subprocess.run([tool, "-shared", *objects, *linked, "-o", part], check=True)
    part.replace(path)


def glibc(path: Path) -> tuple[int, int]:
    """The newest glibc that a library's symbols name."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())
    return max((int(major), int(minor)) for major, minor in found)


if __name__ == "__main__":
    sys.exit(main())
