"""What plants faults, known and random, still finds its places."""

import ast
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_every_known_fault_can_be_planted(scripts: None) -> None:
    """Catches a fault whose text has changed, which would protect nothing, and one that is listed twice."""
    from faults import changes
    from known_faults import FAULTS
    from planting import sources

    assert len({fault.name for fault in FAULTS}) == len({fault.edits for fault in FAULTS}) == len(FAULTS) >= 90
    files = sources(ROOT)
    packages = {change.path.parts[1] for fault in FAULTS for change in changes(fault, files)}
    assert packages >= {path.name for path in (ROOT / "outrider").iterdir() if (path / "__init__.py").exists()} - {
        "demo", "kernels",
    }  # fmt: skip


def test_mutants_follow_from_the_seed_and_change_one_place(scripts: None, tmp_path: Path) -> None:
    """Catches a sample that nobody can repeat, and a mutant that is not Python or is the text as it was."""
    from mutants import apply, sample

    for package in ("decoding", "gate"):
        shutil.copytree(ROOT / "outrider" / package, tmp_path / "outrider" / package)
    mutants = sample(tmp_path, 3, 40)
    assert mutants == sample(tmp_path, 3, 40) != sample(tmp_path, 4, 40)
    for mutant in mutants:
        text = (ROOT / mutant.path).read_text()
        assert ast.dump(ast.parse(apply(text, mutant))) != ast.dump(ast.parse(text))
    assert {mutant.path.parts[1] for mutant in mutants} == {"decoding", "gate"}
