"""Learnt confidences follow what is kept, hang on nothing that is drawn later, and keep the law where they stop a draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import cases
from contracts.chances import emitted, keeps_the_law
from contracts.parties import Drawn, Proposer, TableTarget, Tree
from contracts.test_law import REPEATS

from outrider.decoding.accept import Kept
from outrider.decoding.confidence import Estimate, OnlineConfidence, _judged
from outrider.decoding.draft import Draft
from outrider.decoding.generate import advance, generate
from outrider.decoding.policy import ByConfidence
from outrider.decoding.state import DecodeState, Request

TARGET = TableTarget.random(5)
KINDS = ("ngram", "small_model", "dflash", "dspark")
CASES = [case for case in cases() if case.kind in KINDS and not case.is_variant]


# ── what is learnt ────────────────────────────────────────────────────────────────────────────────────────────────────


def taught(chance: Callable[[int, float], float], steps: int, draft_of: Callable[[torch.Tensor], Draft]) -> Estimate:
    """An estimate after chains of 4 whose node of depth d and feature x is kept with chance(d, x)."""
    noise = torch.Generator().manual_seed(0)
    estimate = Estimate()
    for _ in range(steps):
        x = torch.rand(1, 4, generator=noise)
        draft = draft_of(x)
        _, features = estimate.of(draft)
        kept = 0
        while kept < 4 and float(torch.rand(1, generator=noise)) < chance(kept, float(x[0, kept])):
            kept += 1
        estimate.learn(_judged(draft, draft, Kept([list(range(kept))], [0], [0]), features))
    return estimate


def bare(x: torch.Tensor) -> Draft:
    return Draft.chain(torch.zeros(x.shape, dtype=torch.int64), torch.tensor([4]))


def test_a_dependence_on_depth_is_learnt():
    """Catches depths that are mixed up, and rejections counted where no turn came."""
    planted = [0.9, 0.8, 0.5, 0.2]
    estimate = taught(lambda depth, _: planted[depth], 1500, bare)
    (found,), _ = estimate.of(bare(torch.rand(1, 4)))
    assert found == pytest.approx(planted, abs=0.12)


def test_a_drafters_own_confidence_is_begun_with_and_corrected():
    """Catches raw confidences that are ignored, and an over-confident head that is believed for ever."""

    def confident(x: torch.Tensor) -> Draft:
        return replace(bare(x), confidence=x)

    (found,), _ = Estimate().of(confident(torch.tensor([[0.2, 0.9, 0.5, 0.7]])))
    assert found == pytest.approx([0.2, 0.9, 0.5, 0.7], abs=1e-4)
    estimate = taught(lambda _, x: x**2, 2000, confident)
    for x in (0.3, 0.5, 0.7, 0.9):
        (found,), _ = estimate.of(confident(torch.full((1, 4), x)))
        assert found[:2] == pytest.approx([x**2] * 2, abs=0.1)


def test_a_sharp_q_is_trusted_more_than_a_flat_one():
    """Catches entropy or largest value with the wrong sign, or of the wrong node."""

    def drawn(x: torch.Tensor) -> Draft:
        q = torch.stack([0.5 + x / 2, 0.5 - x / 2], -1)
        return replace(bare(x), q=q)

    estimate = taught(lambda _, x: 0.1 + 0.8 * x, 1500, drawn)
    (found,), _ = estimate.of(drawn(torch.tensor([[0.9, 0.1, 0.9, 0.1]])))
    assert min(found[0], found[2]) > 0.65
    assert max(found[1], found[3]) < 0.35


def test_a_node_is_judged_when_its_turn_came():
    """Catches a younger sibling counted as rejected where its elder was kept, and nodes under one that was rejected.

    Nodes: 0 and 1 under the anchor, 2 and 3 under node 1, 4 under node 0, 5 under node 2.
    """
    parents = torch.tensor([[-1, -1, 1, 1, 0, 2]])
    draft = Draft(torch.tensor([[7, 8, 9, 7, 8, 9]]), parents, torch.tensor([6]))
    features = [[[float(n)] for n in range(6)]]

    def judged(path: list[int], following: int = 3, verified: Draft = draft) -> dict[int, tuple[int, bool]]:
        found = _judged(draft, verified, Kept([path], [following], [0]), features)
        return {int(node[0]): (depth, was_kept) for depth, node, was_kept in found}

    assert judged([]) == {0: (0, False), 1: (0, False)}
    assert judged([0]) == {0: (0, True), 4: (1, False)}
    assert judged([1, 2]) == {0: (0, False), 1: (0, True), 2: (1, True), 5: (2, False)}
    assert judged([1, 3]) == {0: (0, False), 1: (0, True), 2: (1, False), 3: (1, True)}
    assert judged([1], following=-1) == {0: (0, False), 1: (0, True)}
    # without nodes 0 and 4 the others have moved
    assert judged([0, 2], verified=draft.only([[1, 2, 3, 5]])) == {1: (0, True), 2: (1, False), 3: (1, True)}


def test_what_is_not_tried_any_more_is_trusted_again():
    """Catches a drafter that fails for a while, is cut at its first node, and so never comes back."""
    estimate = taught(lambda *_: 0.02, 200, bare)
    (low,), _ = estimate.of(bare(torch.rand(1, 4)))
    for _ in range(2000):
        estimate.learn([])
    (again,), _ = estimate.of(bare(torch.rand(1, 4)))
    assert low[0] < 0.1
    assert again[0] > 0.4


def test_no_feature_makes_an_estimate_infinite():
    """Catches logits of 0 and 1, NaN confidences, and weights that run away."""
    spoilt = replace(
        bare(torch.rand(1, 4)), confidence=torch.tensor([[0.0, 1.0, float("nan"), 2.0]]), q=torch.full((1, 4, 3), float("nan"))
    )
    estimate = Estimate()
    for path in ([], [0, 1, 2, 3]) * 20:
        (found,), features = estimate.of(spoilt)
        assert all(0 < chance < 1 for chance in found)
        estimate.learn(_judged(spoilt, spoilt, Kept([path], [0], [0]), features))


# ── the law ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stopping_by_what_was_learnt_keeps_the_law(case, workshop):
    """Catches a confidence that has seen its own token, and a q that no longer fits its node.  False alarm 1e-6."""
    drafter = OnlineConfidence(workshop.build(case, TARGET))
    assert keeps_the_law(TARGET, drafter, ByConfidence(drafter.limit, 0.3), prompt=REPEATS, slots=800)


@pytest.mark.parametrize("how", ["replacement", "without", "mixed"])
def test_drawn_trees_keep_the_law_and_are_cut(how):
    """As above, for siblings; and guards both against a policy that never cuts.  False alarm 1e-6."""
    tree = Tree(TARGET, [-1, -1, 0, 0, 1, 2], how)
    drafter, seen = OnlineConfidence(tree), []

    class Watching(ByConfidence):
        def keep(self, state: DecodeState, sizes: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
            seen.append((super().keep(state, sizes, confidence) < sizes).float().mean())
            return super().keep(state, sizes, confidence)

    assert keeps_the_law(TARGET, drafter, Watching(6, 0.3), slots=1500)
    assert max(seen) > 0.2


def test_an_estimate_that_sees_its_own_token_is_caught():
    """Planted fault: the q of the drawn token among the features."""

    def law(before: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.4, 0.6], dtype=torch.float64).expand(len(own), -1)

    class Peeking(OnlineConfidence):
        def propose(self, memory: Any, state: Any, budget: torch.Tensor) -> Draft:
            draft = super().propose(memory, state, budget)
            return replace(draft, confidence=draft.q.gather(-1, draft.tokens[..., None])[..., 0].float())

    uneven = TableTarget.of([0.7, 0.3])
    assert keeps_the_law(uneven, OnlineConfidence(Drawn(law, 2)), ByConfidence(2, 0.5))
    assert not keeps_the_law(uneven, Peeking(Drawn(law, 2)), ByConfidence(2, 0.5))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_text_is_the_targets_own(case, target, prompts, plain, drafter_of):
    """Catches a wrapper that tells its drafter less than happened, slots used again, and nodes that moved."""
    drafter = OnlineConfidence(drafter_of(case))
    counts = [9, 17, 5, 12, 3, 8, 14, 11]
    requests = [Request(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    found: list[list[int]] = [[] for _ in requests]
    for progress in advance(target, requests, drafter, policy=ByConfidence(drafter.limit, 0.3), slots=3):
        found[progress.request] += progress.tokens
    assert found == [plain(target, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]


# ── what it is for ────────────────────────────────────────────────────────────────────────────────────────────────────


class HalfRight(Proposer):
    """Six tokens, of which the first two are mostly right and the others mostly wrong; deterministic."""

    limit = 6

    def __init__(self, text: list[int]):
        self.text = text

    def propose(self, memory: torch.Generator, state: DecodeState, budget: torch.Tensor) -> Draft:
        at = len(state.tokens[0])
        coming = torch.tensor((self.text[at : at + 6] + [0] * 6)[:6])
        is_right = torch.rand(6, generator=memory) < torch.tensor([0.95, 0.9, 0.3, 0.1, 0.1, 0.1])
        return Draft.chain(torch.where(is_right, coming, (coming + 1) % 64)[None], budget)


def test_nodes_are_saved_for_few_tokens(target, prompts, plain):
    """Catches confidences that stop nothing, or what is kept as well."""
    whole = prompts[0] + plain(target, prompts[0], 200)
    found, unwrapped = {}, HalfRight(whole)
    unwrapped.is_confident = True  # type: ignore[attr-defined]
    for name, drafter in (("all", unwrapped), ("learnt", HalfRight(whole))):
        nodes: list[int] = []

        class Counting(ByConfidence):
            def keep(self, state: Any, sizes: torch.Tensor, confidence: Any, nodes: list[int] = nodes) -> torch.Tensor:
                kept = super().keep(state, sizes, confidence)
                nodes.append(int(kept.sum()))
                return kept

        (text,) = generate(target, prompts[0], drafter, max_new_tokens=190, policy=Counting(6, 0.3))
        found[name] = (len(text.tokens) / text.steps, sum(nodes) / len(nodes))
    assert found["learnt"][1] < 0.6 * found["all"][1]
    assert found["learnt"][0] > 0.85 * found["all"][0]


def test_the_wrapper_is_the_drafter_in_all_else():
    """Catches a method that is lost, and a fork that is handed the wrapper's memory."""

    class Forks(Proposer):
        taps = (1, 3)

        def compile(self, several: bool = False) -> float:
            return 2.0

        def fork(self, memory: Any, row: int, rows: list[int], length: int) -> Any:
            return memory, row, rows, length

    drafter: Any = OnlineConfidence(Forks())
    memory = drafter.allocate(None)
    assert (drafter.taps, drafter.limit, drafter.compile()) == ((1, 3), 4, 2.0)
    assert drafter.fork(memory, 1, [2], 5) == (memory.inner, 1, [2], 5)
    assert not hasattr(OnlineConfidence(Proposer()), "fork")


def test_equal_outcomes_give_equal_estimates():
    """Catches what one batch learnt reaching the next: a slot's text would be its neighbour's business."""
    first, again = (
        emitted(TARGET, OnlineConfidence(Tree(TARGET, [-1, 0, 1], "without")), ByConfidence(3, 0.2), slots=50) for _ in "ab"
    )
    assert torch.equal(first[0], again[0])
    drafter = OnlineConfidence(Tree(TARGET, [-1, 0, 1], "without"))
    one, two = (emitted(TARGET, drafter, ByConfidence(3, 0.2), slots=50) for _ in "ab")
    assert torch.equal(one[0], two[0])


def test_greedy_drafts_behind_drawn_ones_begin_with_what_their_depth_is_worth():
    """Catches weights learnt, or begun with, for drafts of another kind: every greedy node would stay at one half."""
    estimate = Estimate()
    q = torch.full((1, 3, 8), 0.125)
    drawn, greedy = (Draft.chain(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]), law) for law in (q, None))
    alone = Estimate().of(greedy)[0]
    assert estimate.of(drawn)[0][0] == pytest.approx([0.125] * 3)
    assert estimate.of(greedy)[0] == alone
    assert estimate.of(drawn)[0][0] == pytest.approx([0.125] * 3)
