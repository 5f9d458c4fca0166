"""Divergences of a draft's distribution from the target's, row by row, with one signature and one reduction.

Every divergence takes draft and target logits [m, V] and labels [m], and returns [m] float32.  p is the target's
distribution, q the draft's, alpha = sum(min(p, q)) the expected acceptance, TV = 1 - alpha.  Softmaxes are float32:
bf16 loses mass.

A draft over a reduced vocabulary has logits of -inf for all other tokens.  p is never renormalised: its mass on them is
lost acceptance and counts as such.  Forward KL, which would be infinite, is then sum p log(p / q) - sum p + 1 over the
tokens that can be drafted: the generalised divergence of the two measures, which is plain KL if all tokens can be
drafted.  Such a row is weighted by p's mass on those tokens.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import nearest
from outrider.decoding.accept import overlap
from outrider.errors import ConfigError

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


UNREACHABLE = 20.0
"""Cross-entropy, in nats, of a label that can't be drafted; it has no gradient."""


def ce(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """-log q[label]: hard labels; needs no target logits."""
    nats = F.cross_entropy(draft.float(), labels, reduction="none")
    return torch.where(nats.isinf(), UNREACHABLE, nats)


def kl(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Forward: sum p log(p / q); covers every mode of p."""
    return _forward(*_logs(draft, target))


def rkl(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Reverse: sum q log(q / p); seeks a mode of p."""
    p, q = _logs(draft, target)
    return (q.exp() * (_finite(q) - p)).sum(-1)


def jsd(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Jensen-Shannon: the mean of KL(p, m) and KL(q, m) with m = (p + q) / 2; symmetric, at most log 2."""
    p, q = _logs(draft, target)
    middle = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * (p.exp() * (p - middle) + q.exp() * (_finite(q) - middle)).sum(-1)


def tv(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """1 - alpha, in [0, 1]: the rejection probability itself; half the L1 distance."""
    return 1 - overlap(target.float().softmax(-1), draft.float().softmax(-1))


def lk_alpha(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """-log alpha: TV's gradient divided by alpha, so it does not vanish for poor drafts.  (arXiv 2602.23881.)"""
    return -overlap(target.float().softmax(-1), draft.float().softmax(-1)).clamp(min=1e-9).log()


def lk_lambda(draft: Tensor, target: Tensor, labels: Tensor, near: float = 0.0) -> Tensor:
    """w KL + (1 - w) TV with w = exp(-near): KL at low overlap, TV at high overlap.  (arXiv 2602.23881, with
    SpecForge's rate of 1.)

    near: mean overlap of draft and target over all rows, as last measured.  With a separate w per row, KL's large
    gradients would go to rows that can't be learnt.
    """
    p, q = _logs(draft, target)  # once for both
    weight = math.exp(-near)
    return weight * _forward(p, q) + (1 - weight) * (1 - overlap(p.exp(), q.exp()))


def _logs(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log q."""
    return target.float().log_softmax(-1), draft.float().log_softmax(-1)


def _forward(p: Tensor, q: Tensor) -> Tensor:
    """Forward KL, generalised, of log p and log q."""
    probs = p.exp()
    # saves three passes over [m, V] if all tokens can be drafted; on a GPU the check would synchronise
    if q.device.type == "cpu" and bool(q.detach().amin() > -torch.inf):
        return (probs * (p - q)).sum(-1)
    beyond = q == -torch.inf
    inside = (probs * (p - q)).masked_fill(beyond, 0.0)
    return inside.sum(-1) + (probs * beyond).sum(-1)


def _finite(logs: Tensor) -> Tensor:
    """log q with 0 for -inf: it is multiplied by q, and 0 * inf is neither a loss nor a gradient."""
    return logs.masked_fill(logs == -torch.inf, 0.0)


DIVERGENCES: dict[str, Divergence] = {f.__name__: f for f in (ce, kl, rkl, jsd, tv, lk_alpha, lk_lambda)}
BY_OVERLAP = frozenset({"lk_lambda"})
"""Divergences that also take the mean overlap."""


def check(loss: dict[str, float]) -> dict[str, float]:
    """Validate the names of a loss.  Raises ConfigError with the nearest name for an unknown one."""
    for name in loss:
        if name not in DIVERGENCES:
            raise ConfigError(f"unknown loss {name!r}{nearest(name, DIVERGENCES)}")
    if not loss:
        raise ConfigError(f"the loss has no term; use one or more of {', '.join(sorted(DIVERGENCES))}")
    return loss


def combine(loss: Mapping[str, float], draft: Tensor, target: Tensor, labels: Tensor, near: float = 0.0) -> Tensor:
    """The weighted sum of divergences, [m].  near: as in `lk_lambda`, for those in `BY_OVERLAP`."""
    total = draft.new_zeros(())
    for name, weight in loss.items():
        extra = (near,) if name in BY_OVERLAP else ()
        total = total + weight * DIVERGENCES[name](draft, target, labels, *extra)
    return total
