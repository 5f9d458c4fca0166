"""Every fault that `scripts/faults.py` plants still has its place in the code, and the tests that must see it exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def faults() -> Any:
    spec = importlib.util.spec_from_file_location("faults", ROOT / "scripts" / "faults.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fault", faults().FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_still_be_planted(fault: Any) -> None:
    """Catches code that moved away from under a fault, which is then planted nowhere and found by nothing."""
    for edit in fault.edits:
        texts = [path.read_text(encoding="utf-8") for path in ROOT.glob(edit.path)]
        assert sum(text.count(edit.old) for text in texts) == 1, f"{edit.path} must have {edit.old!r} once"
    for test in fault.tests:
        file, *names = test.split("::")
        assert (ROOT / file).exists(), test
        if names:
            assert f"def {names[0].split('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test
