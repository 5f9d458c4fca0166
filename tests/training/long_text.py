"""The gradient of one long text in float64, found by one process or by several that have a part of it each."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from outrider.nn.draft_model import Batch
from outrider.nn.sequence import Stripe
from outrider.targets.hf.transformers import TransformersTarget
from training.bench import TAPS, make_model

LENGTH, BEGIN = 1001, 300
"""Tokens, not a multiple of two, and the first that is learnt."""


def text(target: TransformersTarget) -> Batch:
    noise, hidden = torch.Generator().manual_seed(2), target.spec.hidden
    tokens = torch.randint(target.spec.vocabulary, (1, LENGTH), generator=noise)
    learnt = torch.arange(LENGTH)[None] >= BEGIN
    taps = torch.randn(1, LENGTH, len(TAPS), hidden, generator=noise, dtype=torch.float64)
    states = torch.randn(1, LENGTH, hidden, generator=noise, dtype=torch.float64)
    return Batch(tokens, learnt, torch.ones_like(tokens), taps, states)


@contextmanager
def counted(weights: list[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes that passes in this block keep for their backward pass, by storage; weights are not counted, nor masks,
    which all layers share."""
    sizes, known = dict[int, int](), {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(value: Tensor) -> Tensor:
        place = value.untyped_storage()
        is_mask = value.dim() == 4 and value.shape[1] == 1
        if value.is_floating_point() and not is_mask and place.data_ptr() not in known:
            sizes[place.data_ptr()] = place.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield sizes


def gradients(target: TransformersTarget, stripe: Stripe | None = None) -> dict[str, Any]:
    """Loss and gradients of the text, summed over the processes, and what this one keeps for its backward pass."""
    model = make_model(target, "grouped", anchors=257).double()
    batch = text(target)
    if stripe is not None:
        batch = Batch(
            batch.tokens, batch.loss_mask, batch.documents, stripe.own(batch.taps), batch.hidden, stripe=stripe
        )
    torch.manual_seed(3)
    with counted([*model.parameters(), *target.model.parameters()]) as sizes:
        rows = model.predict(batch)
    loss = torch.zeros((), dtype=torch.float64)
    for draft, wanted, part in rows.chunks(100):
        divergence = -(wanted.softmax(-1) * draft.log_softmax(-1)).sum(-1)
        own = (divergence * rows.weight[part]).sum()
        own.backward()
        loss += own.detach()
    rows.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if stripe is not None:
        for value in (loss, *found.values()):
            distributed.all_reduce(value)
    return {
        "loss": float(loss), "gradients": found, "saved_bytes": sum(sizes.values()), "taps": batch.taps.shape[1],
    }  # fmt: skip
