"""docs/architecture.md names the files that a prompt, a training example and a served request really pass."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import ways

OF_THE_MACHINE = ("kernels/", "machine/", "targets/cache/lazy_memory.py", "storage/trusted.py", "hub.py")
"""What a machine without a C++ compiler, another system, or a process that has read its caches passes by."""


@pytest.mark.parametrize("name", ways.WAYS)
def test_the_page_lists_what_is_passed(name: str) -> None:
    """Catches a page that says where a prompt went before a change."""
    page, there = ways.listed(ways.PAGE.read_text(encoding="utf-8"), name), ways.way(name)
    differ = {file for file in {*page} ^ {*there} if not file.startswith(OF_THE_MACHINE)}
    assert not differ, "run `python scripts/ways.py`"
    assert len(there) >= 20 and there[0] == {"prompt": "generation.py"}.get(name, there[0])


def test_a_file_that_is_not_passed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trace that lists every file that was imported."""
    there = ways.way("prompt")
    assert (
        "drafters/ngram.py" in there
        and "drafters/dspark/__init__.py" not in there
        and "training/trainer.py" not in there
    )
