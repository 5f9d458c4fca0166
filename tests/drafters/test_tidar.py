"""TiDAR: one pass verifies and drafts, exact relative to the model's own text; training is of the masks it serves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import batch_of, tiny_model, train
from contracts.chances import TOKENS, emitted, follows
from tiny import make_folder, write_run_file

import outrider
from outrider.drafters import tidar
from outrider.errors import DrafterError
from outrider.generation import generate
from outrider.nn import trees
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

CONFIG = tidar.Config(block=3, mask_token=63, anchors=16)


def made(target) -> tidar.TargetModel:
    torch.manual_seed(1)
    return tidar.TargetModel(CONFIG, target).double()


@pytest.fixture(scope="module")
def learnt(target, prompts, plain) -> tidar.Tidar:
    """Trained on the target's texts; its target is its own."""
    model = made(target)
    texts = torch.tensor([(prompt + plain(target, prompt, 48))[:40] for prompt in prompts])
    train(model, batch_of(target, (), texts), 120, lr=2e-3)
    return model.eval().drafter()


def test_masks_stand_behind_their_row_and_see_its_path_and_their_block():
    """Catches a block that sees another, a node that is not above it, or its masks in one direction alone."""
    draft = trees.of_lists([[5, 6, 7]], [[-1, -1, 0]])
    mask, depths = tidar.masks_after(*draft.rows(), 2)
    assert depths.tolist() == [[1, 2, 2, 3, 2, 3, 3, 4]]
    sees = [[0], [0, 1], [0, 2], [0, 1, 3]]
    for row in range(8):
        block = row // 2
        wanted = {*sees[block], 4 + 2 * block, 5 + 2 * block}
        assert set(mask[0, row].nonzero()[:, 0].tolist()) == wanted


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_texts_are_those_that_the_trained_model_writes_alone(learnt, prompts, slots, sampling):
    """Catches masks that the text sees, or that stay in the cache."""
    alone = generate(learnt.target, prompts, max_new_tokens=30, slots=slots, sampling=sampling)
    found = generate(learnt.target, prompts, learnt, max_new_tokens=30, slots=slots, sampling=sampling)
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    if sampling is None:
        given = torch.tensor([prompts[0]])
        out = learnt.target.model.generate(given, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert found[0].tokens == out[0, len(prompts[0]) :].tolist()


def test_training_makes_drafts_that_are_accepted(learnt, target, prompts):
    """Catches a training that does not reach the masks: the model before it drafts nearly nothing that is accepted."""
    after = generate(learnt.target, prompts, learnt, max_new_tokens=40)
    before = generate(target, prompts, tidar.build(CONFIG, target), max_new_tokens=40)
    accepted = [sum(sum(one.accepted) for one in found) for found in (after, before)]
    assert accepted[0] > 1.5 * accepted[1]


def test_a_step_is_one_pass(learnt, prompts):
    """Catches a pass of its own for the draft.  A prompt's first tokens take one more."""
    passes: list[int] = []
    hook = learnt.target.model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    try:
        (found,) = generate(learnt.target, prompts[0], learnt, max_new_tokens=30)
    finally:
        hook.remove()
    assert len(passes) == found.steps + 1


def test_the_masks_of_a_branch_are_those_of_a_pass_over_its_prefix_alone(learnt):
    """Catches a position or a mask that depends on the branches beside."""
    target, text = learnt.target, [5, 9, 17, 3]
    draft = trees.of_lists([[11, 12, 13]], [[-1, -1, 0]])
    cache = target.allocate(1, 60)
    target.prefill(cache, [0], torch.tensor([text[:-1]]), [3])
    scores = target.verify(cache, [0], torch.tensor(text[-1:]), draft, (), learnt.probe([], None, draft))
    model = made(target)
    model.lm = target.model
    for row, path in enumerate([[], [11], [12], [11, 13]]):
        tokens = torch.tensor([text + path])
        alone = model.read(tokens, torch.ones_like(tokens), torch.tensor([[tokens.shape[1] - 1]]))[0, -3:]
        torch.testing.assert_close(scores.probe[0, 3 * row : 3 * row + 3], alone, rtol=1e-9, atol=1e-9)


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_loss_falls_and_the_target_stays(target):
    """Catches a gradient that is cut off, and weights of the target that train along."""
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    model, texts = made(target), torch.randint(64, (8, 24), generator=torch.Generator().manual_seed(4))
    losses = train(model, batch_of(target, (), texts), 20, lr=2e-3)
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(before[name], weight) for name, weight in target.model.state_dict().items())
    assert all(weight.grad is None for weight in target.model.parameters())
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())


def test_rows_are_labelled_with_the_token_after_the_next(target):
    """Catches a shift between masks, labels, the target's logits and the text's own rows.  A text is counted."""
    model, counted = made(target), torch.arange(24)[None]
    batch = batch_of(target, (), counted)
    rows, logits = model.predict(batch), target.head(batch.hidden)
    for draft, own, part in rows.chunks(10**9):
        places = rows.labels[part]
        assert bool((places - rows.depth[part] >= 2).all())
        torch.testing.assert_close(own, logits[0, places - 1], rtol=1e-10, atol=1e-10)
        # before any training the rows of text are the target's: their distance is 0
        assert float(model.terms(rows, part, draft, own)["ar"].detach().abs().max()) < 1e-5


def test_no_mask_sees_a_later_token_or_another_text(target):
    """Catches a mask that is open too far, in training."""
    model, tokens = made(target), torch.arange(20).expand(2, -1).clone()
    tokens[1, 12:] += 20
    documents = torch.ones_like(tokens)
    documents[:, 15:] = 2
    near = model.read(tokens, documents, torch.tensor([[4, 11, 12]]).expand(2, -1))[:, 20:]
    torch.testing.assert_close(near[0, :6], near[1, :6], rtol=0, atol=0)
    assert not torch.allclose(near[0, 6:], near[1, 6:])
    tokens = tokens[:1].repeat(2, 1)
    tokens[1, :15] += 20
    near = model.read(tokens, documents, torch.tensor([[17]]).expand(2, -1))[:, 20:]
    torch.testing.assert_close(near[0], near[1], rtol=0, atol=0)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}], ids=str)
def test_a_trained_model_keeps_its_own_distribution(sampling):
    """Catches a q that is not what the masks drew from.  False alarm 1e-6; a vocabulary of 5, every triple counted."""
    small = load_target(tiny_model(vocab_size=5))
    torch.manual_seed(1)
    model = tidar.TargetModel(tidar.Config(block=3, mask_token=4), small).double()
    texts = torch.randint(5, (8, 24), generator=torch.Generator().manual_seed(4))
    train(model, batch_of(small, (), texts), 30, lr=2e-3)
    drafter, prompt = model.eval().drafter(), [0, 1, 2, 0, 1]
    tokens, _, kept = emitted(drafter.target, drafter, prompt=prompt, slots=1500, sampling=sampling)
    assert kept > 100
    joint, settings = torch.ones(()), Settings.of([Sampling(**sampling)])
    for count in range(TOKENS):
        heads = torch.tensor(list(itertools.product(range(5), repeat=count)), dtype=torch.int64).view(5**count, count)
        given = torch.cat([torch.tensor(prompt).expand(len(heads), -1), heads], 1)
        p = distribution(drafter.target.model(given).logits[None, :, -1].detach(), settings)[0]
        joint = joint[..., None] * p.view(*[5] * count, 5)
    assert follows(tokens, joint)


def test_a_model_without_a_mask_token_is_refused(target):
    """Catches masks that are a word of the text unasked."""
    with pytest.raises(DrafterError, match=r"no token that can stand for masks.*drafter\.mask_token"):
        tidar.build(tidar.Config(), target)


def test_a_run_file_trains_a_target_and_measures_that(tmp_path, monkeypatch):
    """Catches an evaluation on the target that training began from, and a target that was not saved whole."""
    monkeypatch.chdir(tmp_path)
    folder = make_folder(tmp_path / "tiny")
    drafter = {"kind": "tidar", "block": 2, "mask_token": 7, "anchors": 8}
    file = write_run_file(tmp_path / "run.yaml", folder, drafter=drafter)
    report = outrider.run(file)
    place = Path("runs/run/target")
    own = load_target(place, dtype="float64")
    assert own.spec.weights_hash != load_target(folder, dtype="float64").spec.weights_hash
    rows = [row for row in report.rows if row.drafter == "tidar" and row.temperature == 0]
    assert rows and all(row.exact for row in rows)
    assert json.loads(Path("runs/run/provenance.json").read_text())
    drafted = outrider.load_drafter("tidar", own, block=2, mask_token=7)
    alone = generate(own, "say ab", max_new_tokens=12)[0].tokens
    assert generate(own, "say ab", drafted, max_new_tokens=12)[0].tokens == alone
