"""The acceptance rule's answers are well formed, and hang on nothing but their own slot's draft, distribution and
noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoding.drafts import V, distribution_of, drafts, slot_of, streams_of, well_formed
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.decoding.accept import Accepted, accept, accept_top1, overlap
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.errors import DrafterError
from outrider.sampling.fast import accept_greedy


@given(drafts(with_q=True))
def test_what_is_kept_is_a_path_from_the_anchor(made):
    """Catches a path that jumps, uses padding, or holds an id that is none."""
    draft, seed = made
    accepted = accept(draft, distribution_of(draft, seed), streams_of(len(draft.sizes), seed))
    well_formed(draft, accepted)
    outside = (draft.tokens < 0) | (draft.tokens >= V)
    live = torch.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
    assert accepted.invalid == (outside & live).sum(-1).tolist()


@given(drafts(with_q=True))
def test_what_is_kept_does_not_depend_on_the_slots_beside_it(made):
    """Catches a batch that is judged as one."""
    draft, seed = made
    p = distribution_of(draft, seed)
    together = accept(draft, p, streams_of(len(draft.sizes), seed))
    for b in range(len(draft.sizes)):
        q = None if draft.q is None else draft.q[b : b + 1]
        one = Draft(draft.tokens[b : b + 1], draft.parents[b : b + 1], draft.sizes[b : b + 1], q)
        assert accept(one, p[b : b + 1], streams_of(1, seed + b)) == slot_of(together, b)


@given(drafts(with_q=True))
def test_padding_after_a_slots_size_changes_nothing(made):
    """Catches an answer that reads what is not there."""
    draft, seed = made
    if draft.tokens.shape[1] == 0:
        return
    p = distribution_of(draft, seed)
    live = torch.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
    other = Draft(draft.tokens.where(live, 1), draft.parents.where(live, -1), draft.sizes, draft.q)
    streams = streams_of(len(draft.sizes), seed)
    assert accept(draft, p, streams) == accept(other, p, streams)


def test_accepted_from_tensors_keeps_as_many_nodes_as_were_counted():
    """Catches an order that is cut at the widest slot's count."""
    order, counts = torch.tensor([[3, 1, 0], [0, 2, 1]]), torch.tensor([2, 0])
    accepted = Accepted.of(order, counts, torch.tensor([5, 6]), torch.tensor([0, 1]))
    assert accepted == Accepted([[3, 1], []], [5, 6], [0, 1])
    assert (accepted.counts, accepted.rows(0), accepted.rows(1)) == ([2, 0], [0, 4, 2], [0])


# ── slots with a seed, which draft with the target's own noise ────────────────────────────────────────────────────────


@given(drafts(with_q=True), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_slot_with_a_seed_is_judged_as_deterministic_and_leaves_its_neighbours_alone(made, which):
    """Catches a q that is read, or a residual carried, where the target's own draw must be emitted; and a seed's
    reach."""
    draft, seed = made
    slots = len(draft.sizes)
    p, seeded = distribution_of(draft, seed), which[:slots]
    found = accept(draft, p, streams_of(slots, seed, seeded))
    free = accept(draft, p, streams_of(slots, seed))
    certain = accept(replace(draft, q=None), p, streams_of(slots, seed))
    for b, is_seeded in enumerate(seeded):
        assert slot_of(found, b) == slot_of(certain if is_seeded else free, b)


@given(drafts(with_q=True))
def test_under_a_seed_the_targets_own_draws_are_emitted_whatever_was_drafted(made):
    """Catches a token that is not the race's of its place: depth by depth, by hand."""
    draft, seed = made
    slots = len(draft.sizes)
    p, streams = distribution_of(draft, seed), streams_of(slots, seed, [True] * slots)
    accepted = accept(draft, p, streams)
    for b in range(slots):
        emitted = [*(int(draft.tokens[b, n]) for n in accepted.paths[b]), accepted.next_tokens[b]]
        rows = accepted.rows(b)
        drawn = [int(streams.draw(p[:, row], depth, Purpose.TARGET)[b]) for depth, row in enumerate(rows)]
        assert emitted == drawn
        # no child of the last row was the target's token
        last = rows[-1] - 1
        children = [n for n in range(int(draft.sizes[b])) if int(draft.parents[b, n]) == last]
        assert emitted[-1] not in [int(draft.tokens[b, n]) for n in children]


P = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
SLOTS = 20_000


def kept_of(seeded: bool) -> int:
    """How often one node drawn from Q is kept under P, of SLOTS."""
    streams = streams_of(SLOTS, 0, [seeded] * SLOTS if seeded else None)
    tokens = streams.draw(Q.expand(SLOTS, -1), 0, Purpose.DRAFT)[:, None]
    draft = Draft.chain(tokens, torch.ones(SLOTS, dtype=torch.int64), Q.expand(SLOTS, 1, -1))
    return sum(accept(draft, P.expand(SLOTS, 2, -1), streams).counts)


def test_a_draft_from_the_targets_noise_is_met_as_often_as_the_paper_says():
    """sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i).  Binomial; false alarm 1e-6."""
    promised = float((1 / torch.maximum(P / P[:, None], Q / Q[:, None]).sum(-1)).sum())
    distance = float((P - Q).abs().sum() / 2)
    assert promised >= (1 - distance) / (1 + distance)
    assert stats.binomtest(kept_of(seeded=True), SLOTS, promised).pvalue > 1e-6


@pytest.mark.parametrize("seeded", [True, False], ids=["as the rule does", "by its q"])
def test_a_draft_from_the_targets_noise_judged_by_its_q_is_caught(seeded):
    """Planted fault: the correction comes from the noise that chose the draft.  Chi-square; false alarm 1e-6."""
    p, q = torch.tensor([0.55, 0.35, 0.05, 0.05], dtype=torch.float64), torch.full((4,), 0.25, dtype=torch.float64)
    noise = streams_of(SLOTS, 0, [True] * SLOTS)
    tokens = noise.draw(q.expand(SLOTS, -1), 0, Purpose.DRAFT)[:, None]
    draft = Draft.chain(tokens, torch.ones(SLOTS, dtype=torch.int64), q.expand(SLOTS, 1, -1))
    accepted = accept(draft, p.expand(SLOTS, 2, -1), noise if seeded else streams_of(SLOTS, 0))
    kept = zip(accepted.paths, accepted.next_tokens, tokens[:, 0].tolist(), strict=True)
    first = torch.tensor([token if path else following for path, following, token in kept])
    chance = stats.chisquare(torch.bincount(first, minlength=4).numpy(), (p * SLOTS).numpy()).pvalue
    assert (chance > 1e-6) == seeded


# ── deterministic drafts ──────────────────────────────────────────────────────────────────────────────────────────────


@given(drafts())
def test_the_path_of_a_deterministic_draft_asks_for_no_row_that_nobody_walks_through(made):
    """Catches work over all rows: what is asked for is the anchor's row, and then those of kept nodes."""
    draft, seed = made
    p, streams = distribution_of(draft, seed), streams_of(len(draft.sizes), seed)
    every, asked = torch.arange(len(p)), []

    def choose(rows: torch.Tensor, depth: int) -> torch.Tensor:
        asked.append(rows.tolist())
        return streams.draw(p[every, rows], depth, Purpose.TARGET)

    accepted = accept_top1(draft, V, choose)
    assert accepted == accept(draft, p, streams)
    for b in range(len(p)):
        assert {rows[b] for rows in asked} == set(accepted.rows(b))
    assert len(asked) == max(accepted.counts) + 1


@given(drafts())
def test_the_greedy_way_is_the_rule_with_p_one_hot(made):
    """Catches a path that follows another child, or counts otherwise.  q None and q one-hot, both."""
    draft, seed = made
    choice = distribution_of(draft, seed).argmax(-1)
    one_hot = torch.nn.functional.one_hot(choice, V).double()
    streams = streams_of(len(draft.sizes), seed)
    found = accept_greedy(draft, choice.tolist(), V)
    well_formed(draft, found)
    for q in (None, torch.nn.functional.one_hot(draft.tokens.clamp(0, V - 1), V).double()):
        assert accept(Draft(draft.tokens, draft.parents, draft.sizes, q), one_hot, streams) == found


# ── how much is kept ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_overlap_is_one_minus_the_total_variation():
    """Catches an expectation that is not the distribution's: by brute force over every pair of draft and coin."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 50, 7, generator=generator, dtype=torch.float64).softmax(-1)
    accepted = (q * torch.minimum(torch.ones_like(p), p / q)).sum(-1)
    torch.testing.assert_close(overlap(p, q), accepted)
    torch.testing.assert_close(overlap(p, q), 1 - 0.5 * (p - q).abs().sum(-1))
    torch.testing.assert_close(overlap(p, p), torch.ones(50, dtype=torch.float64))


def test_overlap_is_the_share_that_is_kept():
    """Catches a promise of acceptance that `accept` does not hold.  Binomial over 20,000 slots; false alarm 1e-6."""
    assert stats.binomtest(kept_of(seeded=False), SLOTS, float(overlap(P, Q))).pvalue > 1e-6


def test_a_q_with_negative_entries_is_no_distribution():
    """Catches a check by absolute values alone: [-0.3, 0.7] has the sum of 1 that way."""
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    for q in ([-0.3, 0.7], [-0.0005, 1.0005], [0.0, 0.5]):
        draft = Draft.chain(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([[q]]))
        assert accept(draft, p, streams_of(1, 0)).invalid == [1]


@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_q_over_another_vocabulary_is_refused(width):
    """Catches one that broadcasts in silence."""
    draft = Draft(
        torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), -1), torch.tensor([2]), torch.ones(1, 2, width) / width
    )
    with pytest.raises(DrafterError, match=f"tokens, got {width}"):
        accept(draft, torch.full((1, 3, 4), 0.25), streams_of(1, 0))
