"""A few steps teach every trainable drafter something, and move nothing of the target's."""

from dataclasses import replace

import pytest
import torch
from conftest import batch_of, cases, fast, train

from outrider.decoding.state import Request
from outrider.generation import serve
from outrider.sampling.settings import Sampling

TRAINABLE = pytest.mark.parametrize("case", fast(case for case in cases() if case.trains))


COUNTED = torch.arange(24).expand(2, -1) + torch.tensor([[0], [30]])
"""Texts that are counted through, so that a label says its place."""


@pytest.fixture(scope="module")
def texts():
    return torch.randint(64, (8, 24), generator=torch.Generator().manual_seed(4))


@TRAINABLE
def test_the_loss_falls(case, target, workshop, texts):
    """Catches a gradient that is cut off or has the wrong sign, a part that stands in the model and not in the loss,
    and borrowed weights that are trained, or saved, as the drafter's own; batch, weights and anchors are seeded."""
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    model = workshop.model(case, target)
    losses = train(model, batch_of(target, model.taps, texts[:4]), 4)
    assert all(loss == loss for loss in losses)
    assert losses[-1] < losses[0]
    borrowed = {id(weight) for weight in target.model.parameters()}
    for name, weight in model.named_parameters():
        assert weight.requires_grad and weight.grad is not None and id(weight) not in borrowed, name
        assert bool(weight.grad.isfinite().all()) and float(weight.grad.abs().sum()) > 0, name
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(weight.grad is None for weight in target.model.parameters())


@TRAINABLE
def test_the_gradient_is_that_of_the_whole_pass(case, target, workshop, texts):
    """Catches a step, a block or a head that is cut off from those before it: the gradient then lacks what they did to
    it.

    Along one direction through all weights, beside the finite difference of the loss, in float64.
    """
    model = workshop.model(case, target)
    batch = batch_of(target, model.taps, texts[:3])
    train(model, batch, 2)
    model.eval().zero_grad()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    noise = torch.Generator().manual_seed(5)
    ways = [torch.randn(weight.shape, dtype=weight.dtype, generator=noise) * 0.1 for weight in weights]

    def loss(along: float) -> float:
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight += along * way
        torch.manual_seed(0)
        rows, total = model.predict(batch), 0.0
        for draft, _, part in rows.chunks(64):
            terms = torch.nn.functional.cross_entropy(draft, rows.labels[part], reduction="none")
            own = (terms * rows.weight[part]).sum() / rows.weight.sum()
            if not along:
                own.backward()
            total += own.item()
        if not along:
            rows.backward()
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight -= along * way
        return total

    loss(0.0)
    slope = sum(
        float((weight.grad * way).sum()) for weight, way in zip(weights, ways, strict=True) if weight.grad is not None
    )
    step = 1e-3  # norms of transformers' layers are taken in float32
    found = (loss(step) - loss(-step)) / (2 * step)
    assert slope == pytest.approx(found, rel=5e-3)


@TRAINABLE
def test_rows_are_labelled_with_what_the_target_saw_and_chunks_cover_them_once(case, target, workshop):
    """Catches a shift by one between anchors, labels and the target's logits, with which learning an own distribution
    would still look fine; prompts, padding and other texts' tokens in the loss; rows that are lost at a chunk's end, a
    block that is split, and logits that hang on the size of the chunk."""
    model = workshop.model(case, target)
    batch = batch_of(target, model.taps, COUNTED)
    logits = target.head(batch.hidden)
    torch.manual_seed(0)
    rows = model.predict(batch)
    whole = torch.cat([draft for draft, _, _ in rows.chunks(10**9)])
    assert len(whole) == len(rows.labels) == len(rows.weight) == len(rows.depth) == len(rows.block)
    for size in (1, 7, 30):
        seen = 0
        for draft, own, part in rows.chunks(size):
            assert part.start == seen
            assert draft.shape == own.shape == (part.stop - part.start, 64)
            assert not seen or rows.block[seen - 1] != rows.block[seen]
            seen = part.stop
            torch.testing.assert_close(draft, whole[part], rtol=1e-10, atol=1e-10)
            learnt = rows.weight[part] > 0
            text, place = (side[learnt] for side in (rows.labels[part] // 30, rows.labels[part] % 30))
            assert bool((rows.depth[part][learnt] < place).all())
            torch.testing.assert_close(own[learnt], logits[text, place - 1], rtol=1e-10, atol=1e-10)
        assert seen == len(rows.labels)
    assert bool((rows.weight > 0).any())
    learnt, documents = torch.zeros(2, 24, dtype=torch.bool), torch.ones(2, 24, dtype=torch.int64)
    learnt[0, 6:11], learnt[0, 15:] = True, True
    documents[0, 18:] = 2
    torch.manual_seed(0)
    rows = model.predict(replace(batch, loss_mask=learnt, documents=documents))
    labels, depth = (values[rows.weight > 0].tolist() for values in (rows.labels, rows.depth))
    assert set(labels) <= {*range(6, 11), *range(15, 24)}
    # a block's anchor is of the label's own text
    assert all((label < 18) == (label - 1 - d < 18) for label, d in zip(labels, depth, strict=True))


@TRAINABLE
def test_a_future_token_moves_no_earlier_prediction(case, target, workshop, texts):
    """Catches a mask that lets a drafted row see context at or behind its anchor."""
    model = workshop.model(case, target)
    train(model, batch_of(target, model.taps, texts[:4]), 3)
    changed_at = 13
    other = texts[:4].clone()
    other[:, changed_at:] = (other[:, changed_at:] + 17) % 64

    def predicted(tokens):
        torch.manual_seed(9)
        rows = model.predict(batch_of(target, model.taps, tokens))
        return rows, torch.cat([draft for draft, _, _ in rows.chunks(10**9)])

    places = predicted(COUNTED.repeat(2, 1))[0].labels % 30
    rows, before = predicted(texts[:4])
    _, after = predicted(other)
    # a row sees tokens up to the one before its label, and where the anchor stands, states before the anchor
    safe = (places - 1 < changed_at) & (rows.weight > 0)
    # heads of their own know the state before the anchor, and not the anchor
    sees_anchor = case.kind != "medusa" or model.config.sequential
    moved = (places - 1 - rows.depth >= changed_at + (not sees_anchor)) & (rows.weight > 0)
    assert bool(safe.any())
    assert bool(moved.any())
    torch.testing.assert_close(after[safe], before[safe], rtol=1e-10, atol=1e-10)
    assert bool(((after - before).abs().amax(-1) > 1e-6)[moved].all())


@TRAINABLE
def test_serving_drafts_what_training_predicts(case, target, workshop, prompts, plain, drafter_of, monkeypatch):
    """Catches positions, masks or context that differ between `predict` and `propose`: it would train for another game.

    Compared is the eldest path at every depth at which training was told the same tokens: those that were drafted.
    """
    drafter = drafter_of(case)
    model, seen, trained = drafter.model, dict[tuple[int, int], int](), dict[tuple[int, int], set[int]]()
    if case.kind == "small_model":  # serves a copy of its modules
        model = workshop.model(case, target).eval()
        model.lm.load_state_dict(drafter.model.model.state_dict())
    text = torch.tensor([(prompts[0] + plain(target, prompts[0], 48))[:40]])
    batch = batch_of(target, model.taps, text)
    with torch.no_grad():
        for seed in range(6):
            torch.manual_seed(seed)
            rows = model.predict(batch)
            torch.manual_seed(seed)
            places = model.predict(replace(batch, tokens=torch.arange(40)[None])).labels
            for draft, _, part in rows.chunks(10**9):
                served = rows.served(part, draft)
                draft = draft if served is None else served
                for row in range(part.start, part.stop):
                    depth = int(rows.depth[row])
                    # which path of its tree is the eldest, specblock decides by more than the likeliest tokens
                    if rows.weight[row] > 0 and (depth == 0 or case.kind != "specblock"):
                        choices = trained.setdefault((int(places[row]), depth), set())
                        if case.kind != "confu":  # its future also depends on the sampled distance from an anchor
                            choices.clear()
                        choices.add(int(draft[row].argmax()))
    propose = drafter.propose

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        begin = len(state.tokens[0])
        for depth, node in enumerate(draft.first_children(0)):
            seen[begin + depth, depth] = draft.ids[0][node]
            if begin + depth >= 40 or draft.ids[0][node] != text[0, begin + depth]:
                break
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    for _ in serve(target, [Request(text[0, :5].tolist(), 35, Sampling())], drafter, slots=1):
        pass
    shared = sorted(seen.keys() & trained.keys())
    assert sum(depth == 0 for _, depth in shared) >= 5
    assert all(seen[place] in trained[place] for place in shared)
