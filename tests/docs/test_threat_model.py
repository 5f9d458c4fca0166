"""The threat model names tests that are there, and its unit for systemd is as tight as it says."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()


def test_the_tests_and_files_that_it_names_are_there() -> None:
    """Catches a promise whose test was renamed or deleted."""
    assert len(named := set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))) >= 5
    assert not [path for path in named if not (ROOT / path).exists()]
    assert all((ROOT / "outrider" / path).exists() for path in re.findall(r"`(targets/[\w/]+\.py)`", PAGE))


def test_the_unit_for_systemd_is_tight(tmp_path: Path) -> None:
    """Catches a line that systemd does not know, and one that opens what was closed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "outrider.service"
    unit.write_text(re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)[0])
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    assert "Unknown" not in done.stderr
