"""DEER: independent positions, one pass that is the same in training and at serving, and what its two stages weigh."""

from __future__ import annotations

import pytest
import torch
from conftest import Case, batch_of
from safetensors.torch import load_file
from tiny import randomise
from training.bench import make_answers

from outrider.data.features import LiveFeatures
from outrider.decoding.state import Request
from outrider.drafters import deer
from outrider.generation import serve
from outrider.sampling.settings import Sampling
from outrider.targets.cache import SlotCache
from outrider.training import trainer
from outrider.training.config import Config as TrainConfig

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "anchors": 16}


def made(target, **settings):
    torch.manual_seed(1)
    return deer.Model(deer.Config(**(SIZES | settings)), target).double()


# ── drafting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def hangs_on_what_was_drawn(drafter, target) -> bool:
    """Whether q of the later slots differs between two texts' first steps that differ in nothing but the noise."""
    first: list = []
    for seed in (1, 2):
        propose, seen = drafter.propose, []
        drafter.propose = lambda *given, propose=propose, seen=seen: seen.append(propose(*given)) or seen[-1]
        for _ in serve(target, [Request([3, 1, 4, 1, 5], 8, Sampling(1.0, seed=seed))], drafter):
            pass
        drafter.propose = propose
        first.append(seen[0])
    one, other = first
    assert not torch.equal(one.tokens[:, :3], other.tokens[:, :3])
    return not torch.equal(one.q[:, 1:], other.q[:, 1:])


def test_positions_are_independent(target, workshop):
    """Catches a slot that is told what was drawn before it; the check sees it in Domino, whose slots are told."""
    assert not hangs_on_what_was_drawn(made(target).eval().drafter(), target)
    told = randomise(workshop.model(Case("domino"), target)).eval()
    assert hangs_on_what_was_drawn(told.drafter(), target)


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


def test_a_whole_block_is_served_as_it_was_trained(target, monkeypatch):
    """Catches places, padding or a mask that differ in later slots; planted: masks that see only those before them."""
    model = made(target).eval()
    assert apart(model, target) < 1e-10
    sight = deer.pass_mask
    monkeypatch.setattr(deer, "pass_mask", lambda *given: sight(*given).tril())
    assert apart(model, target) > 1e-3


def test_tokens_see_those_before_them_and_masks_all_that_is_real():
    """Catches padding that is looked at, and a token that sees a mask: its keys would change with every block."""
    counts, new, block = torch.tensor([3, 1, 0]), 3, 2
    seen = deer.pass_mask(counts, new, block)
    for b, count in enumerate(counts.tolist()):
        for row in range(new + block):
            for column in range(new + block):
                is_mask = row >= new
                wanted = (column < count or column >= new) if is_mask else column <= row
                assert bool(seen[b, row, column]) == wanted


# ── two stages ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("length", "wanted"), [(1, [1, 0, 0, 0]), (2, [2, 1, 0, 0]), (3, [4, 2, 1, 0]), (4, [8, 4, 2, 1])], ids=str
)
def test_a_suffix_weighs_most_next_to_the_text(length, wanted):
    """Catches weights that grow away from the text, or reach behind the suffix."""
    assert deer.suffix_weights(torch.tensor([length]), 4, 2.0).tolist() == [wanted]


@pytest.mark.parametrize(
    ("progress", "refine", "stage"),
    [(0.0, 0.5, 1), (0.49, 0.5, 1), (0.5, 0.5, 2), (1.0, 0.5, 2), (0.99, 1.0, 1), (0.0, 0.0, 2)],
)
def test_the_second_stage_begins_where_it_says(progress, refine, stage, target):
    """Catches a stage that never comes, and rows of the first that weigh unequally.  R of 48 blocks: all four come
    up."""
    model = made(target, refine=refine, alpha=2.0, anchors=12)
    model.progress = progress
    torch.manual_seed(0)
    weights = model.predict(batch_of(target, (), torch.randint(64, (4, 24)))).weight.unflatten(0, (-1, 4))
    blocks = {tuple(block) for block in weights.tolist()}
    whole = {(1, 1, 1, 1)} if stage == 1 else {(1, 0, 0, 0), (2, 1, 0, 0), (4, 2, 1, 0), (8, 4, 2, 1)}
    # the end of a text cuts blocks short
    short = {block[:n] + (0,) * (4 - n) for block in whole for n in range(1, 4)}
    assert whole <= blocks <= whole | short


def test_training_needs_no_taps_and_goes_on_bit_for_bit(target, tmp_path):
    """Catches a batch without taps that can't be made, and suffixes that a resume does not draw again."""
    source = LiveFeatures(target, make_answers(vocabulary=64), (), batch=2, length=64)
    settings = TrainConfig(steps=6, batch=2, lr=1e-2, dtype="float32", log_every=1, save_every=2)

    def run(folder, stop=0):
        def on_step(step, found):
            if step == stop:
                raise KeyboardInterrupt

        trainer.train(made(target), source, settings, folder, on_step=on_step)

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop=5)
    run(tmp_path / "cut")
    whole, cut = (load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
