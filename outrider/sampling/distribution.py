"""From logits to the sampling distribution, for both drafter and target; temperature 0 is one-hot.

The order is part of the definition.  Settings that depend on a node's prefix come first, in `prefix.processed`.  Then,
here: temperature, top-k, top-p, min-p, typical-p, in the order of transformers.  B live slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.sampling.settings import Sampling

FEW = 1024
"""Largest top-k for which the candidates are gathered first."""
SPARE = 64
"""Additional candidates that are checked for ties with the last one."""
IDLE = Sampling()
"""Settings that change nothing."""


class Settings(NamedTuple):
    """The `Sampling` of every live slot, as tensors [B]; None if no slot sets it."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None = None
    typical_p: Tensor | None = None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> Settings:
        def column(name: str) -> Tensor | None:
            values, idle = [getattr(sampling, name) for sampling in samplings], getattr(IDLE, name)
            return None if all(value == idle for value in values) else torch.tensor(values, device=device)

        return cls(*map(column, cls._fields))

    def each(self, change: Callable[[Tensor], Tensor]) -> Settings:
        """Apply one change to every column."""
        return Settings(*(None if column is None else change(column) for column in self))

    def of_slots(self, slots: Tensor | slice) -> Settings:
        """The settings of some slots, [B] bool or a slice."""
        return self.each(lambda column: column[slots])

    @property
    def has_cuts(self) -> bool:
        """Whether any live slot samples from fewer than all tokens."""
        return any(cut is not None for cut in self[1:])

    @property
    def is_tempered(self) -> bool:
        """Whether every live slot samples from all tokens at a temperature above 0: its distribution is `tempered`."""
        return self.temperature is not None and not self.has_cuts and bool((self.temperature > 0).all())


def wide(logits: Tensor) -> Tensor:
    """float32, or float64 if the logits are: a bfloat16 softmax loses mass over 150k tokens."""
    return logits if logits.dtype == torch.float64 else logits.float()


def log_probs(logits: Tensor) -> Tensor:
    """Log probabilities of logits [..., V] at temperature 1."""
    return wide(logits).log_softmax(-1)


def distribution(logits: Tensor, settings: Settings) -> Tensor:
    """The distribution of the next token.  logits [B, ..., V]; returns the same shape, each row summing to 1.

    The target's logits come from `prefix.processed`; a drafter may pass its logits unprocessed.  Returns `wide` values.
    Ties at temperature 0 go to the lowest token id.  A slot's distribution does not depend on the rest of the batch.
    """
    logits = wide(logits)
    if settings.temperature is None:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    top_k = [0] if settings.top_k is None else settings.top_k.tolist()
    kinds = sorted(set(top_k))
    if len(kinds) == 1:
        return _distribution_of_few(logits, settings, kinds[0])
    p = torch.empty_like(logits)
    for k in kinds:
        slots = torch.tensor([slot_k == k for slot_k in top_k], device=logits.device)
        p[slots] = _distribution_of_few(logits[slots], settings.of_slots(slots), k)
    return p


def _distribution(logits: Tensor, settings: Settings) -> Tensor:
    """Temperature, then every truncation except top-k, renormalised after each; slots at temperature 0 are one-hot."""
    assert settings.temperature is not None
    shape = (-1,) + (1,) * (logits.dim() - 1)
    is_cold = settings.temperature == 0
    p = tempered(logits, torch.where(is_cold, 1.0, settings.temperature))
    for column, keep in (
        (settings.top_p, _keep_top_p),
        (settings.min_p, _keep_min_p),
        (settings.typical_p, _keep_typical),
    ):
        if column is not None:
            remaining = keep(p, column.to(p.dtype).view(shape))
            p = remaining / remaining.sum(-1, keepdim=True)
    if not is_cold.any():
        return p
    cold = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_cold.view(shape), cold, p)


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature), for logits [B, ..., V] and temperatures [B] above 0."""
    temperature = temperature.to(logits.dtype).view((-1,) + (1,) * (logits.dim() - 1))
    # the largest is 0, so that a temperature near 0 overflows only to -inf: softmax of two +inf is NaN
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)


def _distribution_of_few(logits: Tensor, settings: Settings, k: int) -> Tensor:
    """The distribution of slots with the same top-k: the k most likely tokens and ties with the k-th; 0 means all.

    If k is small, the candidates are gathered first, in the order of their ids, so that 150k tokens are read only once.
    """
    if not 0 < k < logits.shape[-1]:
        return _distribution(logits, settings)
    best = logits.topk(min(k + SPARE, logits.shape[-1]), -1)
    threshold = best.values[..., k - 1 : k]
    if k > FEW or bool((best.values[..., -1:] == threshold).any()):
        return _distribution(logits.masked_fill(logits < threshold, -torch.inf), settings)
    ids, order = best.indices.sort(-1)
    few = best.values.gather(-1, order)
    p = _distribution(few.masked_fill(few < threshold, -torch.inf), settings)
    return torch.zeros_like(logits).scatter_(-1, ids, p)


def _keep_top_p(p: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the most likely tokens, at least one, until their probabilities sum to top_p; 1 keeps all."""
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    top_p = top_p.clamp(min=torch.finfo(top_p.dtype).tiny)  # a top_p that float32 rounds to 0 still leaves one token
    return torch.zeros_like(p).scatter_(-1, order, ranked.masked_fill((before >= top_p) & (top_p < 1), 0.0))


def _keep_min_p(p: Tensor, min_p: Tensor) -> Tensor:
    """Keeps the tokens at least min_p times as likely as the most likely one."""
    return p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0)


def _keep_typical(p: Tensor, typical_p: Tensor) -> Tensor:
    """Keeps the tokens whose surprise -log p is nearest to the entropy until their sum reaches typical_p, and ties with
    the last; 1 keeps all."""
    surprise = -p.log()
    entropy = (p * surprise).nan_to_num(0.0).sum(-1, keepdim=True)
    ranked, order = (surprise - entropy).abs().sort(dim=-1, stable=True)
    last = (p.gather(-1, order).cumsum(-1) < typical_p).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)
    is_odd = (surprise - entropy).abs() > ranked.gather(-1, last)
    return p.masked_fill(is_odd & (typical_p < 1), 0.0)
