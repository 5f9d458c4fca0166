"""One training step: rows of logits compared with the target's, their loss, its gradient.  Independent of the method.

Logits exist one chunk at a time: each chunk's loss is back-propagated to the rows immediately, then the rows' gradient
goes through the model in one pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.config import nearest
from outrider.decoding.accept import overlap
from outrider.errors import ConfigError
from outrider.nn.draft_model import Batch, DraftModel, Predictions
from outrider.processes import ALONE, Processes, Weights, Whole
from outrider.training import losses, rows
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers
from outrider.training.progress.throughput import BACKWARD, StepFlops

CHUNK_ELEMENTS = {"cpu": 2**20}
"""Number of logits that exist at once, by device.  On a CPU 4 MiB in float32, and the same for the target's logits and
for gradients, stay in cache.  Elsewhere 2**26 (256 MiB): with fewer rows, a GPU would spend its time reading the output
layer."""

CACHED_ELEMENTS = 2**18
"""Logits per loss computation on a CPU: 1 MiB in float32, so that intermediate results stay in cache."""

CHUNK_ROWS = 64
"""Minimum number of rows per chunk.  With a vocabulary of 150,000 a CPU would process 13 rows at a time, and every
chunk would wait for the output layer's weights."""


class Joined(NamedTuple):
    """Step at which training left the curve of its previous number of steps, and the share of the peak rate there."""

    step: int
    rate: float

    def length(self, config: Config) -> int:
        """Number of steps over which the rate moves to the new curve."""
        return max(1, round(config.warmup * (config.last_step - self.step)))


class Sums:
    """Sums over the batches of one step.  Their gradients are in the model, scaled as if the first batch were the only
    one."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.weight: Tensor | None = None
        """`first`: divisor of every batch's loss: with one process the weight of the first batch's rows, with several
        1.
        `weight`: total weight of the rows so far.  Both on the device."""
        self.terms: dict[str, Tensor] = {}
        """The loss and its terms: weighted sums, not yet divided.  Also on the device, which is read once per step."""
        self.shares, self.rows = torch.zeros(0), torch.zeros(0)
        """By depth: sum(min(p, q)) summed over rows, and the number of rows."""

    @property
    def scale(self) -> float:
        """Factor for the gradients, so that rows weigh the same in all batches."""
        if self.first is None or self.weight is None or self.first is self.weight:
            return 1.0
        return float(self.first / self.weight)

    def add(self, weight: Tensor, terms: Mapping[str, Tensor], shares: Tensor, rows: Tensor) -> None:
        """Add a batch whose loss was divided by `self.first`."""
        self.weight = weight if self.weight is None else self.weight + weight
        for name, term in terms.items():
            self.terms[name] = self.terms[name] + term if name in self.terms else term
        depths = max(len(self.shares), len(shares))
        grown = [torch.cat([each, torch.zeros(depths - len(each))]) for each in (self.shares, shares, self.rows, rows)]
        self.shares, self.rows = grown[0] + grown[1], grown[2] + grown[3]

    @property
    def parts(self) -> tuple[float, dict[str, float], list[float], list[float]]:
        """Weight, terms, shares and rows, to send to other processes."""
        assert self.weight is not None
        terms = {name: float(term) for name, term in self.terms.items()}
        return float(self.weight), terms, self.shares.tolist(), self.rows.tolist()

    def over(self, parts: Sequence[tuple[float, dict[str, float], list[float], list[float]]]) -> Sums:
        """The sums over all processes.  parts: `parts` of every process."""
        if len(parts) == 1:
            return self
        total = Sums()
        for weight, terms, shares, counts in parts:
            added = {name: torch.tensor(term, dtype=torch.float64) for name, term in terms.items()}
            total.add(torch.tensor(weight), added, torch.tensor(shares), torch.tensor(counts))
        total.first = torch.ones(())
        return total

    def says(self) -> dict[str, Any]:
        """Loss and terms; if rows were counted, also acceptance by depth and mean overlap."""
        scale = self.scale
        figures: dict[str, Any] = {name: float(term) * scale for name, term in self.terms.items()}
        if not len(self.rows):
            return figures
        accepted = (self.shares / self.rows.clamp(min=1)).tolist()
        expected = 1 + sum(math.prod(accepted[: k + 1]) for k in range(len(accepted)))
        return figures | {
            "acceptance": [round(a, 4) for a in accepted], "expected_tokens_per_step": round(expected, 4),
            "overlap": float(self.shares.sum() / self.rows.sum().clamp(min=1)),
        }  # fmt: skip


def optimise(
    model: DraftModel, optimizer: Optimizers, batches: Iterable[Batch], config: Config, step: int, is_counted: bool,
    reference: DraftModel | None = None, near: float = 0.0, joined: Joined | None = None,
    processes: Processes = ALONE, flops: StepFlops | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One optimiser step over these batches, processed one after the other as if they were one.

    processes: each has different rows of the same batches; all of them learn from all rows and return the same figures.

    Returns the loss, its terms and, if counted, expected acceptance by depth.  If the loss or the gradient is not
    finite, returns `bad` and takes no step.
    near: mean overlap of draft and target, as last measured.  flops: receives those of the step.
    """
    counted = (lambda times: nullcontext()) if flops is None else flops.of
    lr = config.lr * rate(step, config, joined)
    model.progress = step / config.last_step
    optimizer.zero_grad()
    sums = Sums()
    for batch in batches:
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            noise = torch.get_rng_state()
            with counted(1 + BACKWARD):
                predictions = model.predict(batch)
            if batch.share is not None and not batch.share.counts:
                predictions.weight = torch.zeros_like(predictions.weight)
            chosen = None
            if reference is not None:
                chosen = select(predictions, reference, batch, config, noise, near, processes)
            with counted(1):  # includes the heads' backward passes
                accumulate(predictions, config, is_counted, chosen, near, sums, processes)
        predictions.backward()
    sums = sums.over(processes.weights.reduce(model, sums.parts))
    figures, scale = sums.says(), sums.scale
    if scale != 1:
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad *= scale
    norm = processes.weights.full(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip))
    if not (math.isfinite(figures["loss"]) and bool(norm.isfinite())):
        what = f"the loss is {figures['loss']}, the gradient's norm {float(norm)}"
        tensor = first_of(processes, first_bad(model, batch, processes.weights).removeprefix(NONE)) or NONE
        return figures | {"bad": f"{what}; first bad tensor: {tensor}"}
    optimizer.step(lr)
    return figures | {"lr": lr, "gradient_norm": round(float(norm), 4)}


def first_of(processes: Processes, problem: str) -> str:
    """The first non-empty problem, by rank; empty if no process has one."""
    return next(filter(None, processes.gather(problem)), "")


def select(
    predictions: Predictions, reference: DraftModel, batch: Batch, config: Config, noise: Tensor, near: float = 0.0,
    processes: Processes = ALONE,
) -> Tensor:  # fmt: skip
    """[M] bool, the rows to train on.  noise: the random state before the rows were drawn, so that the reference draws
    the same ones."""
    after = torch.get_rng_state()
    torch.set_rng_state(noise)
    with torch.no_grad():
        theirs = reference.predict(batch)
    torch.set_rng_state(after)
    loss = functools.partial(losses.combine, config.loss, near=near)
    together = lambda gains: torch.cat(processes.gather(gains.cpu())).to(gains.device)
    chosen = rows.most_learnable(predictions, theirs, config.select, loss, chunk_size(predictions), together)
    # the cache holds weights that were cast without a gradient, but the next passes need one
    torch.clear_autocast_cache()
    return chosen


def accumulate(
    predictions: Predictions, config: Config, is_counted: bool = False, chosen: Tensor | None = None, near: float = 0.0,
    sums: Sums | None = None, processes: Processes = ALONE,
) -> Sums:  # fmt: skip
    """Back-propagate every chunk's loss to its rows.  Returns the sums of the loss over all rows and, if counted,
    of its terms and of acceptance by depth.  If not counted, nothing is read from the device.

    chosen [M] bool: the rows to train on; acceptance is counted over all learnt rows.
    sums: of the step's earlier batches; this batch is added, and the same object is returned.
    processes: each has different rows of the batch; with several, the loss is divided later, over all of them.
    """
    sums = Sums() if sums is None else sums
    learnt = predictions.weight > 0 if chosen is None else chosen
    # D-PACE weights need the rows' logits, so the total is a count of rows instead of a sum of weights
    counts = "dpace" in config.position
    weights = learnt.float() if counts else rows.weights(config.position, predictions, slice(None)) * learnt
    local_total = weights.sum().clamp(min=1e-9)
    if sums.first is None:  # the total over all processes is known only at the end of the step
        sums.first = local_total if processes.count == 1 else torch.ones_like(local_total)
    total = sums.first
    terms_at = {"loss": torch.zeros((), dtype=torch.float64, device=total.device)}
    depths = int(predictions.depth.max()) + 1 if len(predictions.depth) and is_counted else 0
    shares, rows_at = torch.zeros(depths), torch.zeros(depths)
    for draft, target, part in predictions.chunks(chunk_size(predictions)):
        weight = rows.weights(config.position, predictions, part, draft) * learnt[part] / total
        labels = predictions.labels[part]
        divergence, gradient, share = diverge(config.loss, draft, target, labels, weight, near, is_counted)
        extra = _weighted(predictions.extra(part, draft, target), config.extra)
        learning = [term for term in extra.values() if term.requires_grad]
        torch.autograd.backward([draft, *learning], [gradient, *(weight.to(term.dtype) for term in learning)])
        terms = {"divergence": divergence} | {name: term.detach() for name, term in extra.items()}
        weighed = {name: (weight * term).sum().double() for name, term in terms.items()}
        terms_at["loss"] = terms_at["loss"] + torch.stack([*weighed.values()]).sum()
        if is_counted:
            with torch.no_grad():
                served = predictions.served(part, draft.detach())
            if served is not None:
                share = overlap(target.float().softmax(-1), served.float().softmax(-1))
            for name, term in weighed.items():
                terms_at[name] = terms_at.get(name, 0.0) + term
            share = share.cpu()
            is_own = (predictions.weight[part] > 0).cpu()
            depth = predictions.depth[part].cpu()[is_own]
            shares.index_add_(0, depth, share[is_own])
            rows_at.index_add_(0, depth, torch.ones(len(depth)))
        # otherwise the next chunk's logits would be allocated in addition to these
        del draft, target, gradient, extra, learning
    sums.add(local_total, terms_at, shares, rows_at)
    return sums


def diverge(
    loss: Mapping[str, float], draft: Tensor, target: Tensor, labels: Tensor, weight: Tensor, near: float,
    is_counted: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Divergences of a chunk's rows [m], the gradient of their weighted sum with respect to `draft` [m, V], and, if
    counted, the rows' overlaps [m].

    On a CPU a few rows are processed at a time, so that intermediate results stay in cache; each row's result is the
    same.
    """

    def in_one_go(here: slice) -> tuple[Tensor, Tensor, Tensor]:
        logits = draft[here].detach().requires_grad_()
        value = losses.combine(loss, logits, target[here], labels[here], near)
        [gradient] = torch.autograd.grad(value, logits, weight[here].to(value.dtype))
        if not is_counted:
            return value.detach(), gradient, weight[:0]
        share = overlap(target[here].float().softmax(-1), logits.detach().float().softmax(-1))
        return value.detach(), gradient, share

    count = max(1, CACHED_ELEMENTS // draft.shape[-1])
    if draft.device.type != "cpu" or count >= len(draft):
        return in_one_go(slice(None))
    whole, parts = torch.empty_like(draft), []
    for begin in range(0, len(draft), count):
        value, whole[begin : begin + count], share = in_one_go(slice(begin, begin + count))
        parts.append((value, share))
    values, shares = zip(*parts, strict=True)
    return torch.cat(values), whole, torch.cat(shares)


def _weighted(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """The method's own terms times their weights in `train.extra`.  Raises ConfigError for an unknown term."""
    unknown = sorted(weights.keys() - terms.keys())
    if unknown:
        end = nearest(unknown[0], terms) if terms else "; it has none, so leave out train.extra"
        raise ConfigError(f"train.extra: this draft model has no extra loss {unknown[0]!r}{end}")
    return {name: weights.get(name, 1.0) * term for name, term in terms.items()}


def chunk_size(predictions: Predictions) -> int:
    """Number of rows whose logits exist at once."""
    elements = CHUNK_ELEMENTS.get(predictions.labels.device.type, 2**26)
    return max(CHUNK_ROWS, elements // predictions.vocabulary)


def rate(step: int, config: Config, joined: Joined | None = None) -> float:
    """Share of the peak rate: linear warm-up, then a cosine to 0 at the last step.

    joined: from its step on, the rate moves linearly to this curve, over the share `warmup` of the remaining steps.
    """
    last = config.last_step
    warm = max(1, round(config.warmup * last))
    planned = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, last - warm)))
    if joined is None:
        return planned
    share = min(1.0, (step - joined.step + 1) / joined.length(config))
    return joined.rate + share * (planned - joined.rate)


NONE = "none of inputs, weights and gradients: the loss itself overflowed"


def first_bad(model: DraftModel, batch: Batch, layout: Weights | None = None) -> str:
    """The first tensor that holds a NaN or an infinity, in the order inputs, weights, gradients.  layout: how the model
    is distributed over processes; by default, one process has all of it."""
    local = (layout or Whole()).local
    inputs = [("batch.taps", batch.taps), ("batch.hidden", batch.hidden)]
    weights = [(f"weight {name}", weight) for name, weight in model.named_parameters()]
    gradients = [(f"gradient of {name}", w.grad) for name, w in model.named_parameters() if w.grad is not None]
    for name, value in (*inputs, *weights, *gradients):
        if not local(value).isfinite().all():
            return f"{name} {tuple(value.shape)}"
    return NONE
