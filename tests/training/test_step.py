"""Logits exist a chunk at a time; the loss and the gradients do not know it."""

import weakref

import pytest
import torch

from outrider.drafters import find
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training import losses, step
from outrider.training.config import Config as TrainConfig
from outrider.training.optimizers import Optimizers
from outrider.training.step import accumulate, diverge, optimise
from training.bench import KINDS, make_model, make_source


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_gradients_are_those_of_the_plain_sum(kind, talker, monkeypatch) -> None:
    """Catches a chunk that is weighted by its own rows or drops the gradient of a head's term: here is one graph."""
    monkeypatch.setattr(step, "chunk_size", lambda rows: 7)
    has_confidence = KINDS[kind].get("confidence", kind != "dflash")
    config = TrainConfig(loss={"kl": 1.0}, extra={"confidence": 0.5} if has_confidence else {})
    gradients = []
    for is_plain in (True, False):
        model = make_model(talker, kind).double()
        torch.manual_seed(2)
        rows = model.predict(make_source(talker).batch(0))
        if is_plain:
            rows.leaf = lambda part, states=rows._states: states[part]
            ((draft, target, part),) = rows.chunks(10**9)
            p, q = target.log_softmax(-1), draft.log_softmax(-1)
            terms = (p.exp() * (p - q)).sum(-1) + sum(0.5 * term for term in rows.extra(part, draft, target).values())
            ((rows.weight * terms).sum() / rows.weight.sum()).backward()
        else:
            assert len(list(rows.chunks(7))) > 4
            accumulate(rows, config)
            rows.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name
        )


@pytest.mark.parametrize(("kind", "is_counted"), [("vanilla", False), ("gated", True), ("medusa", True)])
def test_logits_of_a_chunk_are_gone_before_the_next_one_s(kind, is_counted, talker, monkeypatch) -> None:
    """Catches a name that holds the chunk before, so that twice the memory is taken."""
    monkeypatch.setattr("outrider.training.step.chunk_size", lambda rows: 14)
    module = find("medusa")
    medusa = module.Model(module.Config(heads=2, nodes=4), talker).float()
    model = medusa if kind == "medusa" else make_model(talker, kind)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    head = type(talker).head

    def watched(self: TransformersTarget, states: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        found = head(self, states)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(type(talker), "head", watched)
    rows = model.predict(make_source(talker).batch(1))
    accumulate(rows, TrainConfig(loss={"kl": 1.0}), is_counted)
    assert len(alive) > 6 and set(alive[::2]) == {0} and max(alive) <= 1, alive  # the target's first, then the draft's


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_never_splits_a_block(kind: str, talker: TransformersTarget) -> None:
    """Catches a head that starts in mid-block, and rows that come twice or never."""
    rows = make_model(talker, kind).predict(make_source(talker).batch(0))
    parts = [part for _, _, part in rows.chunks(5)]
    assert [part.start for part in parts] == [0, *[part.stop for part in parts[:-1]]]
    assert parts[-1].stop == len(rows.labels)
    owners = [set(rows.block[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners))


def test_several_batches_of_a_step_are_one(talker: TransformersTarget) -> None:
    """Catches batches that weigh the same although their rows differ in number, and a gradient that is not added up."""
    config = TrainConfig(loss={"kl": 1.0}, lr=1e-12, clip=1e9, batch=2, steps=100, dtype="float32", accumulate=3)
    source, alone, whole = make_source(talker), make_model(talker).double(), make_model(talker).double()
    torch.manual_seed(2)
    wanted = {name: torch.zeros_like(weight) for name, weight in alone.named_parameters()}
    loss = total = 0.0
    for number in range(3):
        rows = alone.predict(source.batch(number))
        alone.zero_grad()
        own = float(rows.weight.sum())
        loss, total = loss + own * accumulate(rows, config).says()["loss"], total + own
        rows.backward()
        for name, weight in alone.named_parameters():
            wanted[name] += own * weight.grad
    torch.manual_seed(2)
    batches = [source.batch(number) for number in range(3)]
    found = optimise(whole, Optimizers(whole, "adamw", 261, 0.0), batches, config, 0, True)
    assert found["loss"] == pytest.approx(loss / total, rel=1e-5)
    assert len({int(batch.loss_mask.sum()) for batch in batches}) > 1
    for name, weight in whole.named_parameters():
        scale = float(wanted[name].abs().max()) / total
        torch.testing.assert_close(weight.grad, wanted[name] / total, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("loss", sorted(losses.DIVERGENCES))
def test_rows_a_few_at_a_time_are_rows_in_one_go(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches slices that overlap or leave rows out, and weights of other rows."""
    noise = torch.Generator().manual_seed(3)
    draft, target = torch.randn(2, 11, 16, generator=noise, dtype=torch.float64)
    weight, labels = torch.rand(11, generator=noise), torch.randint(16, (11,), generator=noise)
    given = {loss: 0.5}, draft, target, labels, weight, 0.4, True
    whole = diverge(*given)
    monkeypatch.setattr(step, "CACHED_ELEMENTS", 3 * 16)
    for found, wanted in zip(diverge(*given), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)  # softmaxes are float32
    leaf = draft.clone().requires_grad_()
    (weight * losses.combine({loss: 0.5}, leaf, target, labels, 0.4)).sum().backward()
    torch.testing.assert_close(whole[1], leaf.grad)
