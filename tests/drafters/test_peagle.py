"""P-EAGLE: what its rows see, which depths are dropped, and that serving is what was trained."""

from dataclasses import replace

import pytest
import torch
from conftest import SMALL, batch_of, train

from outrider import generation
from outrider.decoding.state import Request
from outrider.drafters import peagle
from outrider.errors import DrafterError
from outrider.generation import serve
from outrider.nn import draft_model
from outrider.sampling.settings import Sampling


def model_of(target, **choices):
    torch.manual_seed(3)
    small = {key: value for key, value in SMALL.items() if key in peagle.Config.model_fields}
    return peagle.Model(peagle.Config(**(small | {"layers": 3, "taps": (0, 1, 3)} | choices)), target).double()


def table(seen: torch.Tensor) -> list[str]:
    return ["".join("x" if cell else "." for cell in row) for row in seen.tolist()]


def test_a_pass_of_pairs_and_masks_sees_what_it_should():
    """Catches a mask that sees another slot's padding, a pair that sees a mask, a query that sees nothing at all (NaN),
    and a feature of one text beside the token of the next."""
    both, one = peagle.pass_mask(2, 2, torch.tensor([2, 1]))
    assert table(both) == ["x...", "xx..", "xxx.", "xxxx"]
    assert table(one) == ["x...", "xx..", "x.x.", "x.xx"]
    assert bool(peagle.pass_mask(2, 1, torch.tensor([0])).any(-1).all())
    two, padded = draft_model.pair_mask(torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 0, 0]]))
    assert table(two) == ["x....", "xx...", "..x..", "...x.", "...xx"]
    assert table(padded) == ["x....", ".x...", "..x..", "...x.", "....x"]


def test_masks_in_training_see_their_own_pair_and_shallower_masks_of_it():
    """Catches masks of two pairs that see each other, deeper masks seen from shallower ones."""
    at = torch.tensor([[1, 2]])
    there = torch.tensor([[[True, True, True], [True, True, False]]])
    rows = peagle.drafting_rows(at, there, 4)
    assert rows.pair.tolist() == [[0, 1, 2, 3, 1, 1, 2]]
    assert rows.depth.tolist() == [[0, 0, 0, 0, 1, 2, 1]]
    assert rows.of[0, 0].tolist() == [1, 4, 5] and rows.of[0, 1, :2].tolist() == [2, 6]
    seen = peagle.training_mask(draft_model.pair_mask(torch.ones(1, 5, dtype=torch.int64)), rows)
    #                          pairs 0-3, then (1, 1), (1, 2), (2, 1)
    assert table(seen[0]) == ["x......", "xx.....", "xxx....", "xxxx...", "xx..x..", "xx..xx.", "xxx...x"]
    rows = peagle.drafting_rows(torch.tensor([[0], [1]]), torch.tensor([[[True, True]], [[True, False]]]), 2)
    seen = peagle.training_mask(draft_model.pair_mask(torch.ones(2, 3, dtype=torch.int64)), rows)
    assert table(seen[1])[:2] == ["x..", "xx."] and bool(seen[1, 2].any())


def test_a_depth_is_kept_only_where_the_one_before_was_and_in_the_right_share():
    """Catches depths dropped independently, shares of what is left instead of all, and a floor that is not one."""
    torch.manual_seed(0)
    learnt = torch.ones(3, 500, 9, dtype=torch.bool)
    learnt[1, 200:] = False
    learnt[2, :, 4:] = False
    kept = peagle.conditional_drop(learnt, 0.8, 0.2)
    assert not bool((kept[..., 1:] & ~kept[..., :-1]).any())
    assert not bool((kept & ~learnt).any())
    shares = [max(0.8**d, 0.2) for d in range(9)]
    assert kept[0].sum(0).tolist() == [round(500 * share) for share in shares]
    assert kept[1].sum(0).tolist() == [round(200 * share) for share in shares]
    assert kept[2, :, 4:].sum() == 0
    assert peagle.conditional_drop(learnt, 0.5, 0.25)[0].sum(0).tolist() == [500, 250, *[125] * 7]
    assert torch.equal(peagle.conditional_drop(learnt, 1.0, 0.0), learnt)


def test_a_dropped_depth_changes_no_other_row(target):
    """Catches a mask row that is seen by what should not see it: with or without it the others say the same."""
    tokens = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(1))
    found = []
    for ratio in (1.0, 0.5):
        model = model_of(target, ratio=ratio, floor=0.0)
        torch.manual_seed(5)
        rows = model.predict(batch_of(target, model.taps, tokens))
        (logits,) = (draft for draft, _, _ in rows.chunks(10**9))
        found.append(dict(zip(zip(rows.block.tolist(), rows.depth.tolist(), strict=True), logits, strict=True)))
    whole, dropped = found
    assert 0 < len(dropped) < len(whole)
    for row, logits in dropped.items():
        torch.testing.assert_close(logits, whole[row], rtol=1e-10, atol=1e-10)


def test_served_logits_at_every_depth_are_the_trained_ones(target, prompts, monkeypatch):
    """Catches positions, masks and pairs that differ between `predict` and `propose` at any depth, in float64."""
    model = model_of(target, ratio=1.0, anchors=64)
    warm = torch.tensor([(prompt * 20)[:20] for prompt in prompts[:3]])
    train(model, batch_of(target, model.taps, warm), 3)
    drafter, served, state = model.eval().drafter(), [], generation.batch(target, 3)
    own = drafter._pass

    def watched(memory, rows, now, masks, leave=0):
        states, lengths = own(memory, rows, now, masks, leave), memory.kv_cache.lengths
        if not leave:
            logits = model.logits(states)
            served.extend((state.tokens[row][:], logits[b]) for b, row in enumerate(rows) if lengths[row] > 0)
            assert all(lengths[row] == len(state.tokens[row]) - 1 for row in rows)
        return states

    monkeypatch.setattr(drafter, "_pass", watched)
    texts = [list(prompt) for prompt in prompts]
    requests = [Request(prompt, 12 + n, Sampling()) for n, prompt in enumerate(prompts)]
    for progress in serve(target, requests, drafter, state=state):
        texts[progress.request] += progress.tokens
    compared = 0
    for text in texts:
        batch, found = batch_of(target, model.taps, torch.tensor([text])), []
        for tokens in (batch.tokens, torch.arange(len(text))[None]):
            torch.manual_seed(0)
            found.append(model.predict(replace(batch, tokens=tokens)))
        rows, places = found[0], found[1].labels
        with torch.no_grad():
            trained = torch.cat([draft for draft, _, _ in rows.chunks(10**9)])
        depths = rows.depth.tolist()
        at = {(int(place) - 1 - d, d): n for n, (place, d) in enumerate(zip(places, depths, strict=True))}
        for before, logits in served:
            if before != text[: len(before)]:
                continue
            for depth in range(len(logits)):
                if (len(before) - 1, depth) in at:
                    wanted = trained[at[len(before) - 1, depth]]
                    torch.testing.assert_close(logits[depth], wanted, rtol=0, atol=1e-9)
                    compared += depth > 0
    assert compared > 100


def test_weights_are_named_as_the_released_ones(target):
    """Catches a checkpoint that no other engine's loader knows."""
    model = model_of(target, layers=2)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes["mask_hidden"] == (1, 1, 3 * 32)
    assert shapes["fc.weight"] == (32, 3 * 32)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (16, 2 * 32)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (16, 32)
    assert {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"} <= set(shapes)


def test_layers_behind_the_first_can_begin_as_the_targets(target):
    """Catches copies that are counted from the first layer, whose shape no target has."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    model = model_of(target, init_from_layers=(0, 3), **sizes)
    theirs = target.layer(3).state_dict()["mlp.up_proj.weight"]
    assert torch.equal(model.layers[2].state_dict()["mlp.up_proj.weight"], theirs)
    with pytest.raises(DrafterError, match="init_from_layers"):
        model_of(target, init_from_layers=(0, 1, 3), **sizes)
