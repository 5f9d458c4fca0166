#!/usr/bin/env python3
"""Install OpenVINO GenAI, pinned, in an environment of its own.

    python benchmarks/engines/install_openvino.py [--at FOLDER]

Exit code 0: it is there and can be imported; 3: it can't be had on this machine, and why stands on standard error, so
that a benchmark may skip; 1: something went wrong.  0.3 GB on disk, seconds.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

AT = Path(__file__).resolve().parent / ".venv-openvino"
"""Where it is looked for; git ignores this one."""
VERSION = "2026.4.1.0"
PINS = (f"openvino-genai=={VERSION}", f"openvino-tokenizers=={VERSION}", "openvino==2026.4.1", "numpy==2.4.6")
CANNOT = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=Path, default=AT, help="folder of the environment")
    place = parser.parse_args().at
    if not installed(place):
        if reason := cannot():
            print(f"skipped: {reason}", file=sys.stderr)
            return CANNOT
        try:
            install(place)
        except subprocess.CalledProcessError as error:
            print(f"failed: {' '.join(map(str, error.cmd))} ended with {error.returncode}", file=sys.stderr)
            return 1
    version = installed(place)
    print(f"openvino-genai {version} is in {place}" if version else "failed: it was installed and can't be imported")
    return int(version is None)


def cannot() -> str | None:
    """Why it can't be had here; None where nothing speaks against it."""
    if sys.version_info[:2] != (3, 11):
        return f"tried with Python 3.11 only; this is {platform.python_version()}: python3.11 {Path(__file__).name}"
    return None


def install(place: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, *PINS], check=True)


def installed(place: Path) -> str | None:
    """The version that is there and can be imported."""
    python = place / "bin" / "python"
    if not python.exists():
        return None
    code = "import openvino_genai; print(openvino_genai.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(main())
