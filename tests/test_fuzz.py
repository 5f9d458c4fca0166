"""A few of the nightly fuzzer's cases for every reader: `benchmarks/fuzz.py` has the others."""

import os
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.fuzz import damage, replaced, tried
from benchmarks.fuzz_readers import READERS

CASES = 12


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """Catches a traceback, a process that ends and a read that never does: for damaged files by --seed, and for a pipe,
    a device and a folder in place of each file."""
    reader = READERS[name]
    (tmp_path / "whole").mkdir()
    reader.make(tmp_path / "whole")
    reader.read(tmp_path / "whole")
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file())

    def outcome(number: int, path: Path, kind: str | None) -> str:
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        place = tmp_path / "damaged" / path
        if kind is None:
            damage(place, random.Random(f"{os.environ['OUTRIDER_TEST_SEED']} {number}"))
        else:
            replaced(place, kind)
        return tried(reader.read, tmp_path / "damaged", 30)

    cases = [(n, files[n % len(files)], None) for n in range(CASES)]
    cases += [(0, path, kind) for path in files for kind in ("pipe", "device", "folder")]
    failures = {case: found for case in cases if (found := outcome(*case)) not in ("read", "refused")}
    assert not failures
