"""New weights against old ones: both draft for the same held-out prompts, and `outrider.gate` decides.

The target generates every text again, so stored traffic can't make a version pass.  A sampled request gets a seed, so
that both drafters see the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from outrider import generation
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.gate.outcome import GateOutcome
from outrider.gate.policy import Policy, Rule
from outrider.gate.verdict import gate
from outrider.report.bootstrap import Interval
from outrider.report.parts import Percentiles, PromptResult, Share
from outrider.report.schema import Report, Row
from outrider.sampling.settings import Sampling
from outrider.serve.learning.buffer import Text
from outrider.targets.protocol import Target

SLOTS = 8
"""Prompts that are continued together."""
RULE: Rule = "tokens per step"


class Trial(NamedTuple):
    """What a comparison found."""

    new: Report
    old: Report
    outcome: GateOutcome

    @property
    def gain(self) -> Interval | None:
        """New over old tokens per step, with its 95 % interval; None where the prompts were too few."""
        return self.outcome.finding(RULE).lead.interval

    @property
    def passes(self) -> bool:
        """The gate finds no loss, and the gain is significant."""
        return self.outcome.exit_code == 0 and self.gain is not None and self.gain.low > 1

    @property
    def reason(self) -> str:
        if self.gain is None or self.outcome.exit_code:
            return self.outcome.headline
        shown = f"new/old tokens per step {self.gain.center:.3f} ({self.gain.low:.3f} to {self.gain.high:.3f})"
        return f"PASS: {shown}" if self.passes else f"NO GAIN: {shown}; the interval must lie above 1"


def compared(target: Target, new: Drafter, old: Drafter, texts: Sequence[Text], most: int, fewest: int) -> Trial:
    """Both drafters over the prompts of these texts, `most` new tokens each.  Fewer texts than `fewest` are
    UNDERPOWERED."""
    reports = [measured(target, drafter, texts, most) for drafter in (new, old)]
    policy = Policy(required=(RULE,), min_prompts=fewest, detectable_loss=None)
    return Trial(reports[0], reports[1], gate(reports[0], reports[1], policy))


@torch.inference_mode()
def measured(target: Target, drafter: Drafter, texts: Sequence[Text], most: int) -> Report:
    """Tokens and steps of every text, with full-depth drafts at every step."""
    requests = [
        Request(
            text.prompt, min(len(text.answer), most),
            Sampling(text.temperature, text.top_k, text.top_p, seed=number if text.temperature else None),
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip
    tokens, steps = [0] * len(requests), [0] * len(requests)
    for progress in generation.serve(target, requests, drafter, policy="fixed", slots=SLOTS):
        tokens[progress.request] += len(progress.tokens)
        steps[progress.request] += 1
    prompts = [PromptResult(id=str(n), tokens=tokens[n], steps=steps[n]) for n in range(len(requests))]
    nothing: dict[str, Any] = dict.fromkeys(
        ("tokens_per_s", "plain_tokens_per_s", "speedup", "exact", "compared_tokens")
    )
    mean = sum(text.temperature for text in texts) / max(1, len(texts))
    row = Row(
        drafter="drafter", task="held-out traffic", prompts=len(prompts), temperature=round(mean, 3),
        tokens_per_step=sum(tokens) / max(1, sum(steps)), accepted_by_depth=(), share=Share(), ttft_ms=Percentiles(),
        itl_ms=Percentiles(), tokens=sum(tokens), steps=sum(steps), policy="fixed", per_prompt=tuple(prompts),
        **nothing,
    )  # fmt: skip
    return Report(target=target.spec.name, rows=(row,), made=datetime.now(UTC).isoformat(timespec="seconds"))
