"""The whole subject in a hundred lines: it runs, and notices what would make it inexact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "speculative_decoding.py"
FAULTS = {
    "nothing is subtracted for a rejected sibling": ("(r - q[child]).clamp(min=0)", "r"),
    "a sibling's q is not renormalised": ("nn.functional.normalize(left.index_fill(0, torch.tensor(token), 0.0), p=1, dim=0)", "left"),
    "the last token ignores what was rejected": ("[int(r.multinomial(1))]", "[int(p[node + 1].multinomial(1))]"),
    "rejected tokens stay in the cache": ("for node in path)]\n", "for node in range(len(tokens)))]\n"),
}  # fmt: skip


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False)


def test_what_it_writes_is_distributed_as_the_target() -> None:
    """The seed is fixed: no false alarms."""
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 100
    assert "outrider" not in source
    found = run(source)
    assert found.returncode == 0, found.stderr
    assert "1.7" in found.stdout  # tokens per pass


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_it_notices(fault: str) -> None:
    """Catches a check that could not fail: each fault moves the distribution by 0.15, chance by 0.035."""
    right, wrong = FAULTS[fault]
    source = EXAMPLE.read_text()
    assert source.count(right) == 1
    found = run(source.replace(right, wrong))
    assert "not distributed as the target's own" in found.stderr
