"""The acceptance rule's answers are well formed, and hang on nothing but their own slot's draft, distribution and
noise."""

from dataclasses import replace

import torch
from decoding.drafts import V, distribution_of, drafts, slot_of, streams_of, well_formed
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.decoding.accept import accept, overlap
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.sampling.fast import accept_greedy


@given(drafts(with_q=True))
def test_what_is_kept_is_a_path_from_the_anchor(made):
    """Catches a path that jumps, uses padding or holds an id that is none; and a batch that is judged as one."""
    draft, seed = made
    p, slots = distribution_of(draft, seed), len(draft.sizes)
    accepted = accept(draft, p, streams_of(slots, seed))
    well_formed(draft, accepted)
    live = torch.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
    assert accepted.invalid == (((draft.tokens < 0) | (draft.tokens >= V)) & live).sum(-1).tolist()
    other = Draft(draft.tokens.where(live, 1), draft.parents.where(live, -1), draft.sizes, draft.q)
    assert accept(other, p, streams_of(slots, seed)) == accepted
    for b in range(slots):
        q = None if draft.q is None else draft.q[b : b + 1]
        one = Draft(draft.tokens[b : b + 1], draft.parents[b : b + 1], draft.sizes[b : b + 1], q)
        assert accept(one, p[b : b + 1], streams_of(1, seed + b)) == slot_of(accepted, b)


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


def test_overlap_is_the_share_that_is_kept():
    """Catches an overlap that `accept` does not hold, and a seeded draft that is met less often than Poisson matching
    says: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i).  Binomial over 20,000 slots; false alarm 1e-6."""
    slots, p = 20_000, torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    met = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum())
    for seeded, promised in ((None, float(overlap(p, q))), ([True] * slots, met)):
        streams = streams_of(slots, 0, seeded)
        tokens = streams.draw(q.expand(slots, -1), 0, Purpose.DRAFT)[:, None]
        draft = Draft.chain(tokens, torch.ones(slots, dtype=torch.int64), q.expand(slots, 1, -1))
        kept = sum(accept(draft, p.expand(slots, 2, -1), streams).counts)
        assert stats.binomtest(kept, slots, promised).pvalue > 1e-6
    one, other = torch.rand(2, 50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    torch.testing.assert_close(overlap(one, other), 1 - 0.5 * (one - other).abs().sum(-1))


def test_a_q_with_negative_entries_is_no_distribution():
    """Catches a check by absolute values alone: [-0.3, 0.7] has the sum of 1 that way."""
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    for q in ([-0.3, 0.7], [-0.0005, 1.0005], [0.0, 0.5]):
        draft = Draft.chain(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([[q]]))
        assert accept(draft, p, streams_of(1, 0)).invalid == [1]
