"""DEER: independent positions, one pass that is the same in training and at serving, and what its two stages weigh."""

import pytest
import torch
from conftest import batch_of
from drafters.proposals import watch

from outrider.decoding.state import Request
from outrider.drafters import deer
from outrider.generation import serve
from outrider.sampling.settings import Sampling
from outrider.targets.cache import SlotCache

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "anchors": 16}


def made(target, **settings):
    torch.manual_seed(1)
    return deer.Model(deer.Config(**(SIZES | settings)), target).double()


def test_positions_are_independent(target):
    """Catches a slot that is told what was drawn before it."""
    first = []
    for seed in (1, 2):
        drafter = made(target).eval().drafter()
        seen = watch(drafter)
        [*_] = serve(target, [Request([3, 1, 4, 1, 5], 8, Sampling(1.0, seed=seed))], drafter)
        first.append(seen[0].draft)
    one, other = first
    assert not torch.equal(one.tokens[:, :3], other.tokens[:, :3])
    assert torch.equal(one.q[:, 1:], other.q[:, 1:])


def trained(model, batch) -> dict[int, torch.Tensor]:
    """Logits [K, V] of the block behind every place of the first text that was drawn as an anchor."""
    torch.manual_seed(0)
    rows = model.predict(batch)
    counted = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    torch.manual_seed(0)
    places = model.predict(type(batch)(counted, batch.loss_mask, batch.documents, batch.taps, batch.hidden)).labels
    ((draft, _, _),) = rows.chunks(10**9)
    blocks, at = draft.unflatten(0, (-1, rows.slots)), places.unflatten(0, (-1, rows.slots))[:, 0] - 1
    return {int(place): block for place, block in zip(at[:16], blocks, strict=False)}


def served(model, text: list[int], pieces: list[int]) -> torch.Tensor:
    """Logits [K, V] behind a text read in pieces that end at these places, beside a slot that brings more new
    tokens."""
    drafter = model.drafter()
    memory = SlotCache(2, 64, layers=2)
    with torch.inference_mode():
        for end in pieces:
            drafter._pass(memory, [0], [text[:end]])
        return model.target.head(drafter._pass(memory, [0, 1], [text, [7] * 9])[0])


def apart(model, target) -> float:
    """Largest difference between blocks as trained and as served."""
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        blocks = trained(model, batch_of(target, (), tokens))
    assert len(blocks) > 10
    text = tokens[0].tolist()
    pairs = [(block, served(model, text[: at + 1], [at // 2, at])) for at, block in blocks.items() if at > 1]
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def test_a_whole_block_is_served_as_it_was_trained(target):
    """Catches places, padding or a mask that differ in later slots."""
    model = made(target).eval()
    assert apart(model, target) < 1e-10


def test_a_suffix_weighs_most_next_to_the_text():
    """Catches weights that grow away from the text, or reach behind the suffix."""
    wanted = [[1, 0, 0, 0], [2, 1, 0, 0], [4, 2, 1, 0], [8, 4, 2, 1]]
    assert deer.suffix_weights(torch.tensor([1, 2, 3, 4]), 4, 2.0).tolist() == wanted


@pytest.mark.parametrize(
    ("progress", "refine", "stage"),
    [(0.0, 0.5, 1), (0.49, 0.5, 1), (0.5, 0.5, 2), (1.0, 0.5, 2), (0.99, 1.0, 1), (0.0, 0.0, 2)],
)
def test_the_second_stage_begins_where_it_says(progress, refine, stage, target):
    """Catches a stage that never comes, and rows of the first that weigh unequally. R of 48 blocks."""
    model = made(target, refine=refine, alpha=2.0, anchors=12)
    model.progress = progress
    torch.manual_seed(0)
    weights = model.predict(batch_of(target, (), torch.randint(64, (4, 24)))).weight.unflatten(0, (-1, 4))
    blocks = {tuple(block) for block in weights.tolist()}
    whole = {(1, 1, 1, 1)} if stage == 1 else {(1, 0, 0, 0), (2, 1, 0, 0), (4, 2, 1, 0), (8, 4, 2, 1)}
    # the end of a text cuts blocks short
    short = {block[:n] + (0,) * (4 - n) for block in whole for n in range(1, 4)}
    assert whole <= blocks <= whole | short
