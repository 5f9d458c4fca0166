"""Twins of the law agree with it; verdicts are well formed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.accept import accept, accept_greedy, overlap
from outrider.decoding.draft import Draft
from outrider.decoding.sampling import Streams

V = 4


@st.composite
def drafts(draw, with_q: bool = False):
    slots, nodes = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    parents = [[draw(st.integers(-1, n - 1)) for n in range(nodes)] for _ in range(slots)]
    tokens = [[draw(st.integers(-1, V)) for _ in range(nodes)] for _ in range(slots)]
    sizes = [draw(st.integers(0, nodes)) for _ in range(slots)]
    seed = draw(st.integers(0, 2**20))
    q = None
    if with_q and draw(st.booleans()):
        q = torch.rand(slots, nodes, V, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        q = q / q.sum(-1, keepdim=True)
    as_tensor = lambda rows: torch.tensor(rows, dtype=torch.int64).view(slots, nodes)
    return Draft(as_tensor(tokens), as_tensor(parents), torch.tensor(sizes), q), seed


def streams_of(slots: int, seed: int) -> Streams:
    return Streams(torch.arange(slots) + seed, torch.zeros(slots, dtype=torch.int64))


def law_of(draft: Draft, seed: int) -> torch.Tensor:
    slots, nodes = draft.tokens.shape
    p = torch.randn(slots, nodes + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * p).softmax(-1)


def well_formed(draft: Draft, verdict) -> None:
    assert verdict.path.shape == (len(draft.sizes), int(verdict.accepted.max()))
    for b, size in enumerate(draft.sizes.tolist()):
        kept = int(verdict.accepted[b])
        path = verdict.path[b].tolist()
        at = -1
        for n in path[:kept]:
            assert at < n < size
            assert int(draft.parents[b, n]) == at
            assert 0 <= int(draft.tokens[b, n]) < V
            at = n
        assert path[kept:] == [-1] * (len(path) - kept)
        assert 0 <= int(verdict.next_token[b]) < V


@given(drafts())
def test_the_greedy_twin_is_the_law_with_p_one_hot(made):
    """Catches a twin that follows another child, counts otherwise, or pads otherwise.  q None and q one-hot, both."""
    draft, seed = made
    p = law_of(draft, seed)
    choice = p.argmax(-1)
    one_hot = torch.nn.functional.one_hot(choice, V).double()
    streams = streams_of(len(draft.sizes), seed)
    twin = accept_greedy(draft, choice, V)
    for q in (None, torch.nn.functional.one_hot(draft.tokens.clamp(0, V - 1), V).double()):
        law = accept(Draft(draft.tokens, draft.parents, draft.sizes, q), one_hot, streams)
        well_formed(draft, law)
        assert law.kept() == twin


@given(drafts(with_q=True))
def test_every_verdict_is_a_path_from_the_anchor(made):
    """Catches a path that jumps, uses padding, or holds an id that is none."""
    draft, seed = made
    verdict = accept(draft, law_of(draft, seed), streams_of(len(draft.sizes), seed))
    well_formed(draft, verdict)
    outside = (draft.tokens < 0) | (draft.tokens >= V)
    live = torch.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
    assert verdict.unlawful.tolist() == (outside & live).sum(-1).tolist()


@given(drafts(with_q=True))
def test_a_verdict_does_not_depend_on_the_slots_beside_it(made):
    """Catches a batch that is judged as one."""
    draft, seed = made
    p = law_of(draft, seed)
    together = accept(draft, p, streams_of(len(draft.sizes), seed))
    for b in range(len(draft.sizes)):
        q = None if draft.q is None else draft.q[b : b + 1]
        one = Draft(draft.tokens[b : b + 1], draft.parents[b : b + 1], draft.sizes[b : b + 1], q)
        alone = accept(one, p[b : b + 1], streams_of(1, seed + b))
        kept = int(together.accepted[b])
        assert int(alone.accepted[0]) == kept
        assert alone.path[0].tolist() == together.path[b, :kept].tolist()
        assert int(alone.next_token[0]) == int(together.next_token[b])


@given(drafts(with_q=True))
def test_padding_behind_a_slots_size_changes_nothing(made):
    """Catches a verdict that reads what is not there."""
    draft, seed = made
    if draft.tokens.shape[1] == 0:
        return
    p = law_of(draft, seed)
    live = torch.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
    other = Draft(draft.tokens.where(live, 1), draft.parents.where(live, -1), draft.sizes, draft.q)
    streams = streams_of(len(draft.sizes), seed)
    for one, two in zip(accept(draft, p, streams), accept(other, p, streams), strict=True):
        assert torch.equal(one, two)


def test_overlap_is_one_minus_the_total_variation():
    """Catches an expectation that is not the law's: by brute force over every pair of draft and coin."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 50, 7, generator=generator, dtype=torch.float64).softmax(-1)
    accepted = (q * torch.minimum(torch.ones_like(p), p / q)).sum(-1)
    torch.testing.assert_close(overlap(p, q), accepted)
    torch.testing.assert_close(overlap(p, q), 1 - 0.5 * (p - q).abs().sum(-1))
    torch.testing.assert_close(overlap(p, p), torch.ones(50, dtype=torch.float64))


def test_overlap_is_the_share_that_is_kept():
    """Catches a promise of acceptance that `accept` does not hold.  Binomial over 20,000 slots; false alarm 1e-6."""
    from scipy import stats

    p = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    slots = 20_000
    streams = streams_of(slots, 0)
    from outrider.decoding.sampling import Purpose

    tokens = streams.draw(q.expand(slots, -1), 0, Purpose.DRAFT)[:, None]
    draft = Draft.chain(tokens, torch.ones(slots, dtype=torch.int64), q.expand(slots, 1, -1))
    kept = int(accept(draft, p.expand(slots, 2, -1), streams).accepted.sum())
    assert stats.binomtest(kept, slots, float(overlap(p, q))).pvalue > 1e-6


def test_a_q_with_negative_entries_is_no_distribution():
    """Catches a check by absolute values alone: [-0.3, 0.7] has the sum of 1 that way."""
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    for q in ([-0.3, 0.7], [-0.0005, 1.0005], [0.0, 0.5]):
        draft = Draft.chain(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([[q]]))
        assert accept(draft, p, streams_of(1, 0)).unlawful.tolist() == [1]
