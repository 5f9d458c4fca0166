"""P-EAGLE: what its rows see, which depths are dropped, and that serving is what was trained."""

from __future__ import annotations

import pytest
import torch
from conftest import SMALL, batch_of, tiny_model, train

from outrider import drafters, generation
from outrider.decoding.state import Request
from outrider.drafters import peagle
from outrider.errors import DrafterError
from outrider.generation import generate, serve
from outrider.nn import draft_model
from outrider.nn.draft_model import Batch
from outrider.sampling.settings import Sampling
from outrider.targets.cache import SlotCache
from outrider.targets.load import load_target


def model_of(target, **choices):
    torch.manual_seed(3)
    small = {key: value for key, value in SMALL.items() if key in peagle.Config.model_fields}
    return peagle.Model(peagle.Config(**(small | {"layers": 3, "taps": (0, 1, 3)} | choices)), target).double()


def table(seen: torch.Tensor) -> list[str]:
    return ["".join("x" if cell else "." for cell in row) for row in seen.tolist()]


# ── what a row sees ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pass_of_pairs_and_masks_sees_what_it_should():
    """Catches a mask that sees another slot's padding, a pair that sees a mask, and a query that sees nothing at all
    (NaN)."""
    both, one = peagle.pass_mask(2, 2, torch.tensor([2, 1]))
    assert table(both) == ["x...", "xx..", "xxx.", "xxxx"]
    assert table(one) == ["x...", "xx..", "x.x.", "x.xx"]
    assert bool(peagle.pass_mask(2, 1, torch.tensor([0])).any(-1).all())


def test_masks_in_training_see_their_own_pair_and_shallower_masks_of_it():
    """Catches masks of two pairs that see each other, and deeper masks seen from shallower ones."""
    at = torch.tensor([[1, 2]])
    there = torch.tensor([[[True, True, True], [True, True, False]]])
    rows = peagle.drafting_rows(at, there, 4)
    assert rows.pair.tolist() == [[0, 1, 2, 3, 1, 1, 2]]
    assert rows.depth.tolist() == [[0, 0, 0, 0, 1, 2, 1]]
    assert rows.of[0, 0].tolist() == [1, 4, 5] and rows.of[0, 1, :2].tolist() == [2, 6]
    seen = peagle.training_mask(draft_model.pair_mask(torch.ones(1, 5, dtype=torch.int64)), rows)
    #                          pairs 0-3, then (1, 1), (1, 2), (2, 1)
    assert table(seen[0]) == ["x......", "xx.....", "xxx....", "xxxx...", "xx..x..", "xx..xx.", "xxx...x"]


def test_padding_among_masks_is_never_seen():
    """Catches padding that is taken for a mask, or for the pair that it stands on."""
    there = torch.tensor([[[True, True]], [[True, False]]])
    rows = peagle.drafting_rows(torch.tensor([[0], [1]]), there, 2)
    seen = peagle.training_mask(draft_model.pair_mask(torch.ones(2, 3, dtype=torch.int64)), rows)
    assert table(seen[1])[:2] == ["x..", "xx."] and bool(seen[1, 2].any())


def test_a_pair_across_two_texts_is_none():
    """Catches a feature of one text beside the token of the next, and padding that is read."""
    seen = draft_model.pair_mask(torch.tensor([[1, 1, 2, 2, 0, 0]]))
    assert table(seen[0]) == ["x....", ".x...", "..x..", "...x.", "....x"]
    assert table(draft_model.pair_mask(torch.tensor([[1, 1, 1, 2, 2, 2]]))[0]) == [
        "x....",
        "xx...",
        "..x..",
        "...x.",
        "...xx",
    ]


# ── which depths are there ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_depth_is_kept_only_where_the_one_before_was_and_in_the_right_share():
    """Catches depths dropped independently, shares of what is left instead of all, and a floor that is not one.
    Exact."""
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


def test_the_shares_test_has_teeth():
    """Planted fault: every depth dropped by itself keeps a depth whose predecessor is gone."""
    torch.manual_seed(0)
    kept = torch.rand(1, 500, 9) < 0.8 ** torch.arange(9)
    assert bool((kept[..., 1:] & ~kept[..., :-1]).any())


def test_rows_of_a_block_are_its_depths_from_0_without_a_gap(target):
    """Catches rows of a dropped depth, blocks that are torn apart, and rows without a label."""
    tokens = torch.randint(64, (3, 30), generator=torch.Generator().manual_seed(1))
    model = model_of(target, ratio=0.6, floor=0.3, length=5)
    batch = batch_of(target, model.taps, tokens)
    batch = Batch(tokens, tokens % 7 > 0, batch.documents, batch.taps, batch.hidden)
    rows = model.predict(batch)
    blocks: dict[int, list[int]] = {}
    for n, block in enumerate(rows.block.tolist()):
        assert not n or block == rows.block[n - 1] or block not in blocks
        blocks.setdefault(block, []).append(int(rows.depth[n]))
    assert all(depths == list(range(len(depths))) for depths in blocks.values())
    assert {len(depths) for depths in blocks.values()} >= {1, 2, 5}
    assert bool((rows.weight == 1).all())
    assert bool((rows.labels % 7 > 0).all())


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


# ── serving is what was trained ───────────────────────────────────────────────────────────────────────────────────────


def apart(target, prompts, monkeypatch, fault=None) -> float:
    """Largest difference between served and trained logits, at every depth, over texts of unequal length in three
    slots."""
    model = model_of(target, ratio=1.0, anchors=64)
    warm = torch.tensor([(prompt * 20)[:20] for prompt in prompts[:3]])
    train(model, batch_of(target, model.taps, warm), 3)
    model.eval()
    drafter, served = model.drafter(), []
    state = generation.batch(target, 3)
    own = drafter._pass

    def watched(memory, rows, now, masks, leave=0):
        states, kept = own(memory, rows, now, masks, leave), memory.kv_cache
        if leave:
            return states
        logits = model.logits(states)
        served.extend((tuple(state.tokens[row]), logits[b]) for b, row in enumerate(rows) if drafter_has(kept, row))
        assert fault or all(kept.lengths[row] == len(state.tokens[row]) - 1 for row in rows)
        return states

    def drafter_has(kept, row):
        return kept.lengths[row] > 0

    monkeypatch.setattr(drafter, "_pass", watched)
    if fault is not None:
        fault(model, drafter)
    requests = [Request(prompt, 12 + n, Sampling()) for n, prompt in enumerate(prompts)]
    texts = [list(prompt) for prompt in prompts]
    for progress in serve(target, requests, drafter, state=state):
        texts[progress.request] += progress.tokens
    monkeypatch.undo()
    worst, compared = 0.0, 0
    for text in texts:
        counted = torch.arange(len(text))[None]
        batch = batch_of(target, model.taps, torch.tensor([text]))
        found = []
        for tokens in (batch.tokens, counted):
            torch.manual_seed(0)
            found.append(model.predict(Batch(tokens, batch.loss_mask, batch.documents, batch.taps, batch.hidden)))
        rows, places = found[0], found[1].labels
        with torch.no_grad():
            trained = torch.cat([draft for draft, _, _ in rows.chunks(10**9)])
        at = {
            (int(place - 1 - depth), int(depth)): n
            for n, (place, depth) in enumerate(zip(places, rows.depth, strict=True))
        }
        for before, logits in served:
            if list(before) != text[: len(before)]:
                continue
            for depth in range(len(logits)):
                if (len(before) - 1, depth) in at:
                    worst = max(worst, float((logits[depth] - trained[at[len(before) - 1, depth]]).abs().max()))
                    compared += depth > 0
    assert compared > 100
    return worst


def test_served_logits_at_every_depth_are_the_trained_ones(target, prompts, monkeypatch):
    """Catches positions, masks and pairs that differ between `predict` and `propose` at any depth, in float64."""
    assert apart(target, prompts, monkeypatch) < 1e-9


def late(model, drafter):
    """Masks one position too far."""
    forward = model.forward

    def moved(taps, tokens, masks, at, mask, kept=None):
        at = at.clone()
        if masks and kept is not None:
            at[:, -masks:] += 1
        return forward(taps, tokens, masks, at, mask, kept)

    model.forward = moved


def kept_masks(model, drafter):
    """The masks' keys stay in the cache behind the pairs."""
    allocate, append = drafter.allocate, SlotCache.append

    def roomy(cache):
        memory = allocate(cache)
        memory.kv_cache = SlotCache(cache.slots, 4 * cache.length)

        def keep(counts):
            append(memory.kv_cache, [memory.kv_cache.width] * len(counts))

        memory.kv_cache.append = keep
        return memory

    drafter.allocate = roomy


@pytest.mark.parametrize("fault", [late, kept_masks])
def test_the_comparison_sees_a_planted_fault(fault, target, prompts, monkeypatch):
    """The test above has teeth: rotary positions off by one; a drafted key that is kept."""
    assert apart(target, prompts, monkeypatch, fault) > 1e-4


# ── vocabulary, mask token, sizes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["peagle", "specblock"])
def test_no_draft_holds_a_token_outside_its_vocabulary(kind, target, prompts, plain):
    """Catches draft ids taken for the target's, and a q that is none over the whole vocabulary."""
    module = drafters.find(kind)
    small = {key: value for key, value in SMALL.items() if key in module.Config.model_fields}
    model = module.Model(module.Config(**(small | {"layers": 2, "vocabulary": 9})), target).double()
    before = dict(model.facts())
    model.begin(torch.arange(64))
    assert list(before) == ["draft_vocabulary"] and model.facts() != before
    assert model.head.ids.tolist() == list(range(55, 64))
    drafter, nodes = model.eval().drafter(), []
    propose = drafter.propose

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        nodes.extend(token for own, size in zip(draft.ids, draft.live, strict=True) for token in own[:size])
        assert draft.q is None or not bool(draft.q[..., :55].any())
        return draft

    drafter.propose = watched
    found = generate(target, prompts[:3], drafter, max_new_tokens=10)
    assert [one.tokens for one in found] == [plain(target, prompt, 10) for prompt in prompts[:3]]
    state = generation.batch(target, 3)
    hot = [Request(prompt, 10, Sampling(1.0, seed=1)) for prompt in prompts[:3]]
    for _ in serve(target, hot, drafter, state=state):
        pass
    assert state.invalid == 0
    assert len(nodes) > 50 and min(nodes) >= 55


def test_a_mask_token_of_the_tokenizer_stands_for_the_tokens_to_come(monkeypatch):
    """Catches a learnt mask beside the tokenizer's own."""
    target = load_target(tiny_model())
    monkeypatch.setattr(target, "mask_token", 63)
    model = model_of(target)
    assert [name for name, _ in model.named_parameters() if "mask" in name] == ["mask_hidden"]
    (found,) = generate(target, [1, 2, 3], model.eval().drafter(), max_new_tokens=10)
    (wanted,) = generate(target, [1, 2, 3], max_new_tokens=10)
    assert found.tokens == wanted.tokens


def test_weights_are_named_as_the_released_ones(target):
    """Catches a checkpoint that no other engine's loader knows."""
    model = model_of(target, layers=2)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes["mask_hidden"] == (1, 1, 3 * 32)
    assert shapes["fc.weight"] == (32, 3 * 32)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (16, 2 * 32)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (16, 32)
    assert {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"} <= set(shapes)


@pytest.mark.parametrize("kind", ["peagle", "specblock"])
def test_sizes_that_attention_cannot_have_are_refused(kind, target):
    """Catches a shape error deep in attention."""
    module = drafters.find(kind)
    with pytest.raises(DrafterError, match="kv_heads"):
        module.build(module.Config(heads=4, kv_heads=3), target)
    with pytest.raises(DrafterError, match="head_dim 7"):
        module.build(module.Config(head_dim=7), target)
    with pytest.raises(DrafterError, match="4 layers"):
        module.build(module.Config(taps=(1, 9)), target)


def test_layers_behind_the_first_can_begin_as_the_targets(target):
    """Catches copies that are counted from the first layer, whose shape no target has."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    model = model_of(target, init_from_layers=(0, 3), **sizes)
    theirs = target.layer(3).state_dict()["mlp.up_proj.weight"]
    assert torch.equal(model.layers[2].state_dict()["mlp.up_proj.weight"], theirs)
    with pytest.raises(DrafterError, match="init_from_layers"):
        model_of(target, init_from_layers=(0, 1, 3), **sizes)
