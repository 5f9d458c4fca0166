"""BLT-DV: blocks of masks filled in both directions, and the target that is trained for them."""

import pytest
import torch
from byte_targets import byte_model, exactly
from conftest import batch_of, train
from contracts.chances import emitted, follows

from outrider.generation import generate
from outrider.lab.drafters import patch_diffusion
from outrider.sampling.distribution import Settings
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

CONFIG = patch_diffusion.Config(block=4, mask_token=63, anchors=16)


@pytest.fixture(scope="module")
def own():
    return load_target(byte_model())


def made(target, config: patch_diffusion.Config = CONFIG):
    torch.manual_seed(1)
    return patch_diffusion.TargetModel(config, target).double()


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


def test_a_trained_target_keeps_its_own_distribution():
    """Catches a q that depends on what was drawn.  False alarm 1e-6; a vocabulary of 5, every triple counted."""
    sampling = {"temperature": 0.7, "top_k": 3}
    small = load_target(byte_model(vocab_size=5, patch=2.0))
    model = made(small, patch_diffusion.Config(block=3, mask_token=4, anchors=16, steps=2))
    texts = torch.randint(5, (8, 24), generator=torch.Generator().manual_seed(4))
    train(model, batch_of(small, (), texts), 15, lr=2e-3)
    drafter, prompt = model.eval().drafter(), [0, 1, 2, 0, 1]
    tokens, _, accepted = emitted(drafter.target, drafter, prompt=prompt, slots=700, sampling=sampling)
    assert accepted > 60
    assert follows(tokens, exactly(drafter.target, prompt, Settings.of([Sampling(**sampling)])))
