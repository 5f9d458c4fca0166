"""The whole subject in a hundred lines: it runs, and notices what would make it inexact."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "speculative_decoding.py"


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_what_it_writes_is_distributed_as_the_target() -> None:
    """The seed is fixed: no false alarms."""
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 100
    assert "outrider" not in source
    found = run(source)
    assert found.returncode == 0, found.stderr
    assert "1.7" in found.stdout  # tokens per pass


@pytest.mark.slow
def test_it_notices() -> None:
    """Catches a check that could not fail: nothing is subtracted for a rejected sibling, which moves the distribution
    by 0.15, chance by 0.035."""
    source, right = EXAMPLE.read_text(), "(r - q[child]).clamp(min=0)"
    assert source.count(right) == 1
    assert "not distributed as the target's own" in run(source.replace(right, "r")).stderr
