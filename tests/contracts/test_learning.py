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
    losses = train(model, batch_of(target, model.taps, texts), 14)
    assert all(loss == loss for loss in losses)
    assert losses[-1] < 0.9 * losses[0]
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
def test_chunks_cover_every_row_once_and_split_no_block(case, target, workshop, texts):
    """Catches rows that are lost at a chunk's end, and logits that hang on the size of the chunk."""
    model = workshop.model(case, target)
    batch = batch_of(target, model.taps, texts)
    torch.manual_seed(0)
    rows = model.predict(batch)
    whole = torch.cat([draft for draft, _, _ in rows.chunks(10**9)])
    assert len(whole) == len(rows.labels) == len(rows.weight) == len(rows.depth) == len(rows.block)
    for size in (1, 7, 30):
        seen, pieces = 0, []
        for draft, own, part in rows.chunks(size):
            assert part.start == seen
            assert draft.shape == own.shape == (part.stop - part.start, 64)
            if seen:
                assert rows.block[seen - 1] != rows.block[seen]
            seen = part.stop
            pieces.append(draft)
        assert seen == len(rows.labels)
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-10, atol=1e-10)


@TRAINABLE
def test_rows_are_labelled_with_what_the_target_saw(case, target, workshop, texts):
    """Catches a shift by one between anchors, labels and the target's logits, with which learning an own distribution
    would still look fine; and prompts, padding and other texts' tokens in the loss."""
    model = workshop.model(case, target)
    batch = batch_of(target, model.taps, COUNTED)
    logits = target.head(batch.hidden)
    torch.manual_seed(0)
    rows = model.predict(batch)
    for _, own, part in rows.chunks(16):
        for n, row in enumerate(range(part.start, part.stop)):
            if rows.weight[row] == 0:
                continue
            text, place = divmod(int(rows.labels[row]), 30)
            assert int(rows.depth[row]) < place
            torch.testing.assert_close(own[n], logits[text, place - 1], rtol=1e-10, atol=1e-10)
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


# ── what training shows is what serving sees ──────────────────────────────────────────────────────────────────────────


@TRAINABLE
def test_a_future_token_moves_no_earlier_prediction(case, target, workshop, texts):
    """Catches a mask that lets a drafted row see context at or behind its anchor."""
    model = workshop.model(case, target)
    train(model, batch_of(target, model.taps, texts), 5)
    changed_at = 13
    other = texts.clone()
    other[:, changed_at:] = (other[:, changed_at:] + 17) % 64

    def predicted(tokens):
        torch.manual_seed(9)
        rows = model.predict(batch_of(target, model.taps, tokens))
        return rows, torch.cat([draft for draft, _, _ in rows.chunks(10**9)])

    places = predicted(COUNTED.repeat(4, 1))[0].labels % 30
    rows, before = predicted(texts)
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

    The first drafted token is compared, which every method sees alike: the argmax of a depth-0 row.
    """
    drafter = drafter_of(case)
    model, seen, trained = drafter.model, dict[int, int](), dict[int, int]()
    if case.kind == "small_model":  # serves a copy of its modules
        model = workshop.model(case, target).eval()
        model.lm.load_state_dict(drafter.model.model.state_dict())
    text = torch.tensor([(prompts[0] + plain(target, prompts[0], 48))[:40]])
    batch = batch_of(target, model.taps, text)
    with torch.no_grad():
        for seed in range(12):
            torch.manual_seed(seed)
            rows = model.predict(batch)
            torch.manual_seed(seed)
            places = model.predict(replace(batch, tokens=torch.arange(40)[None])).labels
            for draft, _, part in rows.chunks(10**9):
                for row in range(part.start, part.stop):
                    if rows.depth[row] == 0 and rows.weight[row] > 0:
                        trained[int(places[row])] = int(draft[row].argmax())
    propose = drafter.propose

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        if draft.tokens.shape[1]:
            seen[len(state.tokens[0])] = int(draft.tokens[0, 0])
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    for _ in serve(target, [Request(text[0, :5].tolist(), 35, Sampling())], drafter, slots=1):
        pass
    shared = sorted(set(seen) & set(trained))
    assert len(shared) >= 5
    assert [seen[place] for place in shared] == [trained[place] for place in shared]
