"""Pairs, rollouts and trees of drafters that read their own output: training sees what serving sees."""

from types import SimpleNamespace

import pytest
import torch
from conftest import Case, batch_of, cases
from drafters.proposals import by_text, eldest_paths, exact, watch

from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.generation import generate, serve
from outrider.nn.draft_model import Batch
from outrider.nn.drafting import recurrent, serving
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling

EAGLE3 = Case("eagle3", {"length": 4, "ttt": 5})


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


def test_a_trees_likeliest_path_is_the_chain(target, workshop, prompts):
    """Catches a node that reads a sibling's key, or the output of another parent."""
    model = trained(EAGLE3, workshop, target)
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
