"""A slot is one request's alone: what is drafted in it does not depend on who was there before, or who stands beside.
What is over is forgotten.

No test here is random.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import FEW, cases, fast
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request
from outrider.generation import batch, serve
from outrider.sampling.settings import Sampling

SHARES: set[str] = set()
"""Kinds that learn from one request for the next whatever their settings; a kind that does so on purpose is added
here."""
CASES = fast(
    (case for case in cases() if case.kind not in SHARES and "shared" not in case.choices), (*FEW, "deer", "jacobi")
)
LONG = torch.randint(8, (24,), generator=torch.Generator().manual_seed(5)).tolist()
ONE_BY_ONE = [LONG, [9, 9, 3, 1], LONG[:9]]
"""The second is another text than the first, the third its beginning: who remembers the first knows what comes."""
SIDE_BY_SIDE = [([3, 9, 4, 3, 9, 4, 3, 9], 4), (LONG[:7], 16), (LONG[:13], 9), ([5, 6, 5, 6, 5], 12)]
"""Prompts and numbers of new tokens: slot 0 ends first, slot 2 next, those between and behind go on."""
ROUND = 60

Drafts = dict[int, list[tuple[int, list[int], tuple[int, ...]]]]
"""By request: (tokens of the text, drafted ids, parents), step by step."""


class Watched(Drafter):
    """Notes what a drafter proposes for each request; passes everything else on."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.seen = drafter, Drafts()
        for name in ("taps", "limit", "hidden", "confidence_before_draw", "probe_rows", "steps", "watches"):
            setattr(self, name, getattr(drafter, name))
        self.allocate, self.admit, self.free = drafter.allocate, drafter.admit, drafter.free
        self.probe, self.observe = drafter.probe, drafter.observe

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        draft = self.drafter.propose(memory, state, budget)
        for b, row in enumerate(state.rows):
            if not budget[b]:  # alone, this slot would not be asked
                continue
            size = draft.live[b]
            step = len(state.tokens[row]), draft.ids[b][:size], draft.tree[b][:size]
            self.seen.setdefault(id(state.requests[row]), []).append(step)
        return draft


def drafted(target: Any, drafter: Drafter, requests: Sequence[Request], slots: int) -> list[list]:
    """What was proposed in every step of every request."""
    watched = Watched(drafter)
    for _ in serve(target, requests, watched, slots=slots):
        pass
    return [watched.seen[id(request)] for request in requests]


def request(prompt: list[int], count: int) -> Request:
    return Request(list(prompt), count, Sampling())


@pytest.fixture
def few_objects() -> Iterator[None]:
    """What stands already is neither counted nor looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("case", CASES)
def test_a_slot_used_again_drafts_as_a_fresh_one(case, target, workshop):
    """Catches a `free` that forgets nothing: one request's text shows in the drafts of the next."""
    drafter = workshop.build(case, target)
    used = drafted(target, drafter, [request(prompt, 10) for prompt in ONE_BY_ONE], slots=1)
    assert used[1:] == [drafted(target, drafter, [request(prompt, 10)], slots=1)[0] for prompt in ONE_BY_ONE[1:]]


@pytest.mark.parametrize("case", CASES)
def test_slots_with_holes_between_them_draft_as_alone(case, target, workshop):
    """Catches a memory that is indexed by a slot's place among the live ones and not by its row."""
    drafter = workshop.build(case, target)
    together = drafted(target, drafter, [request(*own) for own in SIDE_BY_SIDE], slots=len(SIDE_BY_SIDE))
    assert together == [drafted(target, drafter, [request(*own)], slots=1)[0] for own in SIDE_BY_SIDE]


@pytest.mark.parametrize("case", fast((case.values[0] for case in CASES), ("recycle",)))
def test_nothing_is_held_of_requests_that_are_over(case, target, workshop, few_objects):
    """Catches a list or a table in the drafter that has one entry more for every request, and so no end: each of two
    further rounds leaves an object or more for every second request."""
    state, noise, held = batch(target, 40), torch.Generator().manual_seed(2), []
    drafter = workshop.build(case, target)
    for _ in range(3):
        prompts = torch.randint(5, (ROUND, 6), generator=noise).tolist()
        for _ in serve(target, [Request(own, 2, Sampling(), tenant=str(own)) for own in prompts], drafter, state=state):
            pass
        gc.collect()
        held.append(len(gc.get_objects()))
    assert min(held[1] - held[0], held[2] - held[1]) < ROUND // 2
