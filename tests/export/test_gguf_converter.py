"""The comparison with llama.cpp's converter: what it lets pass and what not.  The converter itself is not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_targets import Made, make_target, rewritten

from benchmarks.engines.gguf_converter import compared

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(make_target(tmp_path_factory.mktemp("target")), tmp_path_factory.mktemp("made"))


def swapped(found: dict[str, Any]) -> None:
    found["markov_w1.weight"], found["markov_w2.weight"] = found["markov_w2.weight"], found["markov_w1.weight"]


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any], set[str]]] = {
    "taps one off": (lambda found: None, {"dflash__target_layers": [0, 2]}, {"dflash.target_layers"}),
    "the Markov head transposed": (swapped, {}, {"markov_w1.weight", "markov_w2.weight"}),
    "a norm left out": (lambda found: found.pop("enc.output_norm.weight"), {}, {"enc.output_norm.weight"}),
    "a head too many": (lambda found: found.update({"extra.weight": found["fc.weight"]}), {}, {"extra.weight"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_a_difference_without_a_reason(fault: str, made: Made, tmp_path: Path) -> None:
    """Catches a list of reasons so wide that a fault passes for one."""
    tensors, keys, names = FAULTS[fault]
    theirs = rewritten(made.file("dspark"), tmp_path / "theirs.gguf")
    assert compared(made.file("dspark"), theirs, "dspark")["unexplained"] == []
    wrong = rewritten(made.file("dspark"), tmp_path / "wrong.gguf", tensors, **keys)
    for ours, other in ((wrong, theirs), (theirs, wrong)):
        assert {one["name"] for one in compared(ours, other, "dspark")["unexplained"]} == names


def test_a_zero_markov_head_is_a_dflashs_alone(made: Made, tmp_path: Path) -> None:
    """Catches a DSpark whose head was lost and passes as a DFlash with a reason."""

    def headless(found: dict[str, Any]) -> None:
        del found["markov_w1.weight"], found["markov_w2.weight"]

    dflash, dspark = made.file("dflash, in the anchor's slot"), made.file("dspark")
    theirs = rewritten(dflash, tmp_path / "theirs.gguf", headless)
    found = compared(dflash, theirs, "dflash")
    assert found["unexplained"] == [] and {"markov_w1.weight", "markov_w2.weight"} <= {
        one["name"] for one in found["on_purpose"]
    }
    lost = rewritten(dspark, tmp_path / "lost.gguf", headless)
    assert len(compared(lost, dspark, "dspark")["unexplained"]) == 2
    assert len(compared(dspark, lost, "dspark")["unexplained"]) == 2
