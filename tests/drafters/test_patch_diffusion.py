"""BLT-DV: blocks of masks filled in both directions, and the target that is trained for them.  The contract suite runs
for it in `test_byte_suite`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from byte_targets import byte_model, exactly, passes
from conftest import batch_of, first, train
from contracts.chances import emitted, follows
from tiny import write_run_file

import outrider
from outrider.drafters import patch_diffusion
from outrider.generation import generate
from outrider.sampling.distribution import Settings
from outrider.sampling.settings import Sampling
from outrider.targets import byte_model as bytes_and_patches
from outrider.targets.load import load_target

CONFIG = patch_diffusion.Config(block=4, mask_token=63, anchors=16)


@pytest.fixture(scope="module")
def own():
    return load_target(byte_model())


def made(target, config: patch_diffusion.Config = CONFIG):
    torch.manual_seed(1)
    return patch_diffusion.TargetModel(config, target).double()


@pytest.fixture(scope="module")
def learnt(own, prompts):
    """A drafter for a target that was trained on the other's texts."""
    texts = torch.tensor([(prompt + generate(own, prompt, max_new_tokens=60)[0].tokens)[:48] for prompt in prompts])
    model = made(own)
    train(model, batch_of(own, (), texts), 150, lr=2e-3)
    return model.eval().drafter()


@pytest.mark.parametrize("steps", first([2, 1, 4]))
@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_texts_are_those_that_the_trained_model_writes_alone(learnt, prompts, steps, sampling):
    """Catches a block that stays in the cache, and filled bytes that are drafted unverified."""
    drafter = patch_diffusion.build(CONFIG.model_copy(update={"steps": steps}), learnt.target)
    alone = generate(learnt.target, prompts, max_new_tokens=30, slots=3, sampling=sampling)
    found = generate(learnt.target, prompts, drafter, max_new_tokens=30, slots=3, sampling=sampling)
    assert [one.tokens for one in found] == [one.tokens for one in alone]


def test_training_makes_drafts_that_are_accepted(own, learnt, prompts):
    """Catches a training that does not reach the block's rows."""
    after = generate(learnt.target, prompts, learnt, max_new_tokens=40)
    before = generate(own, prompts, patch_diffusion.build(CONFIG, own), max_new_tokens=40)
    accepted = [sum(sum(one.accepted) for one in found) for found in (after, before)]
    assert accepted[0] > 1.5 * accepted[1]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_it_takes_as_many_passes_as_asked_for_and_none_of_the_global_model(learnt, prompts, steps):
    """Catches a block that is filled more often, or by whole passes."""
    drafter = patch_diffusion.build(CONFIG.model_copy(update={"steps": steps}), learnt.target)
    with passes(learnt.target.model) as counts:
        [found] = generate(learnt.target, prompts[2], drafter, max_new_tokens=30, policy="fixed")
    assert counts["wide"] <= found.steps + 1
    left, drafts = 30, 0
    for accepted in found.accepted:
        drafts += left > 1
        left -= accepted + 1
    assert counts["local"] == steps * drafts + found.steps + 1


def test_the_surest_rows_are_filled_first():
    """Catches an order by place, and rows that are filled twice."""
    logits = torch.tensor([[[0.0, 3.0], [0.0, 1.0], [9.0, 0.0], [0.0, 2.0]]])
    assert patch_diffusion.surest(logits, 2).tolist() == [[True, False, True, False]]
    closed = logits.masked_fill(torch.tensor([True, False, False, False])[:, None], -torch.inf)
    assert patch_diffusion.surest(closed, 2).tolist() == [[False, False, True, True]]


def test_serving_reads_the_rows_that_training_reads(own):
    """Catches positions, masks, latents or an anchor that differ between training and serving."""
    text = torch.randint(0, 60, (1, 30), generator=torch.Generator().manual_seed(2))
    model, seen = made(own), []
    drafter = patch_diffusion.build(CONFIG, own)
    filled = drafter._filled
    drafter._filled = lambda cache, state: seen.append(filled(cache, state)) or seen[-1]
    for length in range(5, 26):
        generate(own, text[0, :length].tolist(), drafter, max_new_tokens=2, policy="fixed")
    at = torch.arange(3, 24)[None]
    states = model.read(text, torch.ones_like(text), at)
    trained = model.logits(states[:, 30:]).unflatten(1, (21, 4))[0]
    torch.testing.assert_close(torch.cat(seen), trained.detach(), rtol=0, atol=1e-9)


def test_no_row_sees_a_later_byte_or_another_text(own):
    """Catches a mask that is open too far, in training."""
    model, tokens = made(own), torch.arange(20).expand(2, -1).clone()
    tokens[1, 12:] += 20
    documents = torch.ones_like(tokens)
    documents[:, 15:] = 2

    def behind(text, *at: int):
        return model.read(text[None], documents[:1], torch.tensor([at]))[0, 20:]

    one, other = (behind(text, 4, 10, 12) for text in tokens)
    torch.testing.assert_close(one[:8], other[:8], rtol=0, atol=1e-12)
    assert not torch.allclose(one[8:], other[8:])
    other = tokens[0].clone()
    other[:15] += 20
    torch.testing.assert_close(behind(tokens[0], 17), behind(other, 17), rtol=0, atol=1e-12)


def test_rows_are_labelled_with_their_own_byte_and_filled_ones_are_not_learnt(own):
    """Catches a shift between rows, labels, the target's logits and the text's own rows.  A text is counted."""
    model, counted = made(own), torch.arange(24)[None]
    batch = batch_of(own, (), counted)
    logits, sizes = own.head(batch.hidden), set()
    for seed in range(4):
        torch.manual_seed(seed)
        rows = model.predict(batch)
        for draft, of_target, part in rows.chunks(10**9):
            positions = rows.labels[part]
            assert bool((positions - rows.depth[part] >= 2).all())
            torch.testing.assert_close(of_target, logits[0, positions - 1], rtol=1e-10, atol=1e-10)
            # before any training the rows of text are the target's: their distance is 0
            assert float(model.terms(rows, part, draft, of_target)["ar"].detach().abs().max()) < 1e-5
        sizes |= set(rows.block.bincount().tolist())
    assert {1, 4} <= sizes


def test_it_trains_under_autocast(own):
    """Catches rows of another type than the states that they are put among, which only training in bfloat16 meets."""
    model, texts = made(own).float(), torch.randint(60, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.autocast("cpu", torch.bfloat16):
        rows = model.predict(batch_of(own, (), texts))
        for draft, _, part in rows.chunks(10**9):
            torch.nn.functional.cross_entropy(draft.float(), rows.labels[part]).backward()
    rows.backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None)


def test_the_loss_falls_and_the_target_stays(own):
    """Catches a gradient that is cut off, and weights of the target that train along."""
    before = {name: weight.clone() for name, weight in own.model.state_dict().items()}
    model, texts = made(own), torch.randint(60, (8, 24), generator=torch.Generator().manual_seed(4))
    losses = train(model, batch_of(own, (), texts), 20, lr=2e-3)
    assert losses[-1] < 0.95 * losses[0]
    assert all(torch.equal(before[name], weight) for name, weight in own.model.state_dict().items())
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("steps", first([2, 1]))
@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}], ids=str)
def test_a_trained_target_keeps_its_own_distribution(sampling, steps):
    """Catches a q that depends on what was drawn.  False alarm 1e-6; a vocabulary of 5, every triple counted."""
    small = load_target(byte_model(vocab_size=5, patch_size=2))
    model = made(small, patch_diffusion.Config(block=3, mask_token=4, anchors=16, steps=steps))
    texts = torch.randint(5, (8, 24), generator=torch.Generator().manual_seed(4))
    train(model, batch_of(small, (), texts), 30, lr=2e-3)
    drafter, prompt = model.eval().drafter(), [0, 1, 2, 0, 1]
    tokens, _, accepted = emitted(drafter.target, drafter, prompt=prompt, slots=1500, sampling=sampling)
    assert accepted > 100
    assert follows(tokens, exactly(drafter.target, prompt, Settings.of([Sampling(**sampling)])))


def test_a_run_file_trains_a_target_and_measures_that(tmp_path, monkeypatch):
    """Catches an evaluation on the target that training began from, and a target that was not saved whole."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny"
    byte_model(vocab_size=258, eos_token_id=256).float().save_pretrained(folder)
    bytes_and_patches.tokenizer().save_pretrained(folder)
    settings = {"kind": "patch_diffusion", "block": 3, "anchors": 8}
    report = outrider.run(write_run_file(tmp_path / "run.yaml", folder, drafter=settings))
    own = load_target(Path("runs/run/target"), dtype="float64")
    assert own.spec.weights_hash != load_target(folder, dtype="float64").spec.weights_hash
    rows = [row for row in report.rows if row.drafter == "patch_diffusion" and row.temperature == 0]
    assert rows and all(row.exact for row in rows)
    assert json.loads(Path("runs/run/provenance.json").read_text())
    drafted = outrider.load_drafter("patch_diffusion", own, block=3)
    alone = generate(own, "say ab", max_new_tokens=12)[0].tokens
    assert generate(own, "say ab", drafted, max_new_tokens=12)[0].tokens == alone
