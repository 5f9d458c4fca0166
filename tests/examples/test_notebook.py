"""The notebook runs from its first cell to its last, and is committed without what it printed."""

import json
import re
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parent.parent.parent / "examples" / "outrider.ipynb"
CELLS = json.loads(FILE.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_holds_no_outputs() -> None:
    """Catches figures of somebody's machine, which nobody could measure again."""
    for cell in CELLS:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell["id"]
    for source in CODE:
        compile(source, FILE.name, "exec")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a cell that needs what no cell before it has made, and a drafter that learnt nothing in its minute."""
    monkeypatch.chdir(tmp_path)  # the notebook leaves it for a folder of its own
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, object] = {"__name__": "notebook"}
    for source in CODE:
        exec(compile(source, FILE.name, "exec"), names)
    out = capsys.readouterr().out
    [passes] = re.findall(r"(\d+) passes alone, (\d+) with n-grams, (\d+) with the trained drafter", out)
    alone, _, trained = map(int, passes)
    assert trained < alone
    assert out.count("exact: True") == 2
