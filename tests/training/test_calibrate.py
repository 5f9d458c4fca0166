"""Scaling finds what was planted; the error it minimises is the one that is promised; a checkpoint is rewritten
whole."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import write_run_file
from torch import Tensor

from outrider import checkpoint, cli, generate, load_drafter
from outrider.cli import console
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.errors import CheckpointError, DataError
from outrider.fast import values_of
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.fitting import calibrate
from outrider.training.fitting.calibrate import MIN_DRAFTS
from outrider.training.fitting.scaling import Outcomes, Scaling, ece, scaling
from training.bench import make_model

PLANTED = Scaling(torch.tensor([1.6, 0.7, 2.2]).double(), torch.tensor([-0.5, 0.4, 0.0]).double())


def planted(drafts: int = 16_000, by: Scaling = PLANTED, seed: int = 0) -> Outcomes:
    """Outcomes of a head whose logits promise `by` too much; with `by` applied it is perfect."""
    noise = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(drafts, len(by.shifts), dtype=torch.float64, generator=noise) + 1
    true = ((logits + by.shifts) / by.temperatures).sigmoid()
    kept = torch.rand(true.shape, generator=noise) < true
    return Outcomes(logits.sigmoid(), kept.cumprod(-1).bool(), torch.ones_like(kept), torch.arange(drafts) % 7)


def test_bins_hold_equally_many():
    """Catches bins of equal width, and a mean over bins that forgets how many are in each."""
    predicted = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3])
    kept = torch.tensor([False, True, True, False, False])
    # two bins of 0.1, 0.2, 0.3 and of 0.8, 0.9: |0.6 - 1| and |1.7 - 1|, over 5 drafts
    assert ece(predicted, kept, bins=2) == pytest.approx((0.4 + 0.7) / 5)
    assert ece(predicted, kept, bins=5) == pytest.approx((0.1 + 0.8 + 0.3 + 0.8 + 0.1) / 5)


def test_a_planted_scaling_is_found_again():
    """Catches a product with the wrong elders, a search in the wrong direction."""
    found = scaling(planted())
    torch.testing.assert_close(found.temperatures, PLANTED.temperatures, rtol=0.2, atol=0)
    torch.testing.assert_close(found.shifts, PLANTED.shifts, rtol=0, atol=0.15)
    judged = planted(seed=1)
    after = judged.scaled(found)
    assert min(judged.errors()) > 0.025
    assert not scaling(planted(2000), shifting=False).shifts.any(), "the paper's own way"
    for error, noise in zip(after.errors(), after.noise(draws=20), strict=True):
        assert 0.4 * noise < error < 2.5 * noise


def test_slots_that_were_not_seen_do_not_count():
    """Catches padding, or a slot behind the end of a text, taken for a rejection."""
    outcomes = planted()
    known = outcomes.is_drafted.clone()
    known[::2, 1:] = False
    spoilt = outcomes.survived & known
    for k in range(3):
        halved = Outcomes(outcomes.confidence, spoilt, known, outcomes.prompts).scaled(PLANTED)
        assert halved.errors()[k] < 2.5 * halved.noise(draws=20)[k]


class Foretold(Drafter):
    """Drafts what the target will or will not say, by a script of (tokens right, confidences)."""

    limit = 3

    def __init__(self, text: list[int], right: int):
        self.text, self.right = text, right

    def propose(self, memory: None, state: Any, budget: Tensor) -> Draft:
        at = len(state.tokens[0]) - len(state.requests[0].prompt)
        coming = (self.text + [0] * 3)[at : at + 3]
        tokens = [token if k < self.right else (token + 1) % 200 for k, token in enumerate(coming)]
        return Draft.chain(torch.tensor([tokens]), budget.clamp(max=3), None, torch.tensor([[0.9, 0.8, 0.7]]))


@pytest.mark.usefixtures("spares")
def test_what_is_watched_is_what_was_kept(talker: TransformersTarget):
    """Catches outcomes one slot off, slots beyond the room that is left, and steps whose drafting does not pay."""
    prompt = talker.encode("say")
    text = generate(talker, [prompt], max_new_tokens=6)[0].tokens
    found = calibrate.watch(talker, Foretold(text, 2), [prompt], max_new_tokens=6, temperature=0.0)
    assert found.survived.tolist() == [[True, True, False], [True, True, False]]
    assert found.is_drafted.tolist() == [[True, True, True], [True, True, False]]
    assert found.confidence[0].tolist() == pytest.approx([0.9, 0.8, 0.7])


def test_a_text_that_ends_hides_what_stands_behind(talker: TransformersTarget, monkeypatch: pytest.MonkeyPatch):
    """Catches a slot behind the end counted as rejected, and the one that ended the text not counted as kept."""
    prompt = talker.encode("say")
    text = generate(talker, [prompt], max_new_tokens=6)[0].tokens
    monkeypatch.setattr(talker, "ends", frozenset([text[1]]))
    assert text[0] != text[1]
    found = calibrate.watch(talker, Foretold(text, 3), [prompt], max_new_tokens=6, temperature=0.0)
    assert found.survived.tolist() == [[True, True, False]]
    assert found.is_drafted.tolist() == [[True, True, False]]


@pytest.fixture
def saved(talker: TransformersTarget, tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "c", make_model(talker), {"step": 1}, {"rng": torch.zeros(3)})
    return tmp_path / "c"


def prompts(talker: TransformersTarget, count: int) -> list[list[int]]:
    return [talker.encode(f"say {i}") for i in range(count)]


def test_only_the_scaling_of_a_checkpoint_changes(saved: Path, talker: TransformersTarget):
    """Catches weights that are rounded, a manifest or a resume that is lost, and a scaling that is not served."""
    before, training = load_file(saved / checkpoint.WEIGHTS), (saved / checkpoint.TRAINING).read_bytes()
    manifest = checkpoint.manifest_of(saved)
    found = calibrate.calibrate(saved, talker, prompts(talker, 16), max_new_tokens=90)
    after = load_file(saved / checkpoint.WEIGHTS)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"confidence_head.temperatures", "confidence_head.shifts"}
    assert after["confidence_head.temperatures"].tolist() == pytest.approx(found.temperatures)
    assert (saved / checkpoint.TRAINING).read_bytes() == training
    now = checkpoint.manifest_of(saved)
    assert now.pop("calibration")["after"] == found.after
    wanted, summed = (each.pop("checksums") for each in (manifest, now))
    assert now == manifest and wanted.keys() == summed.keys()
    assert [name for name in wanted if wanted[name] != summed[name]] == [checkpoint.WEIGHTS]
    assert sum(found.after) < sum(found.before)
    assert min(found.drafts) >= MIN_DRAFTS
    assert found.prompts == (8, 8)
    drafter: Any = load_drafter(saved, talker)
    assert drafter.model.confidence_head.temperatures.tolist() == pytest.approx(found.temperatures)


def test_what_is_served_is_scaled(talker: TransformersTarget):
    """Catches temperatures that are stored and not applied, or applied to the wrong slot."""
    given: list[Tensor] = []
    model = make_model(talker).double().eval()

    def drafted() -> Tensor:
        drafter, given[:] = model.drafter(), []
        propose = drafter.propose

        def watched(*args: Any) -> Draft:
            given.append(propose(*args).confidence)
            return Draft.empty(1)

        drafter.propose = watched  # type: ignore[method-assign]
        generate(talker, [[1, 2, 3]], drafter, max_new_tokens=8, sampling=Sampling(1.0, seed=1))
        return given[0].double()

    raw = drafted().logit()
    head = model.confidence_head
    head.temperatures.copy_(torch.tensor([2.0, 0.5, 1.0]))
    head.shifts.copy_(torch.tensor([0.0, 0.25, -1.0]))
    wanted = ((raw + head.shifts) / head.temperatures).sigmoid()
    torch.testing.assert_close(drafted(), wanted, rtol=1e-5, atol=1e-6)


def test_another_scaling_is_another_package(talker: TransformersTarget):
    """Catches a compiled step of before a calibration that is taken for the one after it."""
    model = make_model(talker)
    before = values_of(model)
    model.confidence_head.temperatures[1] = 1.5
    assert values_of(model) != before


def test_a_second_calibration_finds_nothing_more(saved, talker, monkeypatch):
    """Catches a scaling that replaces the one that was measured, instead of adding to it."""
    monkeypatch.setattr(calibrate, "MIN_DRAFTS", 40)
    first = calibrate.calibrate(saved, talker, prompts(talker, 6), max_new_tokens=60)
    second = calibrate.calibrate(saved, talker, prompts(talker, 6), max_new_tokens=60)
    assert second.before == pytest.approx(first.after, abs=1e-4)
    assert sum(second.after) < sum(first.after) + sum(first.noise)


def test_a_checkpoint_of_before_there_was_a_scaling_loads(saved: Path, talker: TransformersTarget):
    """Catches a strictness that makes every older confidence head useless."""
    weights = load_file(saved / checkpoint.WEIGHTS)
    older = {name: weight for name, weight in weights.items() if not name.endswith((".temperatures", ".shifts"))}
    assert len(older) == len(weights) - 2
    save_file(older, saved / checkpoint.WEIGHTS)
    drafter: Any = load_drafter(saved, talker)
    assert drafter.model.confidence_head.temperatures.tolist() == [1, 1, 1]
    del older["confidence_head.proj.bias"]
    save_file(older, saved / checkpoint.WEIGHTS)
    with pytest.raises(CheckpointError, match="lacks weights: confidence_head.proj.bias"):
        load_drafter(saved, talker)


def test_what_cannot_be_calibrated_is_said(saved: Path, talker: TransformersTarget, tmp_path: Path):
    """Catches temperatures made of noise, and an AttributeError for a drafter without a head."""
    before = json.loads((saved / checkpoint.MANIFEST).read_text())
    with pytest.raises(DataError, match=rf"at least {MIN_DRAFTS} drafts, got .*; give at least \d+ prompts"):
        calibrate.calibrate(saved, talker, prompts(talker, 2), max_new_tokens=8)
    assert json.loads((saved / checkpoint.MANIFEST).read_text()) == before
    checkpoint.save(tmp_path / "bare", make_model(talker, confidence=False))
    with pytest.raises(CheckpointError, match="no confidence head to calibrate; train one"):
        calibrate.calibrate(tmp_path / "bare", talker, prompts(talker, 2))
    model = make_model(talker, siblings=(1,))
    with pytest.raises(DataError, match="calibrate at a temperature above 0"):
        calibrate.watch(talker, model.double().eval().drafter(), prompts(talker, 1), temperature=0.0)


def test_a_training_calibrates_itself_once_and_the_verb_again(folder, tmp_path, monkeypatch, capsys):
    """Catches a recipe whose wish is ignored, a second run that does it again, and a verb that finds no target."""

    def outrider(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["outrider", *words])
        monkeypatch.setattr(console, "out", Console(width=200))
        cli.main()
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "MIN_DRAFTS", 40)
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"id": "{i}", "prompt": "say {i}"}}\n' for i in range(4)))
    train = {"steps": 2, "batch": 2, "lr": 1e-2, "dtype": "float32", "calibrate": 4}
    write_run_file(tmp_path / "tiny.yaml", folder, train=train, evaluate={"tasks": ["asked.jsonl"]})
    outrider("prepare", "tiny.yaml")
    place = tmp_path / "runs/tiny/checkpoint"
    assert "fitted on" in outrider("train", "tiny.yaml")
    first = checkpoint.manifest_of(place)
    assert len(first["calibration"]["temperatures"]) == 3
    assert "fitted on" not in outrider("train", "tiny.yaml")
    assert checkpoint.manifest_of(place) == first
    said = json.loads(outrider("calibrate", str(place), "--prompts", "asked.jsonl", "--count", "4", "--json", "-"))
    assert said == checkpoint.manifest_of(place)["calibration"] != first["calibration"]


def test_a_wish_without_prompts_is_refused_before_training(folder, tmp_path, monkeypatch):
    """Catches hours of training that end in an error."""
    monkeypatch.chdir(tmp_path)
    write_run_file(tmp_path / "tiny.yaml", folder, train={"steps": 2, "calibrate": 16}, evaluate=None)
    monkeypatch.setattr(sys, "argv", ["outrider", "train", "tiny.yaml"])
    with pytest.raises(SystemExit):
        cli.main()
    assert not (tmp_path / "runs").exists()
