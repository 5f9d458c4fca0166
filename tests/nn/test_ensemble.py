"""Drafters that share a draft: each is told of its own nodes, whatever was cut from the union before it was
verified."""

from types import SimpleNamespace
from typing import Any

import torch

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.nn.drafting.ensemble import Ensemble
from outrider.sampling.settings import Sampling

V = 9


class Fixed(Drafter):
    """Drafts one tree in every step and notes what it was told of it: tokens, parents, the kept path."""

    taps: tuple[int, ...] = ()

    def __init__(self, tokens: list[int], parents: list[int]):
        self.tree = Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(tokens)]))
        self.limit = len(tokens)
        self.told: list[tuple[Any, ...]] = []

    def allocate(self, cache: Any) -> None: ...
    def admit(self, *given: Any) -> None: ...
    def free(self, *given: Any) -> None: ...

    def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
        return self.tree

    def observe(self, memory: Any, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        self.told.append(
            (draft.ids[0], draft.tree[0], kept.paths[0], kept.next_tokens[0], scores.logits[0, :, 0].tolist())
        )


def run(kept: list[int], path: list[int]) -> tuple[Fixed, Fixed]:
    """Two drafters whose union [1, 2, 3, 4, 5, 6] is cut to `kept` and then accepted along `path`."""
    #  one: 1 -> 3, 2        other: 2 -> 4 -> 5, 6
    one, other = Fixed([1, 2, 3], [-1, -1, 0]), Fixed([2, 4, 5, 6], [-1, 0, 1, -1])
    both = Ensemble([one, other], 9)
    state = DecodeState(1, 100)
    state.admit(0, Request([7, 8], 50, Sampling()))
    memory = both.allocate(SimpleNamespace(slots=1))
    union = Draft.empty(1)
    for part in range(2):
        union = both.join(
            memory, part, union, both.ask(memory, part, state, torch.tensor([9])), torch.tensor([9]), None
        )
    assert (union.ids, union.tree) == ([[1, 2, 3, 4, 5, 6]], ((-1, -1, 0, 1, 3, -1),))
    draft = union.only([kept])
    state.tokens[0] += [*(draft.ids[0][n] for n in path), 0]
    logits = torch.arange(len(kept) + 1.0)[None, :, None].expand(-1, -1, V)
    both.tell(memory, state, draft, Accepted([path], [0], [0]), Scores(logits, None, None, None, None))
    return one, other


def test_a_part_is_told_of_its_nodes_where_they_stood_in_what_was_verified():
    """Catches a node looked for where it stood in the union, once the union was cut."""
    one, other = run(kept=[1, 3, 4], path=[0, 1, 2])
    # of its three nodes one was verified, and was kept; what the other drafted behind it is a second step
    assert one.told == [([2], (-1,), [0], 4, [0, 1]), ([5], (-1,), [0], 0, [2, 3])]
    assert other.told == [([2, 4, 5], (-1, 0, 1), [0, 1, 2], 0, [0, 1, 2, 3])]
