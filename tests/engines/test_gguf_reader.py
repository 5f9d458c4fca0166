"""A draft as GGUF, read as llama.cpp reads it, drafts what our drafter drafts; and what is wrong with it is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_targets import make_target
from tiny import randomise

from benchmarks.engines.gguf_faults import FAULTS, planted
from outrider.checkpoint import load_model, save
from outrider.config import build
from outrider.decoding.protocols import Drafter
from outrider.drafters import find as find_drafter
from outrider.engines.verify import causes, chains, gguf_reader, parity, readers
from outrider.errors import ExportError
from outrider.export.writing import export_folder
from outrider.formats.gguf.layouts import FILE
from tests.engines.test_verify import BLOCK, DFLASH2, DSPARK, LAYER, PROMPTS, run, told

pytest.importorskip("gguf")

EAGLE3 = {**LAYER, "length": 3, "taps": [0, 1, 2]}
SETTINGS: dict[str, dict[str, Any]] = {
    "dflash": {"kind": "dflash", **BLOCK, "rope_theta": 1e5},
    "dflash, in the anchor's slot": {"kind": "dflash", **BLOCK, "anchor_predicts": True},
    "dspark": {"kind": "dspark", **DSPARK, "markov": "vanilla", "confidence": False},
    "dflash2": {"kind": "dflash2", **DFLASH2},
    "eagle3": {"kind": "eagle3", **EAGLE3, "rope_theta": 1e5, "vocabulary": 40},
    "eagle3, norm before the residual": {
        "kind": "eagle3", **EAGLE3, "norm_before_residual": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}  # fmt: skip
Made = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def made(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model with random weights, and its export."""
    place = tmp_path_factory.mktemp("exports")

    def exported(name: str) -> tuple[Any, Path]:
        checkpoint, folder = place / name, place / f"{name}-there"
        if not folder.exists():
            module = find_drafter(SETTINGS[name]["kind"])
            torch.manual_seed(0)
            model = module.Model(build(module.Config, SETTINGS[name], "drafter"), target).to(torch.float32)
            if getattr(model, "head", None) is not None and SETTINGS[name]["kind"] == "eagle3":
                model.begin(torch.randperm(target.spec.vocabulary, generator=torch.Generator().manual_seed(4)))
            save(checkpoint, randomise(model), {})
            export_folder(checkpoint, "gguf", folder, target, "f32")
        return load_model(checkpoint, target), folder

    return exported


@pytest.fixture(scope="module")
def texts(target: Any) -> list[tuple[chains.States, int]]:
    both = zip(PROMPTS, run(target, Drafter(), 0).tokens, strict=True)
    return [(chains.states(target, [*prompt, *text]), len(prompt)) for prompt, text in both]


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "dflash"])
def test_a_file_read_as_llama_cpp_reads_it_drafts_what_our_drafter_drafts(name, target, made, texts):
    """Catches taps, rows, pairs or a draft vocabulary written as another engine reads them, and a number that 32 bits
    round, taken for another one."""
    model, folder = made(name)
    drafter, said = told(model)
    length, side = parity.length_of(model), run(target, drafter, parity.length_of(model))
    read, checked = gguf_reader.of_file(folder / FILE), 0
    for row, prompt in enumerate(PROMPTS):
        seen = chains.states(target, [*prompt, *side.tokens[row]])
        for (slot, anchor), drafted in said.items():
            if slot == row and len(drafted) == length and anchor < len(seen.tokens):
                assert chains.drafted(read, seen, anchor, length).tokens == drafted
                checked += 1
    assert checked > 12
    own = readers.of_model(model)
    assert causes.causes(read, own, texts, length) == list(causes.differences(read, own)) == []


PLANTED = [(one.kinds[0], fault) for fault, one in FAULTS.items()]


@pytest.mark.parametrize(("kind", "fault"), PLANTED)
def test_what_is_wrong_with_a_file_is_named(kind: str, fault: str, made: Made, texts: Any, tmp_path: Path) -> None:
    """Catches a fault that is missed, or is given another's name."""
    model, folder = made(kind)
    read = gguf_reader.of_file(planted(fault, folder, tmp_path / "there") / FILE)
    found = causes.causes(read, readers.of_model(model), texts, parity.length_of(model))
    assert [cause.name for cause in found] == [FAULTS[fault].cause or "norm"]
    assert 0 < found[0].changed <= 1


def test_a_file_that_holds_no_draft_is_refused(made: Made, tmp_path: Path) -> None:
    """Catches a traceback where the file is cut off, or is the target's."""
    _, folder = made("dflash")
    whole = (folder / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExportError, match="can't be read as GGUF"):
        gguf_reader.of_file(tmp_path / FILE)
