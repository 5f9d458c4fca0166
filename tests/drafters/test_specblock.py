"""SpecBlock: what its slots see, how it ranks and branches, and that serving is what was trained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import SMALL, SMALL_OF, batch_of, train
from hypothesis import given
from hypothesis import strategies as st

from outrider import generation
from outrider.decoding.state import Request
from outrider.drafters import specblock
from outrider.generation import generate, serve
from outrider.nn import blocks as layers
from outrider.nn import draft_model, heads, trees
from outrider.nn.draft_model import Batch
from outrider.policies import blocks_by_cost
from outrider.policies.blocks_by_cost import BlocksByCost
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling


def model_of(target, **choices):
    torch.manual_seed(3)
    small = {key: value for key, value in SMALL.items() if key in specblock.Config.model_fields}
    config = specblock.Config(**(small | SMALL_OF["specblock"] | {"taps": (0, 1, 3)} | choices))
    return specblock.Model(config, target).double()


# ── what a slot sees ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_slots_of_a_first_block_see_earlier_pairs_whole_and_their_own_up_to_themselves():
    """Catches slots that see ahead in their block, and slots of another text."""
    texts = torch.tensor([[1, 1, 1, 2, 2, 2]])
    seen = layers.rollout_mask(draft_model.pair_mask(texts), torch.arange(5)[None], [], 2)[0]
    pair_of = [(i, k) for i in range(5) for k in range(2)]
    for r, (i, k) in enumerate(pair_of):
        for c, (j, s) in enumerate(pair_of):
            whole = texts[0, i] == texts[0, i + 1] == texts[0, j] == texts[0, j + 1]
            assert bool(seen[r, c]) == ((j < i and bool(whole)) or (j == i and s <= k)), ((i, k), (j, s))


def test_slots_of_a_later_block_see_of_their_own_pair_what_was_taken():
    """Catches the slots that were not gone on from, and other pairs' later blocks."""
    texts, at, taken, slots = torch.tensor([[1, 1, 1, 1, 1]]), [1, 3], [2, 1], 3
    seen = layers.rollout_mask(draft_model.pair_mask(texts), torch.tensor([at]), taken, slots)[0]
    columns = [(1, j, s) for j in range(4) for s in range(slots)]
    columns += [(block, j, s) for block in (2, 3) for j in at for s in range(slots)]
    assert seen.shape == (len(at) * slots, len(columns))
    for r, (i, k) in enumerate((i, k) for i in at for k in range(slots)):
        for c, (block, j, s) in enumerate(columns):
            if block == 3:
                wanted = j == i and s <= k
            else:
                wanted = (j == i and s < taken[block - 1]) or (block == 1 and j < i)
            assert bool(seen[r, c]) == wanted, ((i, k), (block, j, s))


def test_the_shift_takes_in_the_slot_before():
    """Catches a shift the wrong way, across blocks, or with zeros before slot 0.  By hand."""
    shift = layers.Shift(2).double()
    x = torch.tensor([[[1.0, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]], dtype=torch.float64)
    torch.testing.assert_close(shift(x), x)
    with torch.no_grad():
        shift.proj.weight.copy_(torch.tensor([[1.0, 0, 10, 0], [0, 1, 0, 100]]))
    wanted = [[[11.0, 202], [13, 204], [35, 406]], [[77, 808], [79, 810], [101, 1012]]]
    torch.testing.assert_close(shift(x), torch.tensor(wanted, dtype=torch.float64))


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ranks_fall_into_their_classes():
    """Catches an edge off by one: rank 1 | 2-4 | 5-10 | beyond.  A token that can't be drafted is beyond."""
    logits = -torch.arange(14.0).expand(14, -1)
    assert heads.rank_class(logits, torch.arange(14)).tolist() == [0, *[1] * 3, *[2] * 6, *[3] * 4]
    reduced = torch.where(torch.arange(14) < 12, logits, -torch.inf)
    assert heads.rank_class(reduced, torch.full((14,), 13)).tolist() == [3] * 14
    assert heads.rank_class(torch.zeros(1, 5), torch.tensor([3])).tolist() == [0]


def test_the_ordinal_targets_and_loss_are_those_computed_by_hand():
    """Catches a penalty on the wrong side: a rank said too near must cost twice what one said too far does."""
    row = torch.tensor([1 / 25, 1 / 9, 1, 1 / 4])
    torch.testing.assert_close(heads.ordinal_targets()[2], row / row.sum())
    row = torch.tensor([1, 1 / 4, 1 / 9, 1 / 16])
    torch.testing.assert_close(heads.ordinal_targets()[0], row / row.sum())
    logits = torch.zeros(3, 4).scatter(1, torch.tensor([[0], [2], [3]]), 1.0)
    loss = heads.rank_loss(logits, torch.tensor([2, 2, 2]))
    plain = (heads.ordinal_targets()[2] * (heads.ordinal_targets()[2].log() - logits.log_softmax(-1))).sum(-1)
    # said 0: off by 2 and too near, 1 + 2 + 2; said 2: right; said 3: off by 1 and too far
    torch.testing.assert_close(loss, plain * torch.tensor([5.0, 1.0, 2.0]))


def test_rare_classes_weigh_more_and_all_rows_one_on_average():
    """Catches a weight that makes the term vanish as batches grow."""
    ranks = torch.tensor([0] * 40 + [1] * 20 + [2] * 5)
    weights = heads.class_weights(ranks)
    torch.testing.assert_close(weights / weights[2], torch.tensor([10 / 40, 10 / 20, 1, 1]))
    torch.testing.assert_close(weights[ranks].mean(), torch.tensor(1.0))
    assert len(heads.class_weights(ranks[:0])) == 4


def test_a_draft_branches_at_its_first_doubt():
    """Catches the last doubt taken for the first, and a sure block that does not go on."""
    slot, width = specblock.doubt(torch.tensor([[0, 0, 0], [0, 1, 2], [2, 0, 0], [0, 0, 3], [3, 1, 1]]))
    assert slot.tolist() == [2, 1, 0, 2, 0]
    assert width.tolist() == [1, 4, 10, 0, 0]


# ── the tree ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tree_keeps_the_likeliest_nodes_with_their_ancestors():
    """Catches a branch under the wrong node, and a product that leaves out what stands before.  By hand."""
    chances = [
        [(1, 0.9), (2, 0.5), (3, 0.8)],
        [(1, 0.9), (2, 0.5), (7, 0.9), (8, 0.1)],
        [(1, 0.9), (4, 0.4), (9, 0.95), (9, 0.0), (5, 1.0)],
    ]
    paths = [[(token, math.log(chance) if chance else -math.inf) for token, chance in path] for path in chances]
    # 1: .9   2: .45   2-7: .405   2-3: .36   4: .36   4-9: .342   2-7-8: .0405; equals in the order drawn
    assert specblock.likeliest(paths, 10) == ([1, 2, 7, 3, 4, 9, 8], [-1, 0, 1, 1, 0, 4, 2])
    assert specblock.likeliest(paths, 3) == ([1, 2, 7], [-1, 0, 1])
    assert specblock.likeliest(paths, 0) == ([], [])


chances = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([-0.0, -0.1, -0.5, -1.0, -3.0])), min_size=3, max_size=3
)


@given(chances, st.lists(st.tuples(st.integers(0, 2), chances), max_size=5))
def test_every_prefix_of_a_tree_is_a_draft_without_equal_siblings(chain, branches):
    """Catches a child before its parent, also where equal siblings of unequal worth became one node."""
    paths = [chain, *(chain[:at] + branch for at, branch in branches)]
    tokens, parents = specblock.likeliest(paths, 100)
    assert all(parent < n for n, parent in enumerate(parents))
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens)
    for size in range(len(tokens) + 1):
        assert specblock.likeliest(paths, size) == (tokens[:size], parents[:size])
        draft = trees.of_lists([tokens[:size]], [parents[:size]])
        assert draft.checked(1).live == [size]


def test_a_large_tree_holds_the_whole_chain_and_both_blocks(target, prompts):
    """Catches a second block that never comes, and a chain that ends at its first doubt."""
    model = model_of(target, nodes=45)
    texts = torch.tensor([(prompt * 20)[:20] for prompt in prompts])
    train(model, batch_of(target, model.taps, texts), 10)
    drafter, reached, chains = model.eval().drafter(), set(), []
    propose, following = drafter._tree, drafter._next
    widths = []

    def watched(memory, first, go_on, sizes, count):
        draft = propose(memory, first, go_on, sizes, count)
        reached.update(draft.reach())
        for b, best in enumerate(first.logits[:, 0].argmax(-1).tolist()):
            if 0 < draft.live[b] < int(sizes[b]):  # nothing was cut
                paths = {tuple(path(draft, b, n)) for n in range(draft.live[b])}
                chains.append(tuple(best) in paths)
        return draft

    def counted(*args):
        widths.append(args[-1].shape[1])
        return following(*args)

    drafter._tree, drafter._next = watched, counted
    generate(target, prompts[:3], drafter, max_new_tokens=55, slots=3)
    assert len(chains) > 5 and all(chains)
    assert max(reached) > 3
    assert {1, 4} & set(widths)


def path(draft, b, n):
    found = []
    while n >= 0:
        found.insert(0, draft.ids[b][n])
        n = draft.tree[b][n]
    return found


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_slot_counts_only_where_those_before_it_were_right(blocks, target, prompts):
    """Catches a prefix that includes the slot itself or runs across blocks, and weights that hang on more than the
    rows."""
    texts = torch.tensor([(prompt * 20)[:20] for prompt in prompts])
    model = model_of(target, blocks=blocks)
    train(model, batch_of(target, model.taps, texts), 25)
    torch.manual_seed(1)
    rows = model.predict(batch_of(target, model.taps, texts))
    logits = torch.cat([draft for draft, _, _ in rows.chunks(50)])
    right = (logits.argmax(-1) == rows.labels).tolist()
    blocks_of, wanted, slot, holds = rows.block.tolist(), [], 0, True
    for n, block in enumerate(blocks_of):
        slot, holds = (slot + 1, holds and right[n - 1]) if n and blocks_of[n - 1] == block else (0, True)
        wanted.append(0.8**slot * holds)
    torch.testing.assert_close(rows.weight, torch.tensor(wanted))
    assert len({block % blocks for block, weight in zip(blocks_of, wanted, strict=True) if weight}) == blocks
    assert {0.0, 1.0} < set(wanted)


def test_a_block_goes_on_where_the_last_one_was_left(target):
    """Catches labels of a later block that are off by the number of tokens taken, or by one."""
    model = model_of(target, blocks=3)
    counted = torch.arange(24)[None]
    seen = set()
    for seed in range(6):
        torch.manual_seed(seed)
        rows = model.predict(batch_of(target, model.taps, counted))
        begins: dict[int, int] = {}
        for block, depth, label in zip(rows.block.tolist(), rows.depth.tolist(), rows.labels.tolist(), strict=True):
            begins.setdefault(block, depth)
            assert label - depth >= 2
        seen |= {(block % 3, depth) for block, depth in begins.items()}
    assert (
        {(0, 0), (1, 1), (1, 2), (1, 3)}
        <= seen
        <= {(0, 0), *((1, m) for m in (1, 2, 3)), *((2, m) for m in range(2, 7))}
    )


def test_a_reduced_heads_weights_learn_under_autocast(target):
    """Catches weights that the pre-pass casts without a gradient and the loss then uses, as older torch would have
    it."""
    model = model_of(target, vocabulary=64).float()
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    batch = batch_of(target, model.taps, tokens)
    batch = Batch(tokens, batch.loss_mask, batch.documents, batch.taps.float(), batch.hidden)
    with torch.autocast("cpu", torch.bfloat16):
        rows = model.predict(batch)
        for draft, _, part in rows.chunks(64):
            torch.nn.functional.cross_entropy(draft.float(), rows.labels[part]).backward()
    rows.backward()
    for name in ("head.lm_head.weight", "fuse.weight", "shifts.0.proj.weight"):
        weight = model.get_parameter(name)
        assert weight.grad is not None and float(weight.grad.abs().sum()) > 0, name


# ── serving is what was trained ───────────────────────────────────────────────────────────────────────────────────────


def apart(target, prompts, monkeypatch, fault=None, **sampling) -> list[float]:
    """Largest difference between served and trained logits of first, second and third blocks, in three slots."""
    model = model_of(target, blocks=3)
    texts = torch.tensor([(prompt * 20)[:20] for prompt in prompts])
    train(model, batch_of(target, model.taps, texts), 5)
    drafter, served = model.eval().drafter(), []
    state, following, first_of = generation.batch(target, 3), drafter._next, drafter._first
    stems = {}
    if fault is not None:
        fault(model)

    def watched_first(memory, now):
        first = first_of(memory, now)
        stems.clear()
        stems[id(first)] = first, [[([], [])] for _ in first.rows]
        served.extend(
            (now.tokens[row][:], [], [], first.logits[b, 0])
            for b, row in enumerate(first.rows) if len(now.tokens[row]) > 1
        )  # fmt: skip
        return first

    def watched(kept, blocks, chosen, slot, tokens):
        found = following(kept, blocks, chosen, slot, tokens)
        _, before = stems[id(blocks)]
        after = []
        for b, row in enumerate(blocks.rows):
            after.append([])
            for c, (w, k, token) in enumerate(zip(*(x[b].tolist() for x in (chosen, slot, tokens)), strict=True)):
                taken, leaf = before[b][w]
                after[b].append(([*taken, k + 1], [*leaf, *[0] * k, token]))
                if len(state.tokens[row]) > 1:
                    served.append((state.tokens[row][:], *after[b][-1], found.logits[b, c]))
        stems[id(found)] = found, after
        return found

    monkeypatch.setattr(drafter, "_first", watched_first)
    monkeypatch.setattr(drafter, "_next", watched)
    requests = [Request(prompt, 8 + n, Sampling(**sampling)) for n, prompt in enumerate(prompts[:5])]
    for _ in serve(target, requests, drafter, state=state, policy=Fixed(drafter.limit)):
        pass
    monkeypatch.undo()
    model.__dict__.pop("forward", None)
    worst = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for number in range(3):
            own = [one for one in served if len(one[1]) == number]
            assert own
            for before, taken, leaf, logits in own[:: max(1, len(own) // 30)]:
                batch = batch_of(target, model.taps, torch.tensor([[*before, *leaf, 0]]))
                states = specblock.rollout(model, batch, torch.tensor([[len(before) - 2]]), taken)
                worst[number] = max(worst[number], float((model.logits(states[0, 0, -1]) - logits).abs().max()))
    return worst


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 2}], ids=["tree", "chain"])
def test_served_logits_of_all_blocks_are_the_trained_ones(sampling, target, prompts, monkeypatch):
    """Catches positions, masks and features that differ between `rollout` and `propose`, in float64."""
    assert max(apart(target, prompts, monkeypatch, **sampling)) < 1e-9


def test_first_blocks_may_pass_in_parts(target, monkeypatch):
    """Catches a part that sees less than all before it, or stands elsewhere, where texts are longer than a part."""
    torch.manual_seed(0)
    model = specblock.Model(specblock.Config(slots=2, taps=(0,)), target).double()
    batch = batch_of(target, model.taps, torch.randint(0, 64, (2, 12)))
    drawn = draft_model.draw(batch, 4, 2, 4)
    whole = specblock.rollout(model, batch, drawn.at, [1])
    monkeypatch.setattr(specblock, "CHUNK", 3)
    torch.testing.assert_close(specblock.rollout(model, batch, drawn.at, [1]), whole, rtol=0, atol=1e-12)


def late(model):
    """Second blocks stand one position too far."""
    forward = model.forward

    def moved(features, tokens, at, mask, kept=None):
        is_second = at.shape[1] > 1 and at.shape[0] > 1 and bool((at[:, 0] == at[:, 1]).all())
        return forward(features, tokens, at + is_second, mask, kept)

    model.forward = moved


def all_seen(model):
    """Second blocks see all slots of the first."""
    forward = model.forward

    def seeing(features, tokens, at, mask, kept=None):
        if at.shape[1] > 1 and at.shape[0] > 1 and bool((at[:, 0] == at[:, 1]).all()):
            begin = mask.shape[-1] - mask.shape[-2]
            mask = mask.clone()
            mask[..., :begin] = 0.0
        return forward(features, tokens, at, mask, kept)

    model.forward = seeing


@pytest.mark.parametrize("fault", [late, all_seen])
def test_the_comparison_sees_a_planted_fault(fault, target, prompts, monkeypatch):
    """The test above has teeth for second blocks: a rotary position off by one, slots that were not gone on from."""
    first, second, third = apart(target, prompts, monkeypatch, fault)
    assert first < 1e-9
    assert min(second, third) > 1e-4


def test_under_a_target_that_verifies_no_trees_it_drafts_chains_and_says_so(
    target, prompts, plain, monkeypatch, caplog
):
    """Catches a tree of which the loop would keep the trunk alone."""
    monkeypatch.setattr(target, "spec", replace(target.spec, mode="chain"))
    drafter = model_of(target).eval().drafter()
    assert drafter.limit == 6 and "verifies no trees" in caplog.text
    (found,) = generate(target, prompts[0], drafter, max_new_tokens=20)
    assert found.tokens == plain(target, prompts[0], 20)


def test_with_one_block_a_draft_ends_with_it(target, prompts, plain):
    """Catches a second block that was never trained."""
    drafter = model_of(target, blocks=1, nodes=40).eval().drafter()
    drafter._next = None
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        found = generate(target, prompts[:3], drafter, max_new_tokens=12, sampling=sampling, slots=3)
        wanted = generate(target, prompts[:3], max_new_tokens=12, sampling=sampling, slots=3)
        assert [one.tokens for one in found] == [one.tokens for one in wanted]


@pytest.mark.parametrize("choices", [{"blocks": 3}, {"blocks": 3, "choose_blocks": True}], ids=["all", "chosen"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["tree", "chain"])
def test_texts_are_the_targets_with_more_blocks(choices, sampling, target, prompts):
    """Catches keys of later blocks that stay in the cache, and room that was made for two."""
    drafter = model_of(target, nodes=60, **choices).eval().drafter()
    reached, propose = set(), drafter.propose

    def watched(*args):
        draft = propose(*args)
        reached.update(draft.reach())
        return draft

    drafter.propose = watched
    settings = {"max_new_tokens": 40, "sampling": sampling, "slots": 3}
    found = generate(target, prompts[:5], drafter, policy=Fixed(drafter.limit), **settings)
    wanted = generate(target, prompts[:5], **settings)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert max(reached) > 2 * SMALL_OF["specblock"].get("slots", 3) - (sampling.temperature == 0) * 3


# ── how many blocks pay ───────────────────────────────────────────────────────────────────────────────────────────────


def chosen(costs: BlocksByCost, seconds: list[float], gains: list[int], monkeypatch) -> list[int]:
    """Blocks of 200 steps in which the rest takes 1 s, block n seconds[n], and gains[n] of its tokens are accepted."""
    clock = [0.0]
    monkeypatch.setattr(blocks_by_cost.time, "perf_counter", lambda: clock[0])
    counts = []
    for _ in range(200):
        counts.append(costs.begin())
        for taken in seconds[: counts[-1]]:
            clock[0] += taken
            costs.lap(torch.device("cpu"))
        accepted = [n for n, gain in enumerate(gains[: counts[-1]]) for _ in range(gain)]
        costs.learn([accepted, accepted], 1.0 + sum(seconds[: counts[-1]]))
        clock[0] += 1
    return counts


@pytest.mark.parametrize(
    ("seconds", "gains", "best"),
    [([0.1, 0.1, 0.1], [2, 1, 1], 3), ([0.1, 0.1, 3.0], [2, 1, 1], 2), ([0.1, 2.0, 0.1], [1, 1, 0], 1),
     ([0.1, 0.5, 0.1], [1, 0, 4], 3)],
)  # fmt: skip
def test_as_many_blocks_are_drafted_as_pay(seconds, gains, best, monkeypatch):
    """Catches a block that costs more than it brings, one that stops at the first that does not pay, and a choice that
    is never tried again.  Planted fault: seconds count for nothing."""
    counts = chosen(BlocksByCost(3), seconds, gains, monkeypatch)
    assert counts[0] == 3 and counts.count(best) >= 180 and counts.count(3) >= 12
    monkeypatch.setattr(BlocksByCost, "rate", lambda self, blocks: sum(self.gains[:blocks]))
    blind = chosen(BlocksByCost(3), seconds, gains, monkeypatch)
    assert (blind.count(best) >= 180) == (best == 3 or not any(gains[best:]))


def test_a_trees_nodes_are_counted_for_the_block_that_offered_them_first():
    """Catches tokens of an early block that a later one repeats and is credited with.  By hand."""
    early, late = [(1, -0.1), (2, -0.2)], [(1, -0.1), (2, -0.1), (5, -0.1)]
    tokens, parents = specblock.likeliest([early, late], 9)
    assert (tokens, parents) == ([1, 2, 5], [-1, 0, 1])
    assert specblock.levels(tokens, parents, [(0, early), (2, late)]) == [0, 0, 2]


def test_banned_tokens_are_never_drafted(target, prompts):
    """Catches a tree that is not masked: a banned node is a sure rejection."""
    drafter, nodes = model_of(target).eval().drafter(), []
    propose = drafter.propose

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        nodes.extend(token for own, size in zip(draft.ids, draft.live, strict=True) for token in own[:size])
        return draft

    drafter.propose = watched
    sampling = Sampling(bad_words=[(token,) for token in range(40)])
    found = generate(target, prompts[:3], drafter, max_new_tokens=10, sampling=sampling)
    wanted = generate(target, prompts[:3], max_new_tokens=10, sampling=sampling)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert nodes and min(nodes) >= 40
