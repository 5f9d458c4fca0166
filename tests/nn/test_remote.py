"""A drafter on another device than its target; here `meta`, whose tensors know where they are and no more."""

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
from outrider.nn.drafting.remote import RemoteDrafter
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

THERE = torch.device("meta")


def places(*tensors: torch.Tensor | None) -> set[str]:
    return {tensor.device.type for tensor in tensors if tensor is not None}


class Traveller(Drafter):
    """Notes where all that it is given stands."""

    taps, limit, probe_rows = (0,), 4, 2

    def __init__(self) -> None:
        self.found: set[str] = set()

    def note(self, memory: Any, *given: Any) -> Any:
        for x in given:
            if isinstance(x, DecodeState):
                self.found |= places(x.anchor, x.seeded, x.streams.seeds, x.streams.index, x.streams.seeded)
                if isinstance(x.judge, SamplingJudge):
                    self.found |= places(x.judge.temperature, *x.judge.settings)
                else:
                    self.found |= places(x.judge.distribution(torch.zeros(2, 5, device=x.device)))
            elif isinstance(x, Scores):
                self.found |= places(x.taps, x.probe)
            elif isinstance(x, Draft):
                self.found |= places(x.tokens, x.parents, x.q, x.confidence, x.origin)
        return Draft.empty(2)

    admit = propose = observe = note

    def probe(self, *given: Any) -> None:
        self.note(*given)


@pytest.mark.parametrize("judge", [Judge, SamplingJudge])
def test_all_that_a_drafter_reads_crosses(judge):
    """Catches a tensor left behind: the anchor, a setting, a seed, the noise's place, taps, the draft as it was
    verified."""
    inner, ones = Traveller(), torch.ones(2, 1)
    drafter, state = RemoteDrafter(inner, THERE), DecodeState(2, 100, judge=judge())
    for row in range(2):
        state.admit(row, Request([1, 2], 20, Sampling(0.7, top_k=4, top_p=0.9, min_p=0.1, typical_p=0.9, seed=row)))
    scores = Scores(torch.zeros(2, 2, 5), torch.zeros(2, 2, 3), torch.zeros(2, 2, 1, 3), probe=torch.zeros(2, 2, 3))
    draft = Draft.chain(ones.long(), ones[:, 0].long(), torch.ones(2, 1, 5), ones)
    draft = replace(draft, origin=numbers(draft))
    drafter.admit(None, [0, 1], state, scores, [2, 2])
    assert drafter.propose(None, state, torch.tensor([1, 1])).tokens.device == state.device
    assert drafter.probe(None, state, draft) is None
    drafter.observe(None, state, draft, Accepted([[0], []], [1, 1], [0, 0]), scores)
    assert inner.found == {"meta"}
    assert places(state.anchor, draft.tokens, scores.logits, state.judge.temperature, state.streams.seeds) == {"cpu"}


def test_a_draft_and_a_probe_come_back():
    """Catches a part of them that stays where the target does not look."""
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
    """Catches an attribute that falls back to a drafter's default."""

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


def test_a_drafter_abroad_drafts_what_it_drafts_at_home(target, workshop, prompts):
    """Catches a step that is lost on the way: here both places are the same device."""
    home, abroad = (workshop.build(Case("dspark"), target) for _ in range(2))
    texts = [
        generate(target, prompts[:4], drafter, max_new_tokens=12)
        for drafter in (home, RemoteDrafter(abroad, target.device))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(RuntimeError, match="meta|nowhere"):
        load_drafter("dflash", target, layers=1, heads=1, kv_heads=1, head_dim=2, device="nowhere")
