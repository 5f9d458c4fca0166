"""A drafter on another device than its target; here `meta`, whose tensors know where they are and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Case
from decoding.drafts import numbers

from outrider import generate, load_drafter
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Probe
from outrider.decoding.state import DecodeState, Judge, Request, Scores
from outrider.nn.remote import RemoteDrafter
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

THERE = torch.device("meta")


class Traveller(Drafter):
    """Notes where all that it is given stands."""

    taps, limit, probe_rows = (0,), 4, 2

    def __init__(self) -> None:
        self.found: set[str] = set()

    def note(self, *tensors: torch.Tensor | None) -> None:
        self.found |= {tensor.device.type for tensor in tensors if tensor is not None}

    def state(self, state: DecodeState) -> None:
        streams, judge = state.streams, state.judge
        self.note(
            state.anchor,
            state.seeded,
            streams.seeds,
            streams.index,
            streams.seeded,
            torch.empty(0, device=state.device),
        )
        if isinstance(judge, SamplingJudge):
            self.note(judge.temperature, *judge.settings)
        else:
            self.note(judge.distribution(torch.zeros(2, 5, device=state.device)))

    def admit(self, memory: Any, rows: Any, state: DecodeState, scores: Scores, lengths: Any) -> None:
        self.state(state)
        self.note(scores.taps)

    def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
        self.state(state)
        return Draft.empty(len(state.rows))

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> None:
        self.state(state)
        self.note(draft.tokens, draft.parents)

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        self.state(state)
        self.note(scores.taps, scores.probe, draft.tokens, draft.parents, draft.q, draft.confidence, draft.origin)


@pytest.mark.parametrize("judge", [Judge, SamplingJudge])
def test_all_that_a_drafter_reads_crosses(judge):
    """Catches a tensor left behind: the anchor, a setting, a seed, the noise's place, taps, the draft as it was
    verified."""
    inner = Traveller()
    drafter, state = RemoteDrafter(inner, THERE), DecodeState(2, 100, judge=judge())
    for row in range(2):
        state.admit(row, Request([1, 2], 20, Sampling(0.7, top_k=4, top_p=0.9, min_p=0.1, typical_p=0.9, seed=row)))
    scores = Scores(torch.zeros(2, 2, 5), torch.zeros(2, 2, 3), torch.zeros(2, 2, 1, 3), probe=torch.zeros(2, 2, 3))
    draft = Draft.chain(
        torch.ones(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.ones(2, 1, 5), torch.ones(2, 1)
    )
    draft = replace(draft, origin=numbers(draft))
    drafter.admit(None, [0, 1], state, scores, [2, 2])
    assert drafter.propose(None, state, torch.tensor([1, 1])).tokens.device == state.device
    assert drafter.probe(None, state, draft) is None
    drafter.observe(None, state, draft, Accepted([[0], []], [1, 1], [0, 0]), scores)
    assert inner.found == {"meta"}
    assert state.anchor.device == draft.tokens.device == scores.logits.device == torch.device("cpu")
    assert state.judge.temperature.device == state.streams.seeds.device == torch.device("cpu")


def test_a_draft_and_a_probe_come_back():
    """Catches a part of them that stays where the target does not look; here the target is the one that is
    elsewhere."""
    ones, here = torch.ones(2, 2, dtype=torch.int64), torch.device("cpu")

    class Whole(Drafter):
        def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
            return Draft(ones, ones, ones[0], torch.ones(2, 2, 3), torch.ones(2, 2), origin=ones)

        def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe:
            return Probe(torch.ones(2, 2, 3), ones > 0, ones)

    drafter = RemoteDrafter(Whole(), here)
    for home in (THERE, here):
        state = DecodeState(2, 9).replaced(device=home)
        found, probe = drafter.propose(None, state, ones[0]), drafter.probe(None, state, Draft.empty(2))
        assert {x.device for x in (found.tokens, found.parents, found.q, found.confidence, found.origin)} == {home}
        assert {x.device for x in (probe.embeddings, probe.mask, probe.depths)} == {home}
        assert found.sizes.device == here


def test_a_remote_drafter_promises_what_its_drafter_does():
    """Catches an attribute that falls back to a drafter's default: confidences that are hidden, a cache without
    room."""

    class Odd(Drafter):
        taps, limit, hidden, confidence_before_draw, probe_rows, watches = (3, 4), 5, 6, True, 7, True
        steps = ("a pass",)

    drafter = RemoteDrafter(Odd(), THERE)
    for name in ("taps", "limit", "hidden", "confidence_before_draw", "probe_rows", "watches", "steps"):
        assert getattr(drafter, name) == getattr(Odd, name), name


def test_embedding_and_head_are_copied(target):
    """Catches weights that stay behind, and a target whose own were moved."""
    there, tokens = target.copy_to(THERE), torch.tensor([[1, 2]])
    assert there.head(there.embed(tokens.to(THERE))).device == there.device == THERE
    assert there.head(there.embed(tokens.to(THERE))).shape == target.head(target.embed(tokens)).shape
    assert target.embed(tokens).device.type == "cpu"


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_drafter_is_made_where_its_config_says(kind, target):
    """Catches a device that is read and not used.  Fresh weights can't be drawn on `meta`, so the home device stands
    for it."""
    assert not isinstance(load_drafter(kind, target, device="cpu", layers=1), RemoteDrafter)
    with pytest.raises(RuntimeError, match="meta|nowhere"):
        load_drafter(kind, target, layers=1, init_from_layers=[0], heads=1, kv_heads=1, head_dim=2, device="nowhere")


def test_a_drafter_abroad_drafts_what_it_drafts_at_home(target, workshop, prompts):
    """Catches a step that is lost on the way: here both places are the same device."""
    texts = []
    for abroad in (False, True):
        drafter = workshop.build(Case("dspark"), target)
        texts.append(
            generate(target, prompts, RemoteDrafter(drafter, target.device) if abroad else drafter, max_new_tokens=12)
        )
    assert texts[0] == texts[1]
