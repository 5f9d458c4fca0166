"""Token recycling: what is remembered, what is proposed, and that nothing stays behind in a slot."""

from types import SimpleNamespace

import torch

from outrider import drafters
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.retrieval.recycle import Successors
from outrider.sampling.settings import Sampling

recycle = drafters.find("recycle")


def begun(text: list[int], **settings):
    """A drafter, its memory and the state of two slots, the first of which has this text."""
    drafter, state = recycle.Recycle(recycle.Config(**settings), 10), DecodeState(2, 100)
    state.admit(0, Request(text, 50, Sampling(), tenant="one"))
    return drafter, drafter.allocate(SimpleNamespace(slots=2)), state


def test_the_last_write_wins():
    """Catches an older guess that stays, also where one step brings a token twice."""
    table = Successors(9, 2)
    table.learn([3, 5, 3], torch.tensor([[1, 2, 0], [6, 7, 0], [4, 8, 0]]))
    assert table.table[3].tolist() == [4, 8] and table.table[5].tolist() == [6, 7]
    table.learn([5, -1, 9], torch.tensor([[0, 1], [2, 2], [2, 2]]))
    assert table.table[5].tolist() == [0, 1]
    assert table.table[[0, 1, 2, 4, 6, 7, 8]].unique().tolist() == [-1]


def test_every_verified_node_teaches_and_what_was_kept_teaches_last():
    """Catches rows that are off by one: the anchor's is row 0."""
    drafter, memory, state = begun([1, 2], successors=1)
    draft = Draft(torch.tensor([[3, 4, 4, 9]]), torch.tensor([[-1, -1, 0, -1]]), torch.tensor([3]))
    state.tokens[0] += [3, 4, 5]
    scores = torch.nn.functional.one_hot(torch.tensor([[3, 4, 8, 5, 7]]), 10).double()
    drafter.observe(memory, state, draft, Accepted([[0, 2]], [5], [0]), Scores(scores, scores, None))
    known = memory[0].table[:, 0].tolist()
    # node 1 said 8 after token 4, node 2 of the path said 5; padding says nothing
    assert known == [-1, -1, 3, 4, 5, -1, -1, -1, -1, -1]
    # a text that ended inside its block: there is no next token, so the anchor stands one token further back
    drafter, memory, state = begun([1, 2], successors=1)
    state.tokens[0] += [3]
    ended, draft = Accepted([[0]], [-1], [0]), Draft.chain(torch.tensor([[3]]), torch.tensor([1]))
    drafter.observe(memory, state, draft, ended, Scores(scores[:, :2], scores[:, :2], None))
    assert memory[0].table[:3, 0].tolist() == [-1, -1, 3]


def test_tenants_share_tables_only_if_asked_and_only_their_own():
    """Catches one tenant's text in another's drafts, and a table that is lost with its request."""
    drafter, memory, state = begun([1, 2], shared=True)
    state.tokens[0] += [3]
    scores = torch.randn(1, 1, 10)
    drafter.observe(memory, state, Draft.empty(1), Accepted([[]], [3], [0]), Scores(scores, scores, None))
    drafter.free(memory, [0])
    for tenant, size in (("one", 4), ("two", 0)):
        state.free(0)
        state.admit(0, Request([1, 2], 50, Sampling(), tenant=tenant))
        assert drafter.propose(memory, state, torch.tensor([4])).live == [size]
