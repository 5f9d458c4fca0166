"""Blocks that are trained with known first tokens: what they read, which rows learn, how often; D-PACE over them."""

import pytest
import torch
from conftest import batch_of

from outrider.drafters import dflash
from outrider.nn.drafting.block_rows import PREFIX_DECAY, prefix_tokens
from outrider.training import rows as weighings
from outrider.training.config import Config
from outrider.training.step import accumulate

SIZES = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "decay": 2.0}


def model_of(target, **choices) -> dflash.Model:
    torch.manual_seed(0)
    return dflash.Model(dflash.Config(**(SIZES | choices)), target).double().train()


def batch(target, model):
    return batch_of(target, model.taps, torch.randint(64, (3, 24), generator=torch.Generator().manual_seed(1)))


def test_known_tokens_follow_the_anchor() -> None:
    """Catches a token that is its own label, and one of the slots' own position."""
    text = torch.arange(100, 112)[None]
    found = prefix_tokens(text, torch.tensor([[2, 5, 10]]), torch.tensor([[2, 0, 3]]), 4)
    assert found.tolist() == [[[-1, 103, 104, -1], [-1, -1, -1, -1], [-1, 111, 111, 111]]]


@pytest.mark.parametrize("anchor_predicts", [True, False])
def test_a_known_slot_reads_its_token_and_its_row_does_not_learn(target, anchor_predicts) -> None:
    """Catches a row that learns what it reads, weights that fall from the anchor, and masks that stay masks."""
    model = model_of(target, prefixes=1.0, anchor_predicts=anchor_predicts)
    given, read = batch(target, model), list[torch.Tensor]()
    model.backbone.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    torch.manual_seed(5)
    rows = model.predict(given)
    embedded, width = read[0].view(3, -1, model.backbone.width, 32), model.backbone.width
    anchors = rows.previous.view(3, -1, 4)[:, :, 0]
    assert torch.equal(embedded[:, :, 0], target.embed(anchors))
    labels, weight = rows.labels.view(3, -1, 4), rows.weight.view(3, -1, 4)
    counts = set()
    for b in range(3):
        for block in range(labels.shape[1]):
            words = target.embed(labels[b, block])
            own = [bool(torch.equal(embedded[b, block, 1 + k], words[k])) for k in range(width - 1)]
            count = next((k for k, is_known in enumerate(own) if not is_known), len(own))
            learnt = [k for k in range(4) if float(weight[b, block, k]) > 0]
            if learnt:
                counts.add(learnt[0])
                assert count >= learnt[0] >= 1
                expected = torch.exp(-torch.arange(len(learnt)) / 2.0)
                assert torch.allclose(weight[b, block, learnt[0] :][: len(learnt)].double(), expected.double())
    assert counts == {1, 2, 3}


def test_known_counts_come_as_often_as_they_should(target) -> None:
    """Catches a count of none or of a whole block, and a share that is another.  20,000 blocks; 6 sigma."""
    backbone = model_of(target, prefixes=0.75, block=6).backbone
    given = batch(target, model_of(target))
    torch.manual_seed(0)
    found = torch.cat([backbone.prefix_lengths(given, 2000).flatten() for _ in range(4)])
    expected = PREFIX_DECAY ** torch.arange(1, 6, dtype=torch.float64)
    expected = torch.cat([torch.tensor([0.25]).double(), 0.75 * expected / expected.sum()])
    shares = found.bincount(minlength=7).double() / len(found)
    assert shares[6] == 0
    assert bool(((shares[:6] - expected).abs() < 6 * (expected * (1 - expected) / len(found)).sqrt()).all())
    assert backbone.eval().prefix_lengths(given, 2000) is None


def test_dpace_counts_known_tokens_as_reached(target) -> None:
    """Catches blocks with known tokens that weigh nothing: D-PACE takes the known rows for rejected ones."""
    model = model_of(target, prefixes=1.0)
    torch.manual_seed(5)
    rows = model.predict(batch(target, model))
    for draft, _, part in rows.chunks(10**9):
        found = weighings.weights({"dpace": 0.5}, rows, part, draft)
        assert torch.equal(found > 0, rows.weight > 0)
    accumulate(rows, Config(loss={"ce": 1.0}, position={"dpace": 0.5}))
    rows.backward()
    assert any(weight.grad is not None and bool(weight.grad.any()) for weight in model.parameters())
