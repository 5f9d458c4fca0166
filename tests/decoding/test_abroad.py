"""A drafter on another device than its target; here `meta`, whose tensors know where they are and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Case

from outrider import generate, load_drafter
from outrider.decoding.abroad import Abroad
from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Scores
from outrider.decoding.sampling import Sampling
from outrider.decoding.state import DecodeState, Request

THERE = torch.device("meta")


class Traveller:
    """Notes where all that it is given stands."""

    taps, limit = (0,), 4

    def __init__(self) -> None:
        self.found: set[str] = set()

    def note(self, *tensors: torch.Tensor | None) -> None:
        self.found |= {tensor.device.type for tensor in tensors if tensor is not None}

    def state(self, state: DecodeState) -> None:
        streams = state.streams
        self.note(
            state.anchor, state.seeded, *state.settings, streams.seeds, streams.index, torch.empty(0, device=state.device)
        )

    def admit(self, memory: Any, rows: Any, state: DecodeState, scores: Scores) -> None:
        self.state(state)
        self.note(scores.taps)

    def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
        self.state(state)
        return Draft.empty(len(state.rows))

    def observe(self, memory: Any, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        self.state(state)
        self.note(scores.taps, draft.tokens, draft.parents, draft.q, draft.confidence)


def test_all_that_a_drafter_reads_crosses():
    """Catches a tensor left behind: the anchor, a setting, a seed, the noise's place, taps, the draft as it was verified."""
    inner = Traveller()
    drafter, state = Abroad(inner, THERE), DecodeState(2, 100)
    for row in range(2):
        state.admit(row, Request([1, 2], 20, Sampling(0.7, top_k=4, top_p=0.9, min_p=0.1, typical_p=0.9, seed=row)))
    scores = Scores(torch.zeros(2, 2, 5), torch.zeros(2, 2, 3), torch.zeros(2, 2, 1, 3))
    draft = Draft.chain(
        torch.ones(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.ones(2, 1, 5), torch.ones(2, 1)
    )
    drafter.admit(None, [0, 1], state, scores)
    assert drafter.propose(None, state, torch.tensor([1, 1])).tokens.device == state.device
    drafter.observe(None, state, draft, Kept([[0], []], [1, 1], [0, 0]), scores)
    assert inner.found == {"meta"}
    assert state.anchor.device == draft.tokens.device == scores.logits.device == torch.device("cpu")


def test_a_draft_comes_back():
    """Catches a part of the draft that stays where the target does not look."""
    here = Draft(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1), torch.ones(1, 2, 3), torch.ones(1, 2))
    there = here.on(THERE)
    assert {x.device for x in (there.tokens, there.parents, there.q, there.confidence)} == {THERE}
    assert there.sizes.device.type == "cpu"
    assert here.on(torch.device("cpu")) is here


def test_embedding_and_head_are_lent(target):
    """Catches weights that stay behind, and a target whose own were moved."""
    lent, tokens = target.lent(THERE), torch.tensor([[1, 2]])
    assert lent.head(lent.embed(tokens.to(THERE))).device == lent.device == THERE
    assert lent.head(lent.embed(tokens.to(THERE))).shape == target.head(target.embed(tokens)).shape
    assert target.embed(tokens).device.type == "cpu"


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_drafter_is_made_where_its_config_says(kind, target):
    """Catches a device that is read and not used.  Fresh weights can't be drawn on `meta`, so the home device stands for it."""
    assert not isinstance(load_drafter(kind, target, device="cpu", layers=1), Abroad)
    with pytest.raises(RuntimeError, match="meta|nowhere"):
        load_drafter(kind, target, layers=1, copies=[0], heads=1, kv_heads=1, head_dim=2, device="nowhere")


def test_a_drafter_abroad_drafts_what_it_drafts_at_home(target, workshop, prompts):
    """Catches a step that is lost on the way: here both places are the same device."""
    texts = []
    for abroad in (False, True):
        drafter = workshop.build(Case("dspark"), target)
        texts.append(generate(target, prompts, Abroad(drafter, target.device) if abroad else drafter, max_new_tokens=12))
    assert texts[0] == texts[1]
