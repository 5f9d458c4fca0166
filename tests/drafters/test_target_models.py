"""Targets that are trained to draft for themselves: exact relative to their own text."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import batch_of, tiny_model, train
from contracts.chances import TOKENS, emitted, follows
from drafters.proposals import exact
from tiny import make_folder, write_run_file

import outrider
from outrider.drafters import find
from outrider.generation import generate
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.settings import Sampling
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
    train(model, batch_of(target, (), texts), 60, lr=2e-3)
    return model.eval().drafter()


@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_texts_are_those_that_the_trained_model_writes_alone(kind, learnt, target, prompts, sampling):
    """Catches masks that the text sees, or that stay in the cache."""
    found = exact(learnt.target, prompts[2:6], learnt, max_new_tokens=24, slots=3, sampling=sampling)
    if sampling is None:
        before = generate(target, prompts[2:6], find(kind).build(made(kind, target).config, target), max_new_tokens=24)
        accepted = [sum(sum(one.accepted) for one in texts) for texts in (found, before)]
        assert accepted[0] > 1.5 * accepted[1]
        assert all(weight.grad is None for weight in target.model.parameters())


def test_a_step_is_one_pass(learnt, prompts):
    """Catches a pass of its own for the draft.  A prompt's first tokens take one more."""
    passes: list[int] = []
    hook = learnt.target.model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    try:
        (found,) = generate(learnt.target, prompts[0], learnt, max_new_tokens=30)
    finally:
        hook.remove()
    assert len(passes) == found.steps + 1


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


@pytest.mark.slow
def test_a_trained_model_keeps_its_own_distribution(kind):
    """Catches a q that is not what the rows drew from.  False alarm 1e-6; a vocabulary of 5, every triple counted."""
    small, sampling = load_target(tiny_model(vocab_size=5)), {"temperature": 0.7, "top_k": 3}
    model = made(kind, small, **({"mask_token": 4} if kind == "tidar" else {}))
    texts = torch.randint(5, (8, 24), generator=torch.Generator().manual_seed(4))
    train(model, batch_of(small, (), texts), 30, lr=2e-3)
    drafter, prompt = model.eval().drafter(), [0, 1, 2, 0, 1]
    tokens, _, kept = emitted(drafter.target, drafter, prompt=prompt, slots=1000, sampling=sampling)
    assert kept > 60
    joint, settings = torch.ones(()), Settings.of([Sampling(**sampling)])
    for count in range(TOKENS):
        heads = torch.tensor(list(itertools.product(range(5), repeat=count)), dtype=torch.int64).view(5**count, count)
        given = torch.cat([torch.tensor(prompt).expand(len(heads), -1), heads], 1)
        p = distribution(drafter.target.model(given).logits[None, :, -1].detach(), settings)[0]
        joint = joint[..., None] * p.view(*[5] * count, 5)
    assert follows(tokens, joint)


def test_a_run_file_trains_a_target_and_measures_that(kind, tmp_path, monkeypatch):
    """Catches an evaluation on the target that training began from, and a target that was not saved whole."""
    monkeypatch.chdir(tmp_path)
    folder = make_folder(tmp_path / "tiny")
    settings = SETTINGS[kind] | ({"mask_token": 7} if kind == "tidar" else {})
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
