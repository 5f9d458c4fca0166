"""What a rule that changes the output on purpose is to its judge.

Never used by default: `named.judge` returns such a judge only with allow_lossy, and it measures the rule's distance
from the target's distribution for the report.  The rules are in `outrider.lab.judges`.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.prefix import processed


class Verified(NamedTuple):
    """What a rule knows of a step besides its draft and p."""

    rows: Sequence[int]
    """Slots of the B live texts."""
    texts: Sequence[list[int]]
    """Prompt and committed tokens of each; the last one is the anchor."""
    logits: Tensor
    """[B, N+1, V] after penalties, bans and processors; -inf where a token is impossible."""


class LossyRule:
    """What a lossy rule is to its judge: it accepts drafted tokens, and says how far from p that is.

    A rule overrides `__call__` and `distances`; one that remembers its texts overrides the other hooks too, in the
    order in which they are called.
    """

    name: str
    """With its numbers, for reports; `named.judge` makes the same rule of it where its settings are texts and
    numbers."""

    def allocate(self, target: Any, cache: Any) -> None:
        """As `Judge.allocate`, for a rule with passes of its own."""

    def admit(self, row: int, request: Request) -> None:
        """A new text in this slot.  Raises ConfigError for one that the rule can't judge."""

    def free(self, row: int) -> None: ...

    def begin(self, verified: Verified) -> None:
        """The step that is judged next."""

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        """What is accepted by p [B, N+1, V].  The next token may be a drafted one, so that the target adds none."""
        raise NotImplementedError

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        """[B, D] float64, at least as wide as the longest path and its next token: total variation from p of each
        emitted token of this step, in order; exact, or more on average."""
        raise NotImplementedError

    def observe(self, accepted: Accepted, texts: Sequence[list[int]]) -> None:
        """What was committed of it, and all tokens of each live text."""

    def figures(self) -> dict[str, float]:
        """What it bought, and what it cost besides the distance."""
        return {}


class LossyJudge(SamplingJudge):
    """Judges by a lossy rule, and measures its distance from the target's distribution."""

    rule: LossyRule

    def __init__(self, rule: LossyRule):
        super().__init__(rule)
        self.tokens = 0
        """Tokens emitted, over all slots and steps."""
        self.passes = 0
        """Verified steps, counted for each slot: passes of the target that these tokens took."""
        self.total = 0.0
        """Sum of their distances: an upper bound of the total variation between a text's distribution and the
        target's."""
        self.tv_distance: dict[int, float] = {}
        """By slot: sum of the distances of the last step's tokens."""
        self._last = torch.empty(0, 0)

    def allocate(self, target: Any, cache: Any) -> None:
        self.rule.allocate(target, cache)

    def admit(self, row: int, request: Request, ends: frozenset[int], device: torch.device) -> None:
        super().admit(row, request, ends, device)
        self.rule.admit(row, request)

    def free(self, row: int) -> None:
        super().free(row)
        self.rule.free(row)

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        logits = self._logits = processed(scores.logits, draft, self.prefixes)
        p = self.distribution(logits)
        self.rule.begin(Verified(state.rows, [state.tokens[row] for row in state.rows], logits))
        accepted = self.rule(draft, p, state.streams)
        self._last = self.rule.distances(draft, p, accepted)
        return accepted

    def observe(self, accepted: Accepted, texts: list[list[int]], scores: Scores) -> Mapping[int, Exception]:
        errors = super().observe(accepted, texts, scores)
        self.rule.observe(accepted, texts)
        self.passes += len(texts)
        for b, (row, _) in enumerate(self._requests):
            count = accepted.counts[b] + (accepted.next_tokens[b] >= 0)
            self.tv_distance[row] = float(self._last[b, :count].sum())
            self.total += self.tv_distance[row]
            self.tokens += count
        return errors

    @property
    def distance(self) -> float:
        """Mean total variation per emitted token, in [0, 1]; 0 before the first."""
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def figures(self) -> dict[str, float]:
        """What the rule cost and what it bought: the distance, tokens per step, passes saved against one pass a token,
        and what the rule itself counts."""
        bought = {"tokens_per_step": self.tokens / max(1, self.passes), "passes_saved": self.tokens - self.passes}
        return {"distance": self.distance, **bought, **self.rule.figures()}
