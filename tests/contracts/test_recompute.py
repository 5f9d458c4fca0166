"""Layers that are computed again in the backward pass give the gradients of layers whose activations were kept."""

import pytest
import torch
from conftest import batch_of, cases, fast

from outrider import drafters
from outrider.nn.blocks import recompute
from outrider.nn.draft_model import Batch, DraftModel
from outrider.training.config import Config
from outrider.training.step import accumulate

NO_LAYERS = ("medusa", "ngram_embedding", "small_model")
"""Kinds without decoder layers of their own."""
SORTS = ("dspark", "eagle3", "peagle", "specblock")
"""One of every way in which layers attend."""
TRAINABLE = pytest.mark.parametrize(
    "case", fast((case for case in cases() if case.trains and case.kind not in NO_LAYERS), SORTS)
)
TOKENS = torch.randint(64, (3, 24), generator=torch.Generator().manual_seed(6))


def made(case, target, workshop) -> tuple[DraftModel, Batch]:
    torch.manual_seed(1)
    model = drafters.find(case.kind).Model(workshop.config(case, target), target)
    model = model.to(target.device, getattr(torch, target.spec.dtype)).train()
    return model, batch_of(target, model.taps, TOKENS)


def learnt(model: DraftModel, batch: Batch) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, bytes that the forward pass keeps for the backward pass, and gradients."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(2)  # anchors and noise are drawn
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows = model.predict(batch)
    found = accumulate(rows, Config(loss={"kl": 1.0})).says()
    rows.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return found["loss"], sum(kept.values()), gradients


@TRAINABLE
def test_layers_computed_again_give_the_same_gradients(case, target, workshop) -> None:
    """Catches an attention that answers otherwise when it is asked again, such as unrolled steps that count their
    calls, bit for bit, since the same numbers are multiplied in the same order; and layers that are computed twice
    where no gradient is wanted."""
    model, batch = made(case, target, workshop)
    loss, plain, gradients = learnt(model, batch)
    assert recompute(model, True)
    again, kept, found = learnt(model, batch)
    assert again == loss and found.keys() == gradients.keys()
    assert [name for name, gradient in gradients.items() if not torch.equal(found[name], gradient)] == []
    assert kept < plain
    calls: list[object] = []
    for layer in (module for module in model.modules() if hasattr(module, "is_recomputed")):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model.predict(batch)
    once = len(calls)
    model.eval()
    rows = model.predict(batch)
    accumulate(rows, Config(loss={"kl": 1.0}))
    rows.backward()
    assert len(calls) == 2 * once
