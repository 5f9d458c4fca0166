"""How far a draft's law is from the target's, row by row: one signature, one reduction.

Every divergence takes draft and target logits [m, V] and labels [m], and gives [m] float32.  p is the target's law, q the
draft's, alpha = sum(min(p, q)) the expected acceptance, TV = 1 - alpha.  Softmaxes are float32: bf16 loses mass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import nearest
from outrider.decoding.accept import overlap
from outrider.errors import ConfigError

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


def ce(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """-log q[label]: hard labels; needs no target logits."""
    return F.cross_entropy(draft.float(), labels, reduction="none")


def kl(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Forward: sum p log(p / q); covers every mode of p."""
    p, q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def rkl(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Reverse: sum q log(q / p); seeks a mode of p."""
    p, q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1)


def tv(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """1 - alpha, in [0, 1]: the rejection probability itself; half the L1 distance."""
    return 1 - overlap(target.float().softmax(-1), draft.float().softmax(-1))


def lk_alpha(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """-log alpha: TV's gradient divided by alpha, so it does not vanish where the draft is poor.  (arXiv 2602.23881.)"""
    return -overlap(target.float().softmax(-1), draft.float().softmax(-1)).clamp(min=1e-9).log()


def lk_lambda(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """w KL + (1 - w) TV with w = exp(-3 alpha), held constant: KL while far, TV when near.  (arXiv 2602.23881.)"""
    far = tv(draft, target, labels)
    weight = torch.exp(-3 * (1 - far.detach()))
    return weight * kl(draft, target, labels) + (1 - weight) * far


DIVERGENCES: dict[str, Divergence] = {f.__name__: f for f in (ce, kl, rkl, tv, lk_alpha, lk_lambda)}


def check(loss: Mapping[str, float]) -> Mapping[str, float]:
    """The loss asked for, every name known.  Raises ConfigError with the nearest name."""
    for name in loss:
        if name not in DIVERGENCES:
            raise ConfigError(f"unknown loss {name!r}{nearest(name, DIVERGENCES)}")
    if not loss:
        raise ConfigError(f"the loss names no term; known: {', '.join(sorted(DIVERGENCES))}")
    return loss


def combine(loss: Mapping[str, float], draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """The weighted sum of divergences, [m]."""
    return sum((weight * DIVERGENCES[name](draft, target, labels) for name, weight in loss.items()), draft.new_zeros(()))
