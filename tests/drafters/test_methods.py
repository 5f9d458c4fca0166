"""A drafter says about itself what plans, exports and engines must know, and nobody else names it."""

import ast
import sys
from pathlib import Path

import pytest

from outrider import drafters
from outrider.drafters import find, kinds, method, own
from outrider.engines import engine
from outrider.errors import ConfigError
from outrider.formats.keys import layers, length
from outrider.method import Method
from outrider.plan.paper.drafts import default_methods, kinds_on_paper

ROOT = Path(drafters.__file__).resolve().parent.parent
NAMED_NOWHERE = ("plan", "export", "engines")
"""Packages that know no kind by its name."""
APART = {f"engines/verify/{name}.py" for name in ("readers", "gguf_reader", "chains", "causes")}
"""What reads and drafts exported folders a second time, without our exporter."""
FORMATS = {"eagle", "medusa"}
"""Formats that are named like the method they are of."""
THEIRS = """
from typing import Literal

import torch  # a file that is read, and not imported, costs no torch

from outrider.config import Config as Base
from outrider.method import Method

METHOD = Method(
    cost="once", usual=9, tokens=6, length="block", engines={"vllm": {"name": "theirs", "formats": ("speculators",)}},
    instead={"sglang": "use vllm"}, layers={"speculators": ("their_layers", 0)},
)


class Config(Base):
    kind: Literal["theirs"] = "theirs"


def build(config, target): ...
"""


@pytest.mark.parametrize("kind", own())
def test_what_is_read_is_what_the_file_says(kind: str) -> None:
    """Catches a METHOD that is not of only literals, or is read from another file."""
    assert method(kind) == vars(find(kind)).get("METHOD", Method())


def test_no_package_names_a_kind() -> None:
    """Catches a list of kinds that a new method would have to be added to."""
    names = {*kinds()}
    for package in NAMED_NOWHERE:
        for file in sorted((ROOT / package).rglob("*.py")):
            texts = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
            found = {text for text in texts if isinstance(text, str)} & names - FORMATS
            assert not found or file.relative_to(ROOT).as_posix() in APART, (file, found)


def test_a_method_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a plan, a command or a folder's reader that a new method does not reach."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    assert default_methods()[-1] == "theirs" and "theirs" in kinds_on_paper()
    engines = engine._engines()
    assert engines["vllm"].methods["theirs"].formats == ("speculators",)
    assert engines["triton"].methods["theirs"].name == "theirs"
    assert engines["sglang"].instead["theirs"] == "use vllm"
    assert layers(method("theirs"), "speculators", {"their_layers": [2, 5]}) == (2, 5)
    assert length(method("theirs"), "speculators", {"block": 6}, {}) == 6
    assert "theirs" not in sys.modules and "outrider.drafters.theirs" not in sys.modules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("METHOD = Method(tokens=three)", "METHOD of .*wrong can't be read .*only literals"),
        ("METHOD = Method(tokns=3)", "METHOD of .*wrong is not valid: .*tokns"),
        ("def (", "can't be read .SyntaxError"),
    ],
)  # fmt: skip
def test_what_another_wrote_wrongly_is_said_and_stops_nobody(text, said, tmp_path, monkeypatch, caplog):
    """Catches a deployment of any method that fails by a file of somebody else's."""
    (tmp_path / "wrong.py").write_text(text)
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    with pytest.raises(ConfigError, match=said):
        method("wrong")
    assert "ngram" in drafters.methods() and "wrong" not in drafters.methods()
