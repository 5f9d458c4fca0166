"""What prompt lookup does beyond a chain from its own text: trees, and memories that requests share."""

import pytest
import torch

from outrider import drafters
from outrider.decoding.state import DecodeState, Request
from outrider.generation import generate
from outrider.retrieval import native_trie
from outrider.retrieval.trie import Trie
from outrider.sampling.settings import Sampling

ngram = drafters.find("ngram")
SHAPES = ("chain", "recency", "frequency")


@pytest.fixture(params=["native", "python"])
def either(request, monkeypatch):
    """On either trie."""
    if request.param == "python":
        monkeypatch.setattr(native_trie, "fastest", Trie)


class Slots:
    slots = 4


def asking(text: list[int], tenant: str = "") -> Request:
    return Request(text, 9, Sampling(), tenant=tenant)


def drafts(drafter, memory, requests: dict[int, Request], nodes: int = 6) -> list[list[int]]:
    """What is drafted first for these slots' requests, which then are over."""
    state = DecodeState(4, 1000)
    for row, request in requests.items():
        state.admit(row, request)
    draft = drafter.propose(memory, state, torch.full((len(requests),), nodes))
    drafter.observe(memory, state, draft, None, None)
    drafter.free(memory, list(requests))
    return [tokens[:size] for tokens, size in zip(draft.tokens.tolist(), draft.sizes.tolist(), strict=True)]


def made(**choices):
    config = ngram.Config(**{"shortest": 1, "longest": 3, "nodes": 6, **choices})

    class TreeTarget:
        class spec:
            mode, name = "tree", "t"

    return ngram.build(config, TreeTarget)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("tree", SHAPES)
def test_by_default_a_slot_used_again_carries_nothing_over(tree):
    """Catches a text that is found by the next request of its slot, or by its neighbour."""
    drafter = made(tree=tree)
    memory = drafter.allocate(Slots())
    first, beside = drafts(drafter, memory, {0: asking([1, 2, 3, 1, 2]), 1: asking([5, 1, 2])})
    assert first[0] == 3 and beside == []
    assert drafts(drafter, memory, {0: asking([7, 1, 2])}) == [[]]
    assert not drafter.tries.by_tenant.memories


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("tree", SHAPES)
def test_what_one_tenant_wrote_never_shows_in_anothers_drafts(tree):
    """Catches a memory that is shared too widely; the two texts have no token in common but the one that is looked
    up."""
    drafter = made(tree=tree, shared="tenant")
    memory = drafter.allocate(Slots())
    drafts(drafter, memory, {0: asking([1, 2, 3, 4], "a"), 1: asking([1, 12, 13, 14], "b")})
    for _ in range(2):
        found = drafts(drafter, memory, {0: asking([1], "b"), 1: asking([1]), 2: asking([1], "a")})
        assert [own[:3] for own in found] == [[12, 13, 14], [], [2, 3, 4]]
    texts = [[1, 2, 3, 4, 1, 2, 3], [1, 12, 13, 14, 1, 12]]
    for text, tenant in zip(texts * 3, "ababab", strict=True):
        (found,) = drafts(drafter, memory, {3: asking(text, tenant)})
        assert set(found) <= set(texts["ab".index(tenant)])
    drafter = made(tree=tree, shared="all")
    memory = drafter.allocate(Slots())
    drafts(drafter, memory, {0: asking([1, 2, 3, 4], "a")})
    assert drafts(drafter, memory, {1: asking([1], "b")})[0][:3] == [2, 3, 4]


def test_a_shared_memory_outlives_the_batch_and_learns_texts_to_their_end(target, prompts):
    """Catches a memory that goes with `allocate`, and a last block that nobody can find."""
    drafter = made(tree="chain", shared="tenant", length=7, shortest=2)
    first, again = (generate(target, prompts[2], drafter, max_new_tokens=33)[0] for _ in range(2))
    assert first.tokens == again.tokens
    assert again.steps < first.steps
    cursor = drafter.tries.by_tenant.of("").cursor()
    cursor.follow(first.tokens)
    assert cursor.match == 4


def test_of_many_tenants_those_away_longest_are_forgotten():
    """Catches memories that pile up, and an order by arrival instead of by use."""
    drafter = made(shared="tenant", tenants=2)
    memory = drafter.allocate(Slots())
    for tenant in "abac":
        drafts(drafter, memory, {0: asking([1, 2, 3], tenant)})
    assert list(drafter.tries.by_tenant.memories) == ["a", "c"]
    found = [drafts(drafter, memory, {0: asking([1], tenant)})[0] for tenant in "ab"]
    assert found == [[2, 3], []]


def test_settings_that_cannot_be_are_refused():
    """Catches an assertion deep in the trie, and a drafter that never proposes."""
    for wrong in (
        {"capacity": 10}, {"longest": 700, "capacity": 1000}, {"shared": "yes"}, {"tree": "wide"},
        {"shortest": 5, "longest": 3},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="capacity|shared|tree|shortest"):
            ngram.Config(**wrong)
