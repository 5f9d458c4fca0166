"""SpecBlock: what its slots see, how it ranks and branches, and that serving is what was trained."""

import math

import pytest
import torch
from conftest import SMALL, SMALL_OF, batch_of, train
from drafters.proposals import exact, watch
from hypothesis import given
from hypothesis import strategies as st

from outrider import generation
from outrider.decoding.state import Request
from outrider.generation import serve
from outrider.lab.drafters import specblock
from outrider.lab.drafters.specblock.rows import rollout
from outrider.nn import blocks as layers
from outrider.nn import heads
from outrider.nn.drafting import trees
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling


def model_of(target, **choices):
    torch.manual_seed(3)
    small = {key: value for key, value in SMALL.items() if key in specblock.Config.model_fields}
    config = specblock.Config(**(small | SMALL_OF["specblock"] | {"taps": (0, 1, 3)} | choices))
    return specblock.Model(config, target).double()


def test_the_shift_takes_in_the_slot_before():
    """Catches a shift the wrong way, across blocks, or with zeros before slot 0.  By hand."""
    shift = layers.Shift(2).double()
    x = torch.tensor([[[1.0, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]], dtype=torch.float64)
    torch.testing.assert_close(shift(x), x)
    with torch.no_grad():
        shift.proj.weight.copy_(torch.tensor([[1.0, 0, 10, 0], [0, 1, 0, 100]]))
    wanted = [[[11.0, 202], [13, 204], [35, 406]], [[77, 808], [79, 810], [101, 1012]]]
    torch.testing.assert_close(shift(x), torch.tensor(wanted, dtype=torch.float64))


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


def test_a_slot_counts_only_where_those_before_it_were_right(target, prompts):
    """Catches a prefix that includes the slot itself or runs across blocks."""
    texts = torch.tensor([(prompt * 20)[:20] for prompt in prompts])
    model = model_of(target, blocks=3)
    train(model, batch_of(target, model.taps, texts), 12)
    torch.manual_seed(1)
    rows = model.predict(batch_of(target, model.taps, texts))
    logits = torch.cat([draft for draft, _, _ in rows.chunks(50)])
    right = (logits.argmax(-1) == rows.labels).tolist()
    blocks_of, wanted, slot, holds = rows.block.tolist(), [], 0, True
    for n, block in enumerate(blocks_of):
        slot, holds = (slot + 1, holds and right[n - 1]) if n and blocks_of[n - 1] == block else (0, True)
        wanted.append(0.8**slot * holds)
    torch.testing.assert_close(rows.weight, torch.tensor(wanted))
    assert len({block % 3 for block, weight in zip(blocks_of, wanted, strict=True) if weight}) == 3
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


def test_served_logits_of_all_blocks_are_the_trained_ones(target, prompts, monkeypatch):
    """Catches positions, masks and features that differ between `rollout` and `propose`, in float64."""
    model = model_of(target, blocks=3)
    texts = torch.tensor([(prompt * 20)[:20] for prompt in prompts])
    train(model, batch_of(target, model.taps, texts), 5)
    drafter, served = model.eval().drafter(), []
    state, following, first_of = generation.batch(target, 3), drafter._next, drafter._first
    stems = {}

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
    requests = [Request(prompt, 8 + n, Sampling()) for n, prompt in enumerate(prompts[:5])]
    [*_] = serve(target, requests, drafter, state=state, policy=Fixed(drafter.limit))
    with torch.no_grad():
        for number in range(3):
            own = [one for one in served if len(one[1]) == number]
            assert own
            for before, taken, leaf, logits in own[:: max(1, len(own) // 20)]:
                batch = batch_of(target, model.taps, torch.tensor([[*before, *leaf, 0]]))
                states = rollout(model, batch, torch.tensor([[len(before) - 2]]), taken)
                torch.testing.assert_close(model.logits(states[0, 0, -1]), logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("choices", "sampling"),
    [({"blocks": 3}, Sampling()), ({"blocks": 3}, Sampling(1.0, seed=3))],
    ids=["tree", "chain"],
)
def test_texts_are_the_targets_with_more_blocks(choices, sampling, target, prompts):
    """Catches keys of later blocks that stay in the cache, and room that was made for two."""
    drafter = model_of(target, nodes=60, **choices).eval().drafter()
    seen = watch(drafter)
    exact(target, prompts[:3], drafter, Fixed(drafter.limit), max_new_tokens=24, sampling=sampling, slots=3)
    reached = max(depth for one in seen for depth in one.draft.reach())
    assert reached > 2 * SMALL_OF["specblock"]["slots"] - (sampling.temperature == 0) * 3
