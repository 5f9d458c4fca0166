#!/usr/bin/env python3
"""Build llama.cpp's server from the source that llama-cpp-python carries on PyPI, pinned.

    python benchmarks/engines/build_llama.py [--at FOLDER] [--jobs 1]

Prints the place of `llama-server`.  Exit code 0: it is there and runs; 3: it can't be built on this machine, and why
stands on standard error, so that a benchmark may skip; 1: something went wrong.  About 77 MB to download, 0.4 GB on
disk, 5 minutes on two idle cores and several times as long on busy ones; a build that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
COMMIT = "0c1e570"
"""Of llama.cpp, as the package carries it."""
TOOLS = ("cmake", "ninja", "g++")
OFF = ("TESTS", "EXAMPLES", "APP", "UI")
FREE_GB = 1
CANNOT = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--at", type=Path, default=HERE / "build", help="folder of source and build; git ignores this one"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    wanted = parser.parse_args()
    if version := built(wanted.at):
        print(f"llama.cpp {version} is in {server(wanted.at)}")
        return 0
    if reason := cannot(wanted.at):
        print(f"skipped: {reason}", file=sys.stderr)
        return CANNOT
    print(
        f"building llama-server of {PACKAGE} {VERSION} in {wanted.at}: 77 MB to download, 5 minutes or more", flush=True
    )
    try:
        build(wanted.at, wanted.jobs)
    except subprocess.CalledProcessError as error:
        print(
            f"failed: {' '.join(map(str, error.cmd))} ended with {error.returncode}; run it again to go on",
            file=sys.stderr,
        )
        return 1
    version = built(wanted.at)
    if not version:
        print(f"failed: {server(wanted.at)} was built and does not run", file=sys.stderr)
        return 1
    print(f"llama.cpp {version} is in {server(wanted.at)}")
    return 0


def server(place: Path = HERE / "build") -> Path:
    """Where the server is once it is built."""
    return place / "build" / "bin" / "llama-server"


def cannot(place: Path) -> str | None:
    """Why it can't be built here; None where nothing speaks against it."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is missing: apt-get install cmake ninja-build g++"
    above = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    free = shutil.disk_usage(above).free / 1e9
    return f"{free:.1f} GB free beside {place}; wanted {FREE_GB}" if free < FREE_GB else None


def build(place: Path, jobs: int) -> None:
    """Download, unpack, configure, compile; each once."""
    place.mkdir(parents=True, exist_ok=True)
    folder = place / f"llama_cpp_python-{VERSION}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        subprocess.run([*pip, "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}", "-d", place], check=True)
        with tarfile.open(place / f"{folder.name}.tar.gz") as archive:
            archive.extractall(place / "part", filter="data")
        (place / "part" / folder.name).rename(folder)
        (place / "part").rmdir()
    options = [f"-DLLAMA_BUILD_{part}=OFF" for part in OFF] + ["-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"]
    source = folder / "vendor" / "llama.cpp"
    cmake = ["cmake", "-S", source, "-B", place / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options]
    subprocess.run(cmake, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", place / "build", "-j", str(jobs), "llama-server"], check=True)


def built(place: Path) -> str | None:
    """The version of the server that is there and runs."""
    if not server(place).exists():
        return None
    done = subprocess.run([server(place), "--version"], capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")]
    return said[0].removeprefix("version:").strip() if done.returncode == 0 and said else None


if __name__ == "__main__":
    raise SystemExit(main())
