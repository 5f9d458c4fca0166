"""Domino: what its head may read, what it adds, and how its curriculum goes over from the base to it."""

import pytest
import torch
from conftest import batch_of
from tiny import randomise
from training.bench import make_answers

from outrider.data.features.live import LiveFeatures
from outrider.drafters import domino
from outrider.errors import DrafterError
from outrider.nn.heads import PrefixGRU
from outrider.training import trainer
from outrider.training.config import Config as TrainConfig

SIZES = {
    "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "anchors": 16, "decay": 4.0,
}  # fmt: skip
HEAD = {"gru": 8, "rank": 8}


def made(target, **settings):
    torch.manual_seed(1)
    return domino.Model(domino.Config(**(SIZES | HEAD | settings)), target).double()


@pytest.fixture
def batch(target):
    tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(4))
    return batch_of(target, (1, 2), tokens)


def logits_of(model, batch, seed=0):
    torch.manual_seed(seed)
    rows = model.predict(batch)
    return rows, torch.cat([draft for draft, _, _ in rows.chunks(10**9)])


def test_the_gru_is_torchs_own():
    """Catches gates in another order or a reset in another place."""
    torch.manual_seed(0)
    theirs, mine = torch.nn.GRU(6, 5, bias=False, batch_first=True).double(), PrefixGRU(6, 5).double()
    mine.load_state_dict(theirs.state_dict())
    words = torch.randn(3, 4, 6).double()
    torch.testing.assert_close(mine.along(words), theirs(words)[0], rtol=1e-12, atol=1e-12)
    state = mine.start(words[:, 0])
    for k in range(4):
        state = mine(words[:, k], state)
    torch.testing.assert_close(mine.along(words)[:, -1], state, rtol=1e-12, atol=1e-12)


def test_weights_are_named_as_in_released_checkpoints(target):
    """Catches a head that no released file fits."""
    shapes = {name: tuple(w.shape) for name, w in made(target).named_parameters() if not name.startswith("backbone.")}
    assert shapes == {
        "prefix_gru.weight_ih_l0": (24, 32), "prefix_gru.weight_hh_l0": (24, 8),
        "embed_proj.0.weight": (8, 40), "embed_proj.2.weight": (64, 8),
    }  # fmt: skip


def test_the_first_slots_keep_their_base_logits(target):
    """Catches a correction of the slot that has nothing of its own block before it."""
    states, previous = torch.randn(2, 4, 32).double(), torch.randint(64, (2, 4))
    for first in (0, 1, 3):
        added = randomise(made(target, pure_prefix=first)).corrections(states, previous)
        assert [bool(slot.any()) for slot in added.unbind(1)] == [k >= first for k in range(4)]
    with pytest.raises(DrafterError, match=r"pure_prefix must be below block \(4\), got 4"):
        made(target, pure_prefix=4)


def test_every_block_trains_by_its_base_or_by_what_is_drafted(target, batch):
    """Catches a block that is half of each, and a share that is not lam.  The seed is fixed: 16 to 48 of 64."""
    model = randomise(made(target, taps=(1, 2)))
    found = {}
    for progress in (0.0, 0.25, 1.0):
        model.progress = progress
        rows, logits = logits_of(model, batch)
        found[progress] = logits.unflatten(0, (-1, 4)), rows.weight
    base, final = found[0.0][0], found[1.0][0]
    assert torch.equal(base, target.head(rows.states).unflatten(0, (-1, 4)))
    assert torch.equal(base[:, 0], final[:, 0]) and bool((base[:, 1:] != final[:, 1:]).any())
    is_base = [torch.equal(one, other) for one, other in zip(found[0.25][0], base, strict=True)]
    is_final = [torch.equal(one, other) for one, other in zip(found[0.25][0], final, strict=True)]
    assert all(one != other for one, other in zip(is_base, is_final, strict=True))
    assert 16 <= sum(is_base) <= 48
    # a run may put other weights in their place, or choose rows: they know nothing of the curriculum
    assert all(torch.equal(weight, rows.weight) for _, weight in found.values())


def test_a_training_goes_through_its_curriculum(target, tmp_path):
    """Catches a share that stays at its beginning, and a curriculum that ends elsewhere than it says."""
    source = LiveFeatures(target, make_answers(vocabulary=64), (1,), batch=2, length=64)
    settings = TrainConfig(steps=4, batch=2, lr=1e-2, dtype="float32", log_every=1, save_every=4)
    model, seen = made(target, taps=(1,), curriculum=0.5), []
    trainer.train(model, source, settings, tmp_path, on_step=lambda *_: seen.append(model.progress))
    assert seen == [step / 4 for step in range(4)]
    assert [domino.base_share(progress, 0.5) for progress in (*seen, 1.0)] == [1, 0.5, 0, 0, 0]
    assert [domino.base_share(*pair) for pair in ((0.0, 1.0), (1.0, 1.0), (0.0, 0.0))] == [1, 0, 0]
