"""What prompt lookup does beyond a chain from its own text: trees, and memories that requests share."""

from __future__ import annotations

import pytest
import torch
from conftest import Case

from outrider import drafters
from outrider.decoding.state import DecodeState, Request
from outrider.generation import generate, serve
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


def test_a_memory_shared_by_all_is_the_planted_fault():
    """The test above has teeth: where all share, one finds the other's words."""
    drafter = made(tree="recency", shared="all")
    memory = drafter.allocate(Slots())
    drafts(drafter, memory, {0: asking([1, 2, 3, 4], "a")})
    (found,) = drafts(drafter, memory, {1: asking([1], "b")})
    assert found[:3] == [2, 3, 4]


def test_a_shared_memory_outlives_the_batch_and_learns_texts_to_their_end(target, prompts):
    """Catches a memory that goes with `allocate`, and a last block that nobody can find: asked again, a text is known
    whole."""
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


@pytest.mark.parametrize(("tree", "shared"), [("chain", "tenant"), ("recency", "all"), ("frequency", "tenant")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=5)], ids=["greedy", "seeded"])
def test_a_text_does_not_depend_on_what_is_remembered(tree, shared, sampling, target, prompts):
    """Catches a memory that moves what is kept: with a seed, and without noise, every text is as without a drafter."""
    drafter = made(tree=tree, shared=shared, capacity=1000)
    prompts = prompts[3:]
    wanted = [own.tokens for own in generate(target, prompts, max_new_tokens=16, sampling=sampling, slots=3)]
    for _ in range(2):
        found = [[] for _ in prompts]
        requests = [Request(prompt, 16, sampling, tenant="ab"[n % 2]) for n, prompt in enumerate(prompts)]
        for progress in serve(target, requests, drafter, slots=3):
            found[progress.request] += progress.tokens
        assert found == wanted


def test_a_tree_takes_fewer_steps_than_a_chain_and_a_shared_memory_fewer_still(target, prompts):
    """Catches trees in a bad order, and a memory that is never asked; counts of steps, the same in every run."""

    def steps(**choices) -> list[int]:
        drafter = made(length=7, nodes=16, **choices)
        return [
            sum(own.steps for own in generate(target, prompts, drafter, max_new_tokens=30, slots=8)) for _ in range(2)
        ]

    chain, recency, frequency = (steps(tree=tree) for tree in SHAPES)
    assert chain[0] == chain[1] and recency[0] < chain[0] and frequency[0] < chain[0]
    shared = steps(tree="frequency", shared="all")
    assert shared[1] < shared[0] <= frequency[0]


def test_under_a_target_that_verifies_no_trees_it_drafts_a_chain_and_says_so(target, workshop, monkeypatch, caplog):
    """Catches a tree of which the loop would keep the trunk alone."""
    spec = type("Spec", (), {"mode": "chain", "name": "t"})
    drafter = ngram.build(ngram.Config(tree="recency", length=5), type("Target", (), {"spec": spec}))
    assert drafter.limit == 5 and drafter.config.tree == "chain"
    assert "verifies no trees" in caplog.text
    assert workshop.build(Case("ngram", {"tree": "recency"}), target).limit == 16


def test_settings_that_have_no_effect_are_named(caplog):
    """Catches a setting that is ignored in silence."""
    made(nodes=9, capacity=5000, tenants=3)
    assert "ngram.nodes and capacity and tenants has no effect" in caplog.text
    caplog.clear()
    made(tree="recency", nodes=9, capacity=5000)
    made(shared="tenant", nodes=16, capacity=5000, tenants=3)
    assert not caplog.text


@pytest.mark.parametrize(
    "wrong", [{"capacity": 10}, {"longest": 700, "capacity": 1000}, {"shared": "yes"}, {"tree": "wide"}]
)
def test_settings_that_cannot_be_are_refused(wrong):
    """Catches an assertion deep in the trie."""
    with pytest.raises(ValueError, match="capacity|shared|tree"):
        ngram.Config(**wrong)
