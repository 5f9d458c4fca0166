from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import folder, talker, write_run_file

__all__ = ["folder", "talker"]


@pytest.fixture
def written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the tiny run file, with these sections, into the test's own folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return lambda **sections: write_run_file(tmp_path / "tiny.yaml", folder, **sections)
