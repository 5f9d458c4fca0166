"""Probes drafts while they do not pay off, and tracks the cost of reading prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.decoding.state import DecodeState, Request


class Probes:
    """Occasional drafts while drafting does not pay off, so that it can resume; plain steps earn credit for them."""

    SHARE, DOUBT, FUND, FEE = 0.015, 4, 3.0, 0.03
    """In units of plain steps: each step without drafts earns `SHARE` times (best draft's expected rate / plain rate)
    ** `DOUBT`; `FUND` is the maximum credit; `FEE` is the cost of a probe's step in addition to what it loses."""
    LONGEST = 64
    """Maximum number of steps between two checks of the credit."""

    def __init__(self) -> None:
        self.left = 0
        """Steps left of the current probe."""
        self.credit, self.late = self.FUND, float("inf")
        """Credit in plain steps; seconds of the last probe's first step, which reads what the drafter missed."""
        self.income = self.SHARE
        """Credit earned by a plain step."""

    def due(self, promise: float, steps: int) -> bool:
        """Whether to draft now.  promise: best draft's expected rate / plain rate; steps: since the last call."""
        self.income = self.SHARE * promise**self.DOUBT
        self.credit = min(self.credit + self.income * steps, self.FUND)
        if not self.left and self.credit > 0:
            self.left = 2  # since the first step after a pause is atypical
        return self.left > 0

    def wait(self, minimum: int) -> int:
        """Steps until there is credit for a probe, from `minimum` to `LONGEST`."""
        return max(minimum, min(self.LONGEST, math.ceil(-self.credit / max(self.income, 1e-9))))

    def charge(self, seconds: float, usual: float | None, plain: float, accepted: float) -> None:
        """Pay for a step of a probe: its loss relative to a plain step plus a fee; a gain adds credit.

        usual: typical seconds of such a step, None for the first after a pause.  accepted: drafted tokens per slot.
        """
        self.left -= 1
        paid = min(seconds, self.late if usual is None else usual)  # so that a slow outlier does not cost more
        self.late = seconds if usual is None else self.late
        self.credit -= paid / plain - 1 - accepted + self.FEE


class PromptCosts:
    """Cost of the drafter's reading of prompts.  It happens before a text's first step and only while drafting, so it
    is a cost of drafting that no step's time includes."""

    WINDOW = 4096
    """Steps after which counts are halved."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Seconds per step."""
        self.tokens = self.steps = 0.0
        self.last = 0

    def admit(self, new: Sequence[Request], step: int, state: DecodeState) -> None:
        """Count requests that are new at this step.  The very first ones do not give a rate yet."""
        if self.last:
            self.steps += step - self.last
            self.tokens += sum(len(request.prompt) for request in new)
        self.last = step
        if self.steps > self.WINDOW:
            self.steps, self.tokens = self.steps / 2, self.tokens / 2
        if self.steps and state.read_tokens:
            self.step_s = state.read_s / state.read_tokens * self.tokens / self.steps
