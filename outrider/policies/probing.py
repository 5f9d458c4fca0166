"""Looks at drafts while they do not pay, and what reading prompts adds to their cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.decoding.state import DecodeState, Request


class Probes:
    """Drafts while drafts do not pay, so that drafting resumes by itself; plain steps save for them."""

    SHARE, DOUBT, FUND, FEE = 0.015, 4, 3.0, 0.03
    """In plain steps: `SHARE` is what each step while off saves for probes, times (best draft's expected rate / plain
    rate) ** `DOUBT`; `FUND` is the most that is saved; `FEE` is the cost of a probe in addition to what it loses."""
    LONGEST = 64
    """Most steps without a look at what is saved."""

    def __init__(self) -> None:
        self.left = 0
        """Steps left of a probe."""
        self.credit, self.late = self.FUND, float("inf")
        """Plain steps saved; seconds of the last probe's first step, which reads what the drafter missed."""
        self.income = self.SHARE
        """What a plain step saves."""

    def due(self, promise: float, steps: int) -> bool:
        """Whether to draft now.  promise: best draft's expected rate / plain rate; steps since this was last asked."""
        self.income = self.SHARE * promise**self.DOUBT
        self.credit = min(self.credit + self.income * steps, self.FUND)
        if not self.left and self.credit > 0:
            self.left = 2  # since the first after a pause does not show a draft's usual seconds
        return self.left > 0

    def wait(self, minimum: int) -> int:
        """Steps until enough is saved for a probe, from `minimum` to `LONGEST`."""
        return max(minimum, min(self.LONGEST, math.ceil(-self.credit / max(self.income, 1e-9))))

    def charge(self, seconds: float, usual: float | None, plain: float, accepted: float) -> None:
        """Pay for a step of a probe: what it lost against a plain step, and a fee; a probe that gained adds credit.

        usual: seconds of such a step, None for the first after a pause.  accepted: drafted tokens a slot.
        """
        self.left -= 1
        paid = min(seconds, self.late if usual is None else usual)  # an outlier happens once
        self.late = seconds if usual is None else self.late
        self.credit -= paid / plain - 1 - accepted + self.FEE


class PromptCosts:
    """What a drafter's reading of prompts costs: it is done before a text's first step, and only while drafts are
    wanted, so it is part of what drafting costs and of no step's seconds."""

    WINDOW = 4096
    """Steps after which counts are halved."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Seconds a step."""
        self.tokens = self.steps = 0.0
        self.last = 0

    def meet(self, new: Sequence[Request], step: int, state: DecodeState) -> None:
        """These requests are new at this step.  The very first ones show no rate yet."""
        if self.last:
            self.steps += step - self.last
            self.tokens += sum(len(request.prompt) for request in new)
        self.last = step
        if self.steps > self.WINDOW:
            self.steps, self.tokens = self.steps / 2, self.tokens / 2
        if self.steps and state.read_tokens:
            self.step_s = state.read_s / state.read_tokens * self.tokens / self.steps
