"""Whether an update of the drafter pays: the decoding time that it should save, against the time that it takes.
(SpecBlock's cost-aware updates, arXiv 2605.07243.)

An update that multiplies tokens per step by 1 + g saves g / (1 + g) of the time spent decoding.  g is expected to be
the larger of two observations:

- half of what the last update gained: on like traffic each update gains less than the one before;
- what acceptance has lost since that update: the traffic changed, and an update may win it back.

Before the first update nothing is known, so it is due.  Differs from the paper, whose estimator is not public: there it
is a bandit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.serve.learning.live_acceptance import Counts, change

WINDOW = 48
"""Texts after an update, and newest texts, whose acceptance is compared."""
TAIL = 0.001
"""Probability of a drop although nothing changed, at each comparison."""


class Payoff(NamedTuple):
    """Both in the same unit of time."""

    saved: float
    """Infinite before anything is known."""
    cost: float

    @property
    def is_due(self) -> bool:
        return self.saved > self.cost


class Updates:
    """What the last update gained and cost, and how texts were accepted since then."""

    def __init__(self, last: Mapping[str, Any] | None = None):
        """last: the result of the last training job; None if there was none."""
        self.ended(last or {})

    def ended(self, result: Mapping[str, Any]) -> None:
        """A training job ended.  What a version gained on held-out prompts counts, whether or not it passed."""
        gain = result.get("gain")
        self._gain = math.inf if gain is None else max(0.0, gain[0] - 1)
        self._cost: float = result.get("cpu_s", 0.0)
        self.restart()

    def restart(self) -> None:
        """Another version is served."""
        self._first: list[Counts] = []
        self._newest: deque[Counts] = deque(maxlen=WINDOW)

    def add(self, text: Counts) -> None:
        (self._first if len(self._first) < WINDOW else self._newest).append(text)

    def payoff(self, decoding: float) -> Payoff:
        """decoding: time that will be spent decoding with the next version, in the unit of `cpu_s`."""
        gain = max(self._gain / 2, self._loss())
        return Payoff(math.inf if math.isinf(gain) else decoding * gain / (1 + gain), self._cost)

    def _loss(self) -> float:
        """Old over new tokens per draft, less 1; 0 unless the drop is significant."""
        if len(self._newest) < WINDOW:
            return 0.0
        level = change(list(self._newest), self._first, TAIL)
        return level.old / level.new - 1 if level.is_drop else 0.0
