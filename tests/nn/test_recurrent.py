"""Pairs, rollouts and trees of drafters that read their own output: training sees what serving sees."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from conftest import SHAPE, Case, batch_of, cases
from drafters.proposals import by_text, eldest_paths, exact, watch
from torch import nn

from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.generation import generate, serve
from outrider.nn import recurrent, serving
from outrider.nn.blocks import Attention
from outrider.nn.draft_model import Batch
from outrider.nn.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentModel, unrolled_mask
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling

EAGLE3 = Case("eagle3", {"length": 4, "ttt": 5})
EAGLE = Case("eagle", {"length": 4, "ttt": 5})
BOTH = pytest.mark.parametrize("case", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])


def table(rows: list[str]) -> list[list[bool]]:
    return [[letter == "x" for letter in row.replace(" ", "")] for row in rows]


def test_a_rollout_sees_the_pairs_before_it_and_its_own_steps():
    """Catches a rollout that sees another's guesses, a later pair, or another text."""
    mask = unrolled_mask(torch.tensor([[1, 1, 1, 1], [1, 2, 2, 0]]), torch.arange(4).expand(2, -1), 4, 2)
    assert mask.shape == (2, 1, 4, 12)
    assert mask[0, 0].tolist() == table(["x... x... x...", "xx.. .x.. .x..", "xxx. ..x. ..x.", "xxxx ...x ...x"])
    assert mask[1, 0].tolist() == table(["x... x... x...", ".x.. .x.. .x..", ".xx. ..x. ..x.", "...x ...x ...x"])
    first = unrolled_mask(torch.ones(1, 3), torch.arange(3)[None], 3, 0)
    assert first[0, 0].tolist() == table(["x..", "xx.", "xxx"])  # causal attention


def test_rollouts_may_attend_in_parts(monkeypatch):
    """Catches a part that sees its own steps at another part's place."""
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 2, 9, 4, dtype=torch.float64, generator=noise) for _ in range(3))
    documents, every = torch.tensor([[1] * 9, [1] * 4 + [2] * 5]), torch.arange(9).expand(2, -1)

    def run(rows):
        monkeypatch.setattr(recurrent, "ROWS", rows)
        attend = recurrent.Unrolled(documents, every, every)
        return [attend.step(step)(q[step], k[step], v[step], 0) for step in range(3)]

    for whole, parts in zip(run(100), run(4), strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_rollouts_that_are_drawn_say_what_they_say_among_all(target, workshop):
    """Catches a rollout that takes another's feature, position or keys where only some are trained."""
    case = next(case for case in cases() if case.kind == "eagle3" and not case.is_variant)
    model = workshop.model(case, target)
    texts = torch.arange(24).expand(2, -1) + torch.tensor([[0], [30]])
    batch = batch_of(target, model.taps, texts)

    def said(anchors):
        model.config = model.config.model_copy(update={"anchors": anchors})
        torch.manual_seed(3)
        rows = model.predict(batch)
        draft = torch.cat([draft for draft, _, _ in rows.chunks(50)])
        # the text is counted through: its label tells a row's place
        return {(int(rows.labels[n]), int(rows.depth[n])): draft[n] for n in range(len(draft)) if rows.weight[n] > 0}

    whole, some = said(None), said(5)
    assert 2 * 5 * 3 >= len(some) > 2 * 5
    for place, logits in some.items():
        torch.testing.assert_close(logits, whole[place], rtol=1e-10, atol=1e-10)


def unrolled_logits(model, target, text: list[int]) -> dict[tuple[int, int], torch.Tensor]:
    """(length of the text that is committed, depth) to the logits that training shows there."""
    batch = batch_of(target, model.taps, torch.tensor([text]))
    with torch.no_grad():
        rows = model.predict(batch)
        logits = torch.cat([draft for draft, _, _ in rows.chunks(50)])
    # every rollout from the first on has its rows here
    return {(2 + int(rows.block[n]), int(rows.depth[n])): logits[n] for n in range(len(logits)) if rows.weight[n] > 0}


def served_logits(drafter, target, texts: list[list[int]], prompt: int, monkeypatch, slots: int) -> list[dict]:
    """The same as drafting shows them while texts are decoded, when what is drafted is what the texts say."""
    found: list[dict] = [{} for _ in texts]
    asked = {}

    def told(first, read_one, budget, state):
        committed = [state.tokens[row] for row in state.rows]
        which = [next(n for n, text in enumerate(texts) if text[: len(own)] == own) for own in committed]
        logits, tokens = first, []
        for depth in range(int(budget.max())):
            if depth:
                logits = read_one(tokens[-1])
            says = [
                texts[n][len(own) + depth : len(own) + depth + 1] or [0]
                for n, own in zip(which, committed, strict=True)
            ]
            tokens.append(torch.tensor(says)[:, 0])
            for b, (n, own) in enumerate(zip(which, committed, strict=True)):
                if depth < int(budget[b]) and len(own) + depth < len(texts[n]):
                    found[n][len(own), depth] = logits[b]
        # a wrong last token in every other step: what is rejected must leave nothing behind
        drafted = torch.stack(tokens, 1)
        asked[0] = asked.get(0, 0) + 1
        if asked[0] % 2:
            drafted[:, drafted.shape[1] // 2] = (drafted[:, drafted.shape[1] // 2] + 1) % 64
        return Draft.chain(drafted, budget)

    monkeypatch.setattr(serving, "chain", told)
    requests = [Request(text[:prompt], len(text) - prompt, Sampling()) for text in texts]
    for _ in serve(target, requests, drafter, slots=slots, policy=Fixed(4)):
        pass
    return found


def trained(case, workshop, target):
    """A model whose norms and biases are no longer what they began as."""
    model = workshop.model(case, target).eval()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, dtype=weight.dtype, generator=noise)
    return model


def is_served_as_trained(model, drafter, target, texts, monkeypatch, prompt=5, slots=3, **noise) -> None:
    """Compares served and trained logits at every place and depth, also beyond the last module."""
    served = served_logits(drafter, target, texts, prompt, monkeypatch, slots)
    for text, found in zip(texts, served, strict=True):
        wanted = unrolled_logits(model, target, text)
        assert {depth for _, depth in found} >= {0, 1, 2, 3} and len(found) > 15
        for key, logits in found.items():
            torch.testing.assert_close(logits, wanted[key], **(noise or {"rtol": 1e-9, "atol": 1e-9}))


@pytest.fixture
def texts(target, prompts, plain):
    return [(prompt[:5] + plain(target, prompt[:5], 30))[:28] for prompt in prompts if len(prompt) >= 5][:4]


@pytest.mark.parametrize(("case", "slots"), [(EAGLE3, 1), (EAGLE3, 3), (EAGLE, 3)], ids=str)
def test_every_depth_is_served_as_it_was_trained(case, slots, target, workshop, texts, monkeypatch):
    """Catches positions, masks and features that differ from training's, slots that see each other."""
    model = trained(case, workshop, target)
    is_served_as_trained(model, model.drafter(), target, texts, monkeypatch, slots=slots)


def test_a_label_shifted_by_one_is_seen(target, workshop):
    """A rollout's rows are labelled i + 2 + s: the anchor is token i + 1."""
    model = workshop.model(EAGLE3, target)
    counted = torch.arange(12)[None] + 20
    rows = model.predict(batch_of(target, model.taps, counted))
    assert (rows.labels - 22 == rows.block + rows.depth)[rows.weight > 0].all()
    torch.testing.assert_close(rows.weight[rows.block == 0], 0.8 ** torch.arange(5))
    assert rows.weight[rows.block == 8].tolist() == pytest.approx([1.0, 0.8, 0, 0, 0])


def test_a_rollout_ends_with_what_is_to_be_learnt(target, workshop):
    """Catches a depth that is learnt behind a token that is not: when served it would never be reached that way."""
    model = workshop.model(EAGLE3, target)
    batch = batch_of(target, model.taps, torch.arange(12)[None])
    learnt = batch.loss_mask.clone()
    learnt[:, 7] = False
    rows = model.predict(Batch(batch.tokens, learnt, batch.documents, batch.taps, batch.hidden))
    kept = {
        (int(label), int(depth)) for label, depth, w in zip(rows.labels, rows.depth, rows.weight, strict=True) if w > 0
    }
    assert {label for label, _ in kept} == {2, 3, 4, 5, 6, 8, 9, 10, 11}
    assert {depth for label, depth in kept if label == 9} == {0, 1}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_text_too_short_to_learn_from_is_no_error(length, target, workshop):
    """Catches an empty batch that attention, or the way back, does not survive."""
    model = workshop.model(EAGLE3, target)
    rows = model.predict(batch_of(target, model.taps, torch.ones(2, length, dtype=torch.int64)))
    for draft, _, part in rows.chunks(8):
        (draft.sum(-1) * rows.weight[part]).sum().backward()
    rows.backward()
    assert int((rows.weight > 0).sum()) == 2 * (length == 3)


@BOTH
def test_a_trees_likeliest_path_is_the_chain(case, target, workshop, prompts):
    """Catches a node that reads a sibling's key, or the output of another parent."""
    model = trained(case, workshop, target)
    chains, beams = {}, {}
    for width, paths in ((1, chains), (3, beams)):
        model.config = model.config.model_copy(update={"width": width, "nodes": 40})
        drafter = model.drafter()
        seen = watch(drafter)
        generate(target, prompts, drafter, max_new_tokens=12, slots=3, policy=Fixed(39))
        paths |= eldest_paths(seen)
    shared = chains.keys() & beams.keys()
    assert sum(len(beams[text]) >= 2 for text in shared) > 20
    # the beam may leave the chain where another path is likelier as a whole
    assert all(one == other for text in shared for one, other in zip(chains[text], beams[text], strict=False))


@pytest.mark.parametrize("width", [1, 2])
def test_a_slot_used_again_drafts_as_a_new_one(width, target, workshop, prompts):
    """Catches pairs of the text before, features that wait, and a prompt read in parts."""
    model = trained(Case("eagle3", {"width": width, "nodes": 6}), workshop, target)

    def drafts(prompts, slots):
        drafter = model.drafter()
        seen = watch(drafter)
        generate(target, prompts, drafter, max_new_tokens=14, slots=slots)
        return by_text(seen)

    together = drafts(prompts, 2)
    for prompt in prompts[::2]:
        for text, draft in drafts([prompt], 1).items():
            assert together[text] == draft


def test_nothing_is_drafted_behind_a_texts_first_token(target, workshop):
    """Catches a draft from no feature at all: what was drafted would hang on padding."""
    drafter = trained(EAGLE3, workshop, target).drafter()
    seen = watch(drafter)
    generate(target, [[5], [6, 7]], drafter, max_new_tokens=12, slots=2)
    assert [one.draft.live for one in seen[:2]] == [[0, 4], [4, 4]]


def test_steps_without_a_draft_are_caught_up_with(target, workshop, prompts, monkeypatch):
    """Catches features that are lost, or read as another position's, where the budget was 0 for many steps."""
    monkeypatch.setattr(recurrent, "READ", 7)
    model = trained(EAGLE3, workshop, target)

    class Late(Fixed):
        def budget(self, state):
            return super().budget(state) * (len(state.tokens[0]) >= 30)

    found = []
    for policy in (Late(4), Fixed(4)):
        drafter = model.drafter()
        seen = watch(drafter)
        exact(target, prompts[0], drafter, policy, max_new_tokens=40)
        found.append({text: tokens for text, tokens in by_text(seen).items() if tokens})
    late, early = found
    shared = late.keys() & early.keys()
    assert shared and min(map(len, late)) == 30
    assert all(late[text] == early[text] for text in shared)


def test_a_draft_ends_before_what_no_distribution_is_left_for():
    """Catches NaN as q where all that the draft can say is banned: the token would be counted as invalid."""
    q = torch.full((2, 3, 4), 0.25)
    q[1, 1] = torch.nan

    banned, free = (SimpleNamespace(judge=SimpleNamespace(bans=bans)) for bans in (True, False))
    draft = Draft.chain(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), q)
    assert serving.possible(draft, banned).sizes.tolist() == [3, 1]
    assert serving.possible(draft, free) is draft


class SeveralConfig(RecurrentConfig):
    kind: Literal["several"] = "several"


class Several(RecurrentModel):
    """Two modules, each a single attention with a residual: step 0 takes the first, later ones the second."""

    num_modules = 2
    limits = (None, None)

    def __init__(self, target):
        super().__init__()
        torch.manual_seed(4)
        self.target = target
        self.config, self.shape = SeveralConfig(ttt=4, length=4), replace(SHAPE, heads=2, kv_heads=1)
        self.attention = nn.ModuleList(Attention(32, self.shape, 64, qk_norm=False) for _ in range(2))
        self.double()

    def step(self, module, words, features, angle, attend):
        return features + self.attention[module](torch.cat([words, features], -1), angle, attend, module)


def test_modules_keep_keys_of_their_own(target, texts, monkeypatch):
    """Catches a module that reads another's keys, or columns in which it wrote nothing."""
    model = Several(target)
    is_served_as_trained(model, RecurrentDrafter(model), target, texts, monkeypatch)
