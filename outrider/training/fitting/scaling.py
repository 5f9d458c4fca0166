"""Scale confidences so that they are probabilities: of the drafts with confidence 0.8, four in five are accepted.

Sequential temperature scaling (DSpark, arXiv 2607.05147): slot by slot, with earlier slots fixed, choose the
temperature that minimises the expected calibration error of the product of confidences up to the slot.  The ranking
within a slot does not change.

Differs from the paper: each temperature comes with a shift of the logits that makes confidence and acceptance agree on
average, since a temperature leaves 0.5 at 0.5, and drafts of texts unlike the training texts are accepted less often.
Grid and number of bins are ours.

M drafts, K slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15
"""Number of bins, each with the same number of drafts."""


@dataclass(frozen=True)
class Outcomes:
    """Confidences of drafted slots and whether the slots were accepted."""

    confidence: Tensor
    """[M, K] float64, of each slot given the slots before it."""
    survived: Tensor
    """[M, K] bool, whether slots 0..k were all accepted."""
    is_drafted: Tensor
    """[M, K] bool, False for slots that were not drafted or are after the end of the text."""
    prompts: Tensor
    """[M] int64, index of the prompt."""

    def of(self, chosen: Tensor) -> Outcomes:
        """The outcomes of the rows in `chosen` [M] bool."""
        return Outcomes(self.confidence[chosen], self.survived[chosen], self.is_drafted[chosen], self.prompts[chosen])

    def scaled(self, by: Scaling) -> Outcomes:
        """The outcomes with rescaled confidences."""
        return replace(self, confidence=_tempered(_logits(self.confidence), by.temperatures, by.shifts))

    def errors(self) -> list[float]:
        """Expected calibration error of accepting each slot."""
        slots = zip(self.confidence.cumprod(-1).T, self.survived.T, self.is_drafted.T, strict=True)
        return [ece(predicted[is_drafted], survived[is_drafted]) for predicted, survived, is_drafted in slots]

    def noise(self, draws: int = 100) -> list[float]:
        """Errors of perfect confidences on as many drafts: outcomes are drawn from the confidences themselves."""
        generator = torch.Generator().manual_seed(0)
        errors = []
        for predicted, is_drafted in zip(self.confidence.cumprod(-1).T, self.is_drafted.T, strict=True):
            mine = predicted[is_drafted]
            drawn = (ece(mine, torch.rand(len(mine), generator=generator) < mine) for _ in range(draws))
            errors.append(sum(drawn) / draws)
        return errors


def ece(predicted: Tensor, accepted: Tensor, bins: int = BINS) -> float:
    """Mean distance between confidence and acceptance over bins of equal size.  predicted [M] in [0, 1], accepted [M]
    bool."""
    order = predicted.argsort(stable=True)
    gaps = (predicted.double() - accepted.double())[order].tensor_split(bins)
    return float(sum(gap.sum().abs() for gap in gaps)) / max(1, len(order))


class Scaling(NamedTuple):
    """Confidences become sigmoid((logit + shift) / temperature)."""

    temperatures: Tensor
    """[K] float64."""
    shifts: Tensor
    """[K] float64."""


def scaling(outcomes: Outcomes, shifting: bool = True) -> Scaling:
    """For each slot in order, the temperature that minimises the error of the product up to it.  shifting=False is the
    paper's method."""
    scalings: list[tuple[Tensor, Tensor]] = []
    reached = torch.ones(len(outcomes.confidence), dtype=torch.float64)
    for confidence, survived, is_drafted in zip(
        _logits(outcomes.confidence).T, outcomes.survived.T, outcomes.is_drafted.T, strict=True
    ):
        slot = _Slot(reached[is_drafted], confidence[is_drafted], survived[is_drafted], shifting)
        coarse, _ = slot.best(torch.linspace(-3, 3, 33, dtype=torch.float64).exp2())
        scalings.append(slot.best(coarse * torch.linspace(-3 / 16, 3 / 16, 13, dtype=torch.float64).exp2()))
        reached = reached * _tempered(confidence, *scalings[-1])
    return Scaling(*(torch.stack(column) for column in zip(*scalings, strict=True)))


class _Slot(NamedTuple):
    """The data for scaling one slot.  m drafts that have the slot, G temperatures."""

    reached: Tensor
    """[m] scaled probability that the slots before it are accepted."""
    logits: Tensor
    """[m]."""
    survived: Tensor
    """[m] bool."""
    shifting: bool

    def best(self, tried: Tensor) -> tuple[Tensor, Tensor]:
        """The temperature in `tried` [G] with the smallest error, and its shift; ties go to the one nearest to 1."""
        shifts = self._shifts(tried) if self.shifting else torch.zeros_like(tried)
        error = lambda scaling: ece(self.reached * _tempered(self.logits, *scaling), self.survived)
        return min(zip(tried, shifts, strict=True), key=lambda scaling: (error(scaling), abs(float(scaling[0].log()))))

    def _shifts(self, tried: Tensor) -> Tensor:
        """[G] shifts in [-8, 8], by bisection, that bring average confidence as close to acceptance as possible."""
        low, high = torch.full_like(tried, -8.0), torch.full_like(tried, 8.0)
        share = self.survived.double().mean()
        for _ in range(24):
            middle = (low + high) / 2
            promised = self.reached * _tempered(self.logits, tried[:, None], middle[:, None])
            is_less = promised.mean(-1) < share
            low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
        return (low + high) / 2


def _logits(confidence: Tensor) -> Tensor:
    # float32 rounds values near 0 and 1 to 0 and 1, whose logits are not finite
    return confidence.double().clamp(1e-8, 1 - 1e-8).logit()


def _tempered(logits: Tensor, temperature: Tensor, shift: Tensor) -> Tensor:
    return ((logits + shift) / temperature).sigmoid()
