"""Weights of rows: by depth, and by selecting the rows worth learning.

A drafted token matters only if all tokens before it are accepted, so deeper rows get less weight.  A small drafter
gains more from rows that it can still learn.  Both work for the rows of any method.  M rows of a batch, m of one chunk.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outrider.config import nearest
from outrider.errors import ConfigError
from outrider.nn.draft_model import Predictions

Confidence = Callable[[], Tensor]
"""q of each row's label [m], computed on demand."""
Weighing = Callable[[float, Predictions, slice, Confidence], Tensor]
"""(number, rows, slice, q of their labels) to weights [m]; the caller sets the weights of unlearnt rows to 0."""


def exp(decay: float, rows: Predictions, part: slice, confidence: Confidence) -> Tensor:
    """exp(-k / decay) at depth k.  (DFlash, DSpark: 4 for blocks of 7; Domino: 7 for 16.)"""
    return torch.exp(-rows.depth[part] / decay)


def power(base: float, rows: Predictions, part: slice, confidence: Confidence) -> Tensor:
    """base ** k at depth k.  (EAGLE-3 and Medusa: 0.8; multi-token prediction: 0.6.)"""
    return base ** rows.depth[part].float()


def dpace(floor: float, rows: Predictions, part: slice, confidence: Confidence) -> Tensor:
    """D-PACE: the gain from improving a row, by the draft's own probabilities.

    With c the draft's probability of the label and s = (1 - floor) c + floor, the product of s up to row j is the
    probability that a block reaches it, and row k weighs the sum of these from k on.  Weights carry no gradient; the
    published floor is 0.5.
    """
    learnt = rows.weight[part] > 0
    _, block = torch.unique_consecutive(rows.block[part], return_inverse=True)
    depth = rows.depth[part]
    steps = learnt.new_zeros(int(block[-1]) + 1, int(depth.max()) + 1, dtype=torch.float32)
    steps[block, depth] = ((1 - floor) * confidence().float() + floor) * learnt
    there = torch.zeros_like(steps)
    there[block, depth] = learnt.float()
    # a block that continues another, or whose first tokens are known, starts deeper: its earlier rows count as reached
    reached = steps.where(there.cumsum(-1) > 0, 1.0).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)[block, depth]


WEIGHINGS: dict[str, Weighing] = {f.__name__: f for f in (exp, power, dpace)}


def check(position: dict[str, float]) -> dict[str, float]:
    """Validate a position weight: at most one name with its number.  Raises ConfigError with the nearest name."""
    for name, number in position.items():
        if name not in WEIGHINGS:
            raise ConfigError(f"unknown position weight {name!r}{nearest(name, WEIGHINGS)}")
        if not 0 < number <= (math.inf if name == "exp" else 1):
            raise ConfigError(f"position weight {name}: {number} must be above 0" + " and at most 1" * (name != "exp"))
    if len(position) > 1:
        raise ConfigError(f"position must have one weight, got {len(position)} ({', '.join(position)}); choose one")
    return position


def weights(position: Mapping[str, float], rows: Predictions, part: slice, draft: Tensor | None = None) -> Tensor:
    """[m] weights of a chunk: the method's own, or those of `position`.  draft: its logits [m, V], needed for dpace."""
    method_weights = rows.weight[part]
    if not position:
        return method_weights
    [(name, number)] = position.items()

    def confidence() -> Tensor:
        assert draft is not None
        labels = rows.labels[part, None]
        return draft.detach().float().log_softmax(-1).gather(-1, labels)[:, 0].exp()

    return WEIGHINGS[name](number, rows, part, confidence) * (method_weights > 0)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(draft, target logits [m, V], labels [m]) to [m]."""


@torch.no_grad()
def most_learnable(
    rows: Predictions, reference: Predictions, share: float, loss: Loss, size: int,
    together: Callable[[Tensor], Tensor] = lambda gains: gains,
) -> Tensor:  # fmt: skip
    """[M] bool: the `share` of learnt rows whose loss exceeds the reference's most.  (AdaSPEC, arXiv 2510.19779.)

    The reference is a drafter of the same kind and size, distilled on all rows.  Where the reference does better, this
    drafter can still learn; where both fail, perhaps not.  Rows tied with the last selected one are selected as well.
    size: rows per chunk.  together: gathers the gains of all processes from those of this one.
    Raises ConfigError if the two models predict different rows.
    """
    if not torch.equal(rows.labels, reference.labels) or not torch.equal(rows.depth, reference.depth):
        raise ConfigError(
            "train.reference predicts rows other than the drafter's; use one with the same kind, block and anchors"
        )
    mine, theirs = (
        torch.cat([loss(draft, target, each.labels[part]) for draft, target, part in each.chunks(size)])
        for each in (rows, reference)
    )
    learnt = rows.weight > 0
    gains = together((mine - theirs)[learnt])
    if not len(gains):
        return learnt
    threshold = gains.topk(max(1, round(share * len(gains)))).values[-1]
    return learnt & (mine - theirs >= threshold)
