"""Targets that are trained to draft for themselves: exact relative to their own text."""

import json
from pathlib import Path

import pytest
import torch
from conftest import batch_of, train
from drafters.proposals import exact
from tiny import make_folder, write_run_file

import outrider
from outrider.drafters import find
from outrider.generation import generate
from outrider.targets.load import load_target

SETTINGS = {"tidar": {"block": 3, "mask_token": 63}, "jacobi_denoising": {"window": 3}}


@pytest.fixture(scope="module", params=SETTINGS)
def kind(request) -> str:
    return request.param


def made(kind: str, target, **more: object):
    torch.manual_seed(1)
    module = find(kind)
    return module.TargetModel(module.Config(**SETTINGS[kind] | {"anchors": 16} | more), target).double()


@pytest.fixture(scope="module")
def learnt(kind, target, prompts, plain):
    """A drafter that was trained on the target's texts; its target is its own."""
    model = made(kind, target)
    texts = torch.tensor([(prompt + plain(target, prompt, 48))[:40] for prompt in prompts[2:6]])
    train(model, batch_of(target, (), texts), 40, lr=2e-3)
    return model.eval().drafter()


def test_texts_are_those_that_the_trained_model_writes_alone(kind, learnt, target, prompts):
    """Catches masks that the text sees, or that stay in the cache."""
    found = exact(learnt.target, prompts[2:6], learnt, max_new_tokens=24, slots=3)
    before = generate(target, prompts[2:6], find(kind).build(made(kind, target).config, target), max_new_tokens=24)
    accepted = [sum(sum(one.accepted) for one in texts) for texts in (found, before)]
    assert accepted[0] > 1.5 * accepted[1]
    assert all(weight.grad is None for weight in target.model.parameters())


def test_rows_are_labelled_with_the_token_after_the_next(kind, target):
    """Catches a shift between rows, labels, the target's logits and the text's own rows.  A text is counted."""
    model, counted = made(kind, target), torch.arange(24)[None]
    batch = batch_of(target, (), counted)
    rows, logits = model.predict(batch), target.head(batch.hidden)
    for draft, own, part in rows.chunks(10**9):
        places = rows.labels[part]
        assert bool((places - rows.depth[part] >= 2).all())
        torch.testing.assert_close(own, logits[0, places - 1], rtol=1e-10, atol=1e-10)
        # before any training the rows of text are the target's: their distance is 0
        assert float(model.terms(rows, part, draft, own)["ar"].detach().abs().max()) < 1e-5


def test_no_row_sees_a_later_token_or_another_text(kind, target):
    """Catches a mask that is open too far, in training."""
    model, tokens = made(kind, target), torch.arange(20).expand(2, -1).clone()
    tokens[1, 12:] += 20
    documents = torch.ones_like(tokens)
    documents[:, 15:] = 2

    def behind(text, *at: int):
        torch.manual_seed(1)  # of a window's noise
        return model.read(text[None], documents[:1], torch.tensor([at]))[0, 20:]

    one, other = (behind(text, 4, 8, 12) for text in tokens)
    torch.testing.assert_close(one[:6], other[:6], rtol=0, atol=0)
    assert not torch.allclose(one[6:], other[6:])
    other = tokens[0].clone()
    other[:15] += 20
    torch.testing.assert_close(behind(tokens[0], 17), behind(other, 17), rtol=0, atol=0)


def test_a_run_file_trains_a_target_and_measures_that(tmp_path, monkeypatch):
    """Catches an evaluation on the target that training began from, and a target that was not saved whole."""
    monkeypatch.chdir(tmp_path)
    folder = make_folder(tmp_path / "tiny")
    kind, settings = "tidar", {"block": 3, "mask_token": 7}
    file = write_run_file(tmp_path / "run.yaml", folder, drafter={"kind": kind, "anchors": 8} | settings)
    report = outrider.run(file)
    place = Path("runs/run/target")
    own = load_target(place, dtype="float64")
    assert own.spec.weights_hash != load_target(folder, dtype="float64").spec.weights_hash
    rows = [row for row in report.rows if row.drafter == kind and row.temperature == 0]
    assert rows and all(row.exact for row in rows)
    assert json.loads(Path("runs/run/provenance.json").read_text())
    drafted = outrider.load_drafter(kind, own, **settings)
    alone = generate(own, "say ab", max_new_tokens=12)[0].tokens
    assert generate(own, "say ab", drafted, max_new_tokens=12)[0].tokens == alone
