"""Texts that share a row of a batch teach a method what they teach it alone."""

import dataclasses

import pytest
import torch
from conftest import batch_of, cases, fast

from outrider import drafters
from outrider.data.packing import packed, side_by_side
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.rows import sample_positions

TRAINABLE = pytest.mark.parametrize("case", fast(case for case in cases() if case.trains))
LENGTHS = (24, 15, 13, 11, 9)


@pytest.fixture(scope="module")
def texts():
    return torch.randint(64, (len(LENGTHS), 24), generator=torch.Generator().manual_seed(6))


def padded(target, model, texts) -> Batch:
    """A row for every text."""
    lengths = torch.tensor(LENGTHS)[:, None]
    batch = batch_of(target, model.taps, texts * (torch.arange(24) < lengths))
    inside = torch.arange(24) < lengths
    return dataclasses.replace(batch, loss_mask=batch.loss_mask & inside, documents=inside.long())


def joined(batch: Batch) -> Batch:
    """The same texts in three rows."""
    [rows] = packed(range(len(LENGTHS)), LENGTHS, 3 * 24)
    assert [len(row) for row in rows] == [1, 2, 2]
    laid = lambda values: side_by_side([[values[i, : LENGTHS[i]] for i in row] for row in rows])
    numbers = side_by_side([[torch.full((LENGTHS[i],), n) for n, i in enumerate(row, 1)] for row in rows])
    return Batch(laid(batch.tokens), laid(batch.loss_mask), numbers, laid(batch.taps), laid(batch.hidden), per_row=2)


def gradients(model, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    rows = model.predict(batch)
    for draft, target, part in rows.chunks(64):
        terms = torch.nn.functional.cross_entropy(draft, rows.labels[part], reduction="none")
        terms = terms + sum(rows.extra(part, draft, target).values())
        (terms * rows.weight[part]).sum().backward()
    rows.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def made(case, target, workshop) -> DraftModel:
    """A model of this case that is drafted from at every position, in evaluation: noise of its own is not drawn."""
    config = workshop.config(case, target)
    own = {key: value for key, value in (("anchors", 64), ("floor", 1.0)) if key in type(config).model_fields}
    torch.manual_seed(1)
    model = drafters.find(case.kind).Model(config.model_copy(update=own), target)
    return model.to(target.device, getattr(torch, target.spec.dtype)).eval()


def draw_alike(patch: pytest.MonkeyPatch) -> None:
    """Have nothing that is drawn depend on how texts lie in rows, and nothing rounded to float32."""
    constant = lambda *shape, **how: torch.full(torch.empty(*shape).shape, 0.25)
    ones = lambda low, *rest, **how: torch.ones(rest[-1], dtype=torch.int64)
    exact = torch.Tensor.float
    for name, found in (("rand", constant), ("randn", constant), ("randint", ones)):
        patch.setattr(torch, name, found)
    patch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else exact(self))


def test_anchors_are_drawn_for_every_text_of_a_row_as_if_it_stood_alone():
    """Catches a limit that counts a row, which would train few positions of each packed text, and a draw that prefers
    a text: 400 rows, the mean place in a text of 10 is off by 0.5 once in 10^8 runs."""
    documents = torch.tensor([[1] * 10 + [2] * 4 + [3] * 6 + [0] * 2]).expand(400, -1)
    live = (documents > 0) & (torch.arange(22) != 4)
    batch = Batch(documents, live, documents, documents[..., None, None], documents[..., None], per_row=3)
    torch.manual_seed(0)
    at, there = sample_positions(live, 5, batch)
    assert at.shape == (400, 15) and bool((at.diff() > 0).all())
    chosen = torch.zeros_like(live).scatter(1, at, there)
    assert not (chosen & ~live).any()
    for number, wanted in ((1, 5), (2, 4), (3, 5)):
        assert ((chosen & (documents == number)).sum(1) == wanted).all()
    first = chosen[:, :10].float().mean(0)
    assert float((first * torch.arange(10)).sum() / first.sum()) == pytest.approx(41 / 9, abs=0.5)


@TRAINABLE
def test_the_gradient_of_texts_in_one_row_is_that_of_texts_in_rows_of_their_own(
    case, target, workshop, texts, monkeypatch
):
    """Catches a mask that lets texts see each other, positions that go on from one text to the next, and rows that are
    lost where two texts meet.  float64."""
    model = made(case, target, workshop)
    batch = padded(target, model, texts)
    draw_alike(monkeypatch)
    alone, together = gradients(model, batch), gradients(model, joined(batch))
    assert alone.keys() == together.keys() and alone
    for name, expected in alone.items():
        scale = float(expected.abs().max()) or 1.0
        torch.testing.assert_close(together[name] / scale, expected / scale, rtol=0, atol=1e-10)
