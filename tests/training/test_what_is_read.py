"""Which of the target's states a method reads: what a cache may leave out."""

from dataclasses import replace

import pytest
import torch
from conftest import batch_of, cases

from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.hf.transformers import TransformersTarget

TRAINABLE = pytest.mark.parametrize("case", [case for case in cases() if case.trains and not case.is_variant], ids=str)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and which of them are to learn: a span in the middle, and one at the end."""
    tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(4))
    learnt = torch.zeros_like(tokens, dtype=torch.bool)
    learnt[:, 6:12] = learnt[:, 18:] = True
    return tokens, learnt


def losses(model: DraftModel, batch: Batch) -> torch.Tensor:
    """[M] weighted divergences and terms of the method's own, of a seeded draw of positions."""
    torch.manual_seed(0)
    rows, found = model.eval().predict(batch), []
    for draft, target, part in rows.chunks(64):
        loss = torch.nn.functional.kl_div(draft.log_softmax(-1), target.softmax(-1), reduction="none").sum(-1)
        loss = loss + sum(rows.extra(part, draft, target).values())
        found.append(loss.nan_to_num(posinf=1e9) * rows.weight[part])
    return torch.cat(found).detach()


@TRAINABLE
def test_final_states_count_only_where_they_predict_what_is_learnt(case, target, workshop) -> None:
    """Catches a method with taps, or with tokens alone, that reads a final state which a cache leaves out."""
    model, (tokens, learnt) = workshop.model(case, target), texts()
    batch = replace(batch_of(target, model.taps, tokens), loss_mask=learnt)
    predicts = torch.zeros_like(learnt)
    predicts[:, :-1] = learnt[:, 1:]
    less = replace(batch, hidden=torch.where(predicts[..., None], batch.hidden, 0.0))
    if model.taps or not model.reads_target:
        torch.testing.assert_close(losses(model, less), losses(model, batch))
    none = replace(batch, hidden=torch.zeros_like(batch.hidden))
    assert not torch.allclose(losses(model, none), losses(model, batch))
    if model.taps:
        top = TopLogprobs.of(target.head(batch.hidden), 60)
        other = replace(batch, hidden=batch.hidden[..., :0], top=top)
        torch.testing.assert_close(losses(model, other), losses(model, batch), rtol=1e-2, atol=1e-3)


def test_a_distribution_of_likeliest_tokens_sums_to_one(target: TransformersTarget) -> None:
    """Catches a mass that is lost or counted twice, where the others have none left too."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[0.1], [1], [3], [10], [50]]
    )
    for count in (1, 8, 63):
        found = TopLogprobs.of(logits, count).logits(slice(None), 64).softmax(-1)
        torch.testing.assert_close(found.sum(-1), torch.ones(5))
        best = logits.topk(count, -1).indices
        torch.testing.assert_close(found.gather(1, best), logits.softmax(-1).gather(1, best), rtol=1e-3, atol=1e-6)
