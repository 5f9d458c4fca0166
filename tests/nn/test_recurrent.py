"""Pairs, rollouts and trees of drafters that read their own output: training sees what serving sees."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from conftest import SHAPE, Case, batch_of, cases
from torch import nn

from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.generation import generate, serve
from outrider.nn import recurrent, serving
from outrider.nn.blocks import Attention, attending, rotary
from outrider.nn.draft_model import Batch
from outrider.nn.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentModel, unrolled_mask
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.targets.cache import SlotCache

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


def test_the_first_step_is_causal_attention():
    """Catches keys of steps that were not taken."""
    assert unrolled_mask(torch.ones(1, 3), torch.arange(3)[None], 3, 0)[0, 0].tolist() == table(["x..", "xx.", "xxx"])


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


# ── serving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def apart(case, target, workshop, prompts, plain, monkeypatch, slots=3) -> float:
    """The largest difference between served and trained logits at any place and depth."""
    texts = [(prompt[:5] + plain(target, prompt[:5], 30))[:28] for prompt in prompts if len(prompt) >= 5][:4]
    model = trained(case, workshop, target)
    served = served_logits(model.drafter(), target, texts, 5, monkeypatch, slots)
    worst = 0.0
    for text, found in zip(texts, served, strict=True):
        wanted = unrolled_logits(model, target, text)
        assert {depth for _, depth in found} == {0, 1, 2, 3}
        assert len(found) > 15
        assert found.keys() <= wanted.keys()
        worst = max(worst, *(float((found[key] - wanted[key]).abs().max()) for key in found))
    return worst


@BOTH
@pytest.mark.parametrize("slots", [1, 3])
def test_every_depth_is_served_as_it_was_trained(case, slots, target, workshop, prompts, plain, monkeypatch):
    """Catches positions, masks and features that differ from training's, slots that see each other, and what a slot
    used before or a rejected token leaves behind."""
    assert apart(case, target, workshop, prompts, plain, monkeypatch, slots) < 1e-9


def spoilt_positions(monkeypatch):
    """Drafted tokens stand one place too far."""
    own = SlotCache.positions
    monkeypatch.setattr(SlotCache, "positions", lambda self, depths=None: own(self, depths) + (depths is not None))


def spoilt_forgetting(monkeypatch):
    """The key of the first drafted token, kept or rejected, stays in place of the pair that is read there."""
    own = RecurrentDrafter.observe

    def observe(self, memory, state, draft, kept, scores):
        own(self, memory, state, draft, kept, scores)
        for row, size in zip(state.rows, draft.live, strict=True):
            if size:
                memory.kv_cache.lengths[row] += 1
                memory.features.take([row], [1])

    monkeypatch.setattr(RecurrentDrafter, "observe", observe)


def spoilt_features(monkeypatch):
    """Every step reads the last pair's output."""
    own = recurrent.Rollout.expand

    def expand(self, tree, fresh):
        self.hidden[:, 1:] = self.hidden[:, :1]
        return own(self, tree, fresh)

    monkeypatch.setattr(recurrent.Rollout, "expand", expand)


@pytest.mark.parametrize("spoil", [spoilt_positions, spoilt_forgetting, spoilt_features])
def test_a_planted_fault_in_serving_is_seen(spoil, target, workshop, prompts, plain, monkeypatch):
    """The test above has teeth: positions off by one, a rejected token's key that is kept, a feature of the wrong
    step."""
    spoil(monkeypatch)
    assert apart(EAGLE3, target, workshop, prompts, plain, monkeypatch) > 1e-3


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
    paths = {}
    for width in (1, 3):
        model.config = model.config.model_copy(update={"width": width, "nodes": 40})
        drafter, seen = model.drafter(), {}
        propose = drafter.propose

        def watched(memory, state, budget, propose=propose, seen=seen):
            draft = propose(memory, state, budget)
            for b, row in enumerate(state.rows):
                nodes, at = [], -1
                for n, (token, parent) in enumerate(zip(draft.ids[b], draft.tree[b], strict=True)):
                    # an eldest child is the likeliest
                    if parent == at and n < int(draft.sizes[b]) and len(nodes) < 4:
                        nodes.append(token)
                        at = n
                seen[tuple(state.tokens[row])] = nodes
            return draft

        drafter.propose = watched
        for _ in serve(
            target, [Request(prompt, 12, Sampling()) for prompt in prompts], drafter, slots=3, policy=Fixed(39)
        ):
            pass
        paths[width] = seen
    shared = paths[1].keys() & paths[3].keys()
    assert len(shared) > 20
    assert sum(len(paths[3][text]) >= 2 for text in shared) > 20
    for text in shared:
        # the beam may leave the chain where another path is likelier as a whole
        least = min(len(paths[1][text]), len(paths[3][text]))
        assert paths[3][text][:least] == paths[1][text][:least]


@torch.inference_mode()
def test_a_tree_is_read_as_the_chains_it_is_made_of(target, workshop):
    """Catches the mask between branches: every node's logits are those of its own path read alone."""
    model = trained(EAGLE3, workshop, target)
    _, taps = target.read(torch.tensor([[5, 9, 11, 3], [7, 7, 2, 8]]), model.taps)
    levels = [[-1, -1, -1], [0, 0, 2], [3, 4, 5]]
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    parents = torch.tensor([parent for level in levels for parent in level])

    def begun(rows):
        kept = SlotCache(2, 30)
        for row in rows:  # unequal texts
            count = 4 - row
            kept.open([row], count)
            angle = rotary(kept.positions(), model.shape)
            words = target.embed(torch.tensor([[1, 2, 3, 4]]))[:, :count]
            given = words, model.features(taps[row : row + 1, :count])
            last = model.step(0, *given, angle, attending(kept.mask(None, torch.float64), kept))[:, -1]
            kept.append([count])
            roots.append(last)
        return recurrent.Rollout(model, kept, rows, torch.cat(roots[-len(rows) :]))

    roots: list[torch.Tensor] = []
    together, found = begun([0, 1]), []
    for level in range(3):
        n = 3 * (level + 1)
        tree = Draft(tokens[:, :n], parents[:n].expand(2, -1), torch.tensor([n, n]))
        found.append(together.expand(tree, 3))
    logits = torch.cat(found, 1)
    for row in range(2):
        for n in range(9):
            path, at = [], n
            while at >= 0:
                path.insert(0, at)
                at = int(parents[at])
            alone = begun([row])
            for node in path:
                said = alone.read_one(tokens[row : row + 1, node])
            torch.testing.assert_close(said[0], logits[row, n], rtol=1e-9, atol=1e-9)
    together.forget()
    assert together.kv_cache.lengths == [4, 3]


@pytest.mark.parametrize("width", [1, 2])
def test_a_slot_used_again_drafts_as_a_new_one(width, target, workshop, prompts):
    """Catches pairs of the text before, features that wait, and a prompt read in parts."""
    model = trained(Case("eagle3", {"width": width, "nodes": 6}), workshop, target)

    def drafts(requests, slots):
        drafter, seen = model.drafter(), {}
        propose = drafter.propose

        def watched(memory, state, budget):
            draft = propose(memory, state, budget)
            for b, row in enumerate(state.rows):
                seen[tuple(state.tokens[row])] = draft.ids[b][: int(draft.sizes[b])]
            return draft

        drafter.propose = watched
        for _ in serve(target, requests, drafter, slots=slots):
            pass
        return seen

    requests = [Request(prompt, 14, Sampling()) for prompt in prompts]
    together = drafts(requests, 2)
    for request in requests:
        for text, draft in drafts([request], 1).items():
            assert together[text] == draft


def test_nothing_is_drafted_behind_a_texts_first_token(target, workshop):
    """Catches a draft from no feature at all: what was drafted would hang on padding."""
    drafter, sizes = trained(EAGLE3, workshop, target).drafter(), []
    propose = drafter.propose

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        sizes.append(draft.sizes.tolist())
        return draft

    drafter.propose = watched
    generate(target, [[5], [6, 7]], drafter, max_new_tokens=12, slots=2)
    assert sizes[0] == [0, 4]
    assert sizes[1] == [4, 4]


def test_steps_without_a_draft_are_caught_up_with(target, workshop, prompts, monkeypatch):
    """Catches features that are lost, or read as another position's, where the budget was 0 for many steps."""
    monkeypatch.setattr(recurrent, "READ", 7)
    model = trained(EAGLE3, workshop, target)

    class Late(Fixed):
        def budget(self, state):
            return super().budget(state) * (len(state.tokens[0]) >= 30)

    found = []
    for policy in (Late(4), Fixed(4)):
        drafter, seen = model.drafter(), {}
        propose = drafter.propose

        def watched(memory, state, budget, propose=propose, seen=seen):
            draft = propose(memory, state, budget)
            seen[len(state.tokens[0])] = draft.ids[0][: int(draft.sizes[0])]
            return draft

        drafter.propose = watched
        (only,) = generate(target, [prompts[0]], drafter, max_new_tokens=40, policy=policy)
        found.append((seen, only.tokens))
    (late, text), (early, same) = found
    assert text == same
    shared = late.keys() & early.keys()
    assert shared and min(late) == 30
    assert all(late[at] == early[at] for at in shared)


def test_a_draft_ends_before_what_no_distribution_is_left_for():
    """Catches NaN as q where all that the draft can say is banned: the token would be counted as invalid."""
    q = torch.full((2, 3, 4), 0.25)
    q[1, 1] = torch.nan

    banned, free = (SimpleNamespace(judge=SimpleNamespace(bans=bans)) for bans in (True, False))
    draft = Draft.chain(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), q)
    assert serving.possible(draft, banned).sizes.tolist() == [3, 1]
    assert serving.possible(draft, free) is draft


def test_a_target_of_chains_is_drafted_chains(target, workshop, caplog, monkeypatch):
    """Catches a tree of which the loop would keep the trunk alone, and a setting that is ignored in silence."""
    from dataclasses import replace

    model = workshop.model(Case("eagle3", {"length": 4, "width": 3, "nodes": 9}), target)
    assert model.drafter().limit == 9 and not caplog.text
    monkeypatch.setattr(target, "spec", replace(target.spec, mode="chain"))
    assert model.drafter().limit == 4 and "verifies no trees" in caplog.text
    caplog.clear()
    workshop.model(Case("eagle3", {"nodes": 9}), target).drafter()
    assert "nodes has no effect" in caplog.text


# ── several modules ───────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_modules_keep_keys_of_their_own(target, prompts, plain, monkeypatch):
    """Catches a module that reads another's keys, or columns in which it wrote nothing."""
    model = Several(target)
    texts = [(prompt[:5] + plain(target, prompt[:5], 30))[:28] for prompt in prompts if len(prompt) >= 5][:4]
    served = served_logits(RecurrentDrafter(model), target, texts, 5, monkeypatch, 3)
    for text, found in zip(texts, served, strict=True):
        wanted = unrolled_logits(model, target, text)
        assert {depth for _, depth in found} == {0, 1, 2, 3}
        for key, logits in found.items():
            torch.testing.assert_close(logits, wanted[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
def test_no_node_of_a_tree_is_a_banned_token(settings, target, prompts, workshop):
    """Catches a ban that is looked up along another branch's path: such a node is a sure rejection."""
    drafter = trained(Case("eagle3", {"width": 3, "nodes": 12}), workshop, target).drafter()
    sampling = Sampling(**settings, bad_words=[(token,) for token in range(20)] + [(30, 31), (40, 50)])
    propose, nodes = drafter.propose, []

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        nodes.extend(token for b, size in enumerate(draft.sizes.tolist()) for token in draft.ids[b][:size])
        return draft

    drafter.propose = watched
    found = generate(target, prompts[:3], drafter, max_new_tokens=15, sampling=sampling, slots=3)
    plainly = generate(target, prompts[:3], max_new_tokens=15, sampling=sampling, slots=3)
    assert [generation.tokens for generation in found] == [generation.tokens for generation in plainly]
    assert len(nodes) > 50 and min(nodes) >= 20
