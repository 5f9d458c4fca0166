"""The GPU's benchmark, rehearsed on a CPU: a row that hangs or crashes costs only itself."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from benchmarks import gpu


def measured(tmp_path, rows: str, device: str = "cpu") -> tuple[int, dict]:
    options = Namespace(rows=rows, device=device, small=True, seconds=100, out=tmp_path / "gpu.json")
    code = gpu.run_all(options)
    return code, json.loads(options.out.read_text())["rows"]


def test_a_row_that_hangs_costs_only_itself(tmp_path, monkeypatch):
    """Catches a benchmark that ends with its first row that is stopped, or without a word of it."""
    monkeypatch.setitem(gpu.LIMITS, "machine", 0.1)
    code, rows = measured(tmp_path, "machine,attention")
    assert code == 1
    assert rows["machine"]["error"].startswith("stopped after 0 s")
    assert "error" not in rows["attention"]
    assert {"repeated", "grouped, cudnn", "two products", "gqa flag, cudnn"} <= rows["attention"]["points"][0].keys()


def test_a_row_that_crashes_says_why(tmp_path):
    """Catches figures that are missing without an error."""
    code, rows = measured(tmp_path, "machine", device="nonsense")
    assert code == 1
    assert "nonsense" in rows["machine"]["error"]


def test_acceptance_is_rehearsed_by_the_interpreter(tmp_path):
    """Catches a row that compares nothing, and kernels that accept otherwise than the rule."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    _, rows = measured(tmp_path, "acceptance")
    points = rows["acceptance"]["points"]
    assert {point["way"] for point in points} == {"greedy", "chain", "tree", "without q", "draw"}
    assert all(point["same"] == 1.0 and point["kernels_ms"] > 0 for point in points)
