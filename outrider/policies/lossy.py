"""The interface of verification rules that intentionally change the output, and their judge.

Never used by default: `named.judge` returns such a judge only with allow_lossy, and the judge measures the rule's
distance from the target's distribution for the report.  The rules are in `outrider.lab.judges`.

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
    """What a rule sees of a step besides its draft and p."""

    rows: Sequence[int]
    """Slots of the B live texts."""
    texts: Sequence[list[int]]
    """Prompt and committed tokens of each; the last one is the anchor."""
    logits: Tensor
    """[B, N+1, V] after penalties, bans and processors; -inf where a token is impossible."""


class LossyRule:
    """A lossy rule: accepts drafted tokens, and measures its distance from p.

    A rule overrides `__call__` and `distances`, and the other hooks if it has state per text.  They are listed in the
    order in which they are called.
    """

    name: str
    """Name and settings, for reports; `named.judge` recreates the rule from it if all settings are text or numbers."""

    def allocate(self, target: Any, cache: Any) -> None:
        """Like `Judge.allocate`, for a rule that runs passes itself."""

    def admit(self, row: int, request: Request) -> None:
        """A new text in this slot.  Raises ConfigError for one that the rule can't verify."""

    def free(self, row: int) -> None: ...

    def begin(self, verified: Verified) -> None:
        """Called before each verification."""

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        """Verify a draft by p [B, N+1, V].  The next token may be a drafted one instead of the target's."""
        raise NotImplementedError

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        """[B, D] float64: total variation between p and the rule for each emitted token of this step, in order; exact
        or an upper bound on average.  D covers at least the longest path and its next token."""
        raise NotImplementedError

    def observe(self, accepted: Accepted, texts: Sequence[list[int]]) -> None:
        """Called after the commit.  texts: all tokens of each live text."""

    def figures(self) -> dict[str, float]:
        """The rule's own statistics, for reports."""
        return {}


class LossyJudge(SamplingJudge):
    """Verifies with a lossy rule and measures its distance from the target's distribution."""

    rule: LossyRule

    def __init__(self, rule: LossyRule):
        super().__init__(rule)
        self.tokens = 0
        """Tokens emitted, over all slots and steps."""
        self.passes = 0
        """Verified steps, summed over slots: the number of target passes these tokens took."""
        self.total = 0.0
        """Sum of the tokens' distances, an upper bound on the total variation between the distributions of texts."""
        self.tv_distance: dict[int, float] = {}
        """By slot: sum of distances in the last step."""
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
        """Cost and gain of the rule: its distance, tokens per step, passes saved over one pass per token, and the
        rule's own statistics."""
        gain = {"tokens_per_step": self.tokens / max(1, self.passes), "passes_saved": self.tokens - self.passes}
        return {"distance": self.distance, **gain, **self.rule.figures()}
