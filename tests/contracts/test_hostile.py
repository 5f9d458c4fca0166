"""At temperature 0 the output never changes, whatever a drafter returns; a draft of the wrong shape is refused."""

from typing import Any

import pytest
import torch
from contracts.parties import Cutting, Proposer

from outrider.decoding.draft import Draft
from outrider.errors import DrafterError
from outrider.generation import generate
from outrider.policies.auto import Auto
from outrider.policies.fixed import Fixed


class Returns(Proposer):
    """Proposes what `make(slots, budget, generator)` makes."""

    confidence_before_draw = True

    def __init__(self, make, limit: int = 4):
        self.make, self.limit = make, limit

    def propose(self, memory, state, budget):
        return self.make(len(state.rows), budget, memory)


def integers(low, high, shape, generator):
    return torch.randint(low, high, shape, generator=generator)


def ids(shape, generator):
    """Mostly ids of the vocabulary, some outside it."""
    tokens = integers(0, 64, shape, generator)
    wild = torch.tensor([-1, -(2**40), 64, 2**40, 2**62, -(2**63)])[integers(0, 6, shape, generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.3, wild, tokens)


def chains(slots, budget, generator):
    """Ids, sizes, q and confidences without sense."""
    nodes = int(integers(1, 5, (), generator))
    q = torch.randn(slots, nodes, 64, generator=generator)
    q[torch.rand(slots, nodes, generator=generator) < 0.3] = float("nan")
    confidence = torch.randn(slots, nodes, generator=generator) * 3
    confidence[torch.rand(slots, nodes, generator=generator) < 0.2] = float("nan")
    return Draft.chain(ids((slots, nodes), generator), integers(-3, nodes + 6, (slots,), generator), q, confidence)


def trees(slots, budget, generator):
    """Parents out of order as well."""
    nodes = int(integers(1, 5, (), generator))
    parents = integers(-1, nodes, (slots, nodes), generator)
    return Draft(ids((slots, nodes), generator), parents, integers(-3, nodes + 6, (slots,), generator))


def wild_parents(slots, budget, generator):
    """Parents that point to no node at all; the slots' sound beginnings differ."""
    nodes = 4
    parents = torch.arange(-1, nodes - 1).repeat(slots, 1)
    wild = torch.tensor([-2, -50, nodes, 999, 2**40])[integers(0, 5, (slots, nodes), generator)]
    parents = torch.where(torch.rand(slots, nodes, generator=generator) < 0.4, wild, parents)
    return Draft(ids((slots, nodes), generator), parents, torch.full((slots,), nodes))


def too_many(slots, budget, generator):
    """More nodes than its own limit and than the budget."""
    return Draft.chain(integers(0, 64, (slots, 40), generator), torch.full((slots,), 40))


HOSTILE = [
    (chains, Fixed(4)), (chains, Cutting(4, 0.5)), (chains, Auto(4)),
    (trees, Auto(4)), (wild_parents, Fixed(4)), (too_many, Fixed(4)),
]  # fmt: skip
"""Only chains come with confidences, which the policies read."""


@pytest.mark.parametrize(("make", "policy"), HOSTILE)
def test_greedy_output_never_changes(make, policy, target, prompts, plain):
    """Catches an index error, a NaN or a wrong mask that a faulty drafter could bring about."""
    found = generate(target, prompts, Returns(make), max_new_tokens=20, slots=3, policy=policy)
    assert [generation.tokens for generation in found] == [plain(target, prompt, 20) for prompt in prompts]


def test_a_false_promise_of_a_chain_changes_nothing(target, prompts, plain):
    """Catches a walk along parents that the mask did not know: node n was scored behind node n - 1, judged beside
    it."""
    texts = {tuple(prompt): prompt + plain(target, prompt, 48) for prompt in prompts}

    class Liar(Proposer):
        """The first node is wrong, the second is the true next token, both said to hang under the anchor."""

        def propose(self, memory, state, budget):
            rows = []
            for row in state.rows:
                text = state.tokens[row]
                whole = texts[tuple(state.requests[row].prompt)]
                coming = whole[len(text) : len(text) + 1] or [0]
                rows.append([(coming[0] + 1) % 64, coming[0], 0, 0])
            tokens = torch.tensor(rows)
            return Draft(tokens, torch.full_like(tokens, -1), budget, branches=False)

    found = generate(target, prompts, Liar(), max_new_tokens=40, slots=3)
    assert [generation.tokens for generation in found] == [plain(target, prompt, 40) for prompt in prompts]


LONG, ONES, NODES = torch.int64, torch.ones(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
WRONG: dict[str, tuple[Any, str]] = {
    "slots": (Draft.chain(torch.zeros(3, 2, dtype=LONG), ONES), "slots"),
    "sizes": (Draft.chain(NODES, torch.ones(3, dtype=LONG)), "slots"),
    "flat tokens": (Draft(torch.zeros(2, dtype=LONG), torch.zeros(2, dtype=LONG), torch.ones(2)), "slots"),
    "parents": (Draft(torch.zeros(2, 3, dtype=LONG), NODES, torch.ones(2)), "slots"),
    "q": (Draft.chain(NODES, torch.ones(2), torch.ones(2, 1, 64)), "slots"),
    "confidence": (Draft.chain(NODES, torch.ones(2), None, torch.ones(2, 3)), "slots"),
    "nothing": (None, "must return a Draft of .*, got NoneType"),
    "a tensor": (NODES, "must return a Draft of .*, got Tensor"),
    "sizes of a list": (Draft.chain(NODES, [1, 1]), "sizes list"),
    "sizes of float32": (Draft.chain(NODES, torch.ones(2)), "sizes torch.float32"),
    "tokens of int32": (Draft.chain(NODES.int(), ONES), "tokens torch.int32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_draft_of_the_wrong_shape_is_refused(wrong, target, prompts):
    """Catches tensors that broadcast to something nobody meant, and an AttributeError somewhere in the loop, which does
    not say who was at fault."""
    draft, message = WRONG[wrong]
    with pytest.raises(DrafterError, match=message):
        generate(target, prompts[:2], Returns(lambda *_: draft), max_new_tokens=10)
