"""One step of training: rows of logits against the target's, their loss, its gradient.  Knows no method.

Logits exist a chunk at a time: each chunk's loss is back-propagated to the rows at once, then the rows' gradient goes
through the model in one go.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.config import nearest
from outrider.decoding.accept import overlap
from outrider.errors import ConfigError, TrainingError
from outrider.nn.draft_model import Batch, DraftModel, Predictions
from outrider.training import losses, rows
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers

CHUNK_ELEMENTS = {"cpu": 2**21}
"""Logits that exist at once, by device: 8 MiB in float32 stay near a CPU's cores; elsewhere 2**26, 256 MiB: with fewer
rows a GPU reads the output layer again and again, and multiplies little."""


class Joined(NamedTuple):
    """Where a training left the curve of its former number of steps, and at which share of the peak rate."""

    step: int
    rate: float

    def length(self, config: Config) -> int:
        """Steps over which the rate moves to the new curve."""
        return max(1, round(config.warmup * (config.last_step - self.step)))


def optimise(
    model: DraftModel, optimizer: Optimizers, batch: Batch, config: Config, step: int, is_counted: bool,
    reference: DraftModel | None = None, near: float = 0.0, joined: Joined | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One step of the optimiser.  Returns its loss, terms and, where counted, expected acceptance by depth.

    near: mean overlap of draft and target when it was last measured.
    """
    lr = config.lr * rate(step, config, joined)
    model.progress = step / config.last_step
    optimizer.zero_grad()
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
        noise = torch.get_rng_state()
        predictions = model.predict(batch)
        chosen = None if reference is None else select(predictions, reference, batch, config, noise, near)
        found = accumulate(predictions, config, is_counted, chosen, near)
    predictions.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    if not (math.isfinite(found["loss"]) and bool(norm.isfinite())):
        raise TrainingError(
            f"step {step + 1}: the loss is {found['loss']}, the gradient's norm {float(norm)}; first bad tensor: "
            f"{first_bad(model, batch)}. The last checkpoint is intact; lower train.lr (now {config.lr}) or look at "
            f"that tensor"
        )
    optimizer.step(lr)
    return found | {"lr": lr, "gradient_norm": round(float(norm), 4)}


def select(
    predictions: Predictions, reference: DraftModel, batch: Batch, config: Config, noise: Tensor, near: float = 0.0
) -> Tensor:  # fmt: skip
    """[M] bool, which rows train.  noise: the random state under which the rows were drawn; the reference draws the
    same."""
    after = torch.get_rng_state()
    torch.set_rng_state(noise)
    with torch.no_grad():
        theirs = reference.predict(batch)
    torch.set_rng_state(after)
    loss = functools.partial(losses.combine, config.loss, near=near)
    chosen = rows.most_learnable(predictions, theirs, config.select, loss, chunk_size(predictions))
    # the cache holds weights cast without a gradient, and the next passes need one
    torch.clear_autocast_cache()
    return chosen


def accumulate(
    predictions: Predictions, config: Config, is_counted: bool = False, chosen: Tensor | None = None, near: float = 0.0
) -> dict[str, Any]:
    """Back-propagate every chunk's loss to its rows.  Returns the loss over all rows, and where counted its terms,
    acceptance by depth and mean overlap.

    chosen [M] bool: the rows that train; acceptance is counted over all that are to be learnt.
    """
    learnt = predictions.weight > 0 if chosen is None else chosen
    # D-PACE needs a row's logits for its weight, so its blocks are counted, not weighed
    counts = "dpace" in config.position
    weights = learnt.float() if counts else rows.weights(config.position, predictions, slice(None)) * learnt
    total = weights.sum().clamp(min=1e-9)
    sums: dict[str, float] = {"loss": 0.0}
    whole = torch.zeros((), dtype=torch.float64, device=total.device)
    depths = int(predictions.depth.max()) + 1 if len(predictions.depth) else 0
    shares, rows_at = torch.zeros(depths), torch.zeros(depths)
    for draft, target, part in predictions.chunks(chunk_size(predictions)):
        weight = rows.weights(config.position, predictions, part, draft) * learnt[part] / total
        terms = {"divergence": losses.combine(config.loss, draft, target, predictions.labels[part], near)}
        terms |= _weighted(predictions.extra(part, draft, target), config.extra)
        loss = torch.stack([(weight * term).sum() for term in terms.values()]).sum()
        loss.backward()
        whole += loss.detach()  # read once, after all chunks: a device that is asked for each waits for each
        if is_counted:
            for name, term in terms.items():
                sums[name] = sums.get(name, 0.0) + float((weight * term.detach()).sum())
            share = overlap(target.float().softmax(-1), draft.detach().float().softmax(-1)).cpu()
            own = (predictions.weight[part] > 0).cpu()
            depth = predictions.depth[part].cpu()[own]
            shares.index_add_(0, depth, share[own])
            rows_at.index_add_(0, depth, torch.ones(len(depth)))
    sums["loss"] = whole.item()
    if not is_counted:
        return sums
    accepted = (shares / rows_at.clamp(min=1)).tolist()
    expected = 1 + sum(math.prod(accepted[: k + 1]) for k in range(depths))
    return sums | {
        "acceptance": [round(a, 4) for a in accepted], "expected_tokens_per_step": round(expected, 4),
        "overlap": float(shares.sum() / rows_at.sum().clamp(min=1)),
    }  # fmt: skip


def _weighted(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """The method's own terms times what `train.extra` says.  Raises ConfigError for a weight of no term."""
    unknown = sorted(weights.keys() - terms.keys())
    if unknown:
        end = nearest(unknown[0], terms) if terms else "; it has none at all, leave out train.extra"
        raise ConfigError(f"train.extra: this draft model has no extra loss {unknown[0]!r}{end}")
    return {name: weights.get(name, 1.0) * term for name, term in terms.items()}


def chunk_size(predictions: Predictions) -> int:
    """Rows whose logits exist at once."""
    elements = CHUNK_ELEMENTS.get(predictions.labels.device.type, 2**26)
    return max(1, elements // predictions.vocabulary)


def rate(step: int, config: Config, joined: Joined | None = None) -> float:
    """Share of the peak rate: linear warm-up, then a cosine to 0 at the last step.

    joined: from its step on the rate moves from the former curve to this one, linearly over `warmup` of the steps left.
    """
    last = config.last_step
    warm = max(1, round(config.warmup * last))
    found = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, last - warm)))
    if joined is None:
        return found
    share = min(1.0, (step - joined.step + 1) / joined.length(config))
    return joined.rate + share * (found - joined.rate)


def first_bad(model: DraftModel, batch: Batch) -> str:
    """The first tensor, from the input on, that holds a NaN or an infinity."""
    inputs = [("batch.taps", batch.taps), ("batch.hidden", batch.hidden)]
    weights = [(f"weight {name}", weight) for name, weight in model.named_parameters()]
    gradients = [(f"gradient of {name}", w.grad) for name, w in model.named_parameters() if w.grad is not None]
    for name, value in (*inputs, *weights, *gradients):
        if not value.isfinite().all():
            return f"{name} {tuple(value.shape)}"
    return "none of inputs, weights and gradients: the loss itself overflowed"
