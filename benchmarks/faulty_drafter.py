"""A drafter that fails at a chosen step, for `serving.py chaos`: prompt lookup until then.

Installed as a separate distribution, which offers it to `outrider serve` as the kind `faulty`; see
`serving_faults.offered`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.drafters import ngram
from outrider.targets.protocol import Target

Fault = Literal[
    "raises", "raises in observe", "raises in admit", "hangs", "hangs in observe", "no draft", "ids", "q", "parents",
    "sizes",
]  # fmt: skip
FOREVER_S = 3600.0


class Config(Base):
    kind: Literal["faulty"] = "faulty"
    fault: Fault = "raises"
    """The kind of failure."""
    step: int = 5
    """The call from which on it fails."""


class Faulty(Drafter):
    def __init__(self, config: Config, inner: Drafter, vocabulary: int):
        self.config, self.inner, self.vocabulary, self.limit = config, inner, vocabulary, inner.limit
        self.calls = 0

    def allocate(self, cache: Cache) -> Any:
        return self.inner.allocate(cache)

    def admit(
        self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self.inner.admit(memory, rows, state, scores, lengths)
        self._fail("in admit")

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        draft = self.inner.propose(memory, state, budget)
        self.calls += 1
        self._fail("")
        garbage = GARBAGE.get(self.config.fault)
        return draft if garbage is None or not self._is_due else garbage(self, len(state.rows))

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        self.inner.observe(memory, state, draft, accepted, scores)
        self._fail("in observe")

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        self.inner.free(memory, rows)

    @property
    def _is_due(self) -> bool:
        return self.calls >= self.config.step

    def _fail(self, where: str) -> None:
        if self._is_due and self.config.fault == f"raises {where}".strip():
            raise RuntimeError("this drafter was told to fail")
        if self._is_due and self.config.fault == f"hangs {where}".strip():
            time.sleep(FOREVER_S)

    def chain(self, slots: int, token: int) -> Draft:
        """A chain that repeats one token under every anchor."""
        return Draft.chain(torch.full((slots, 3), token), torch.full((slots,), 3))


def _of_another_q(drafter: Faulty, slots: int) -> Draft:
    q = torch.full((slots, 3, drafter.vocabulary), torch.nan)
    return Draft.chain(torch.ones(slots, 3, dtype=torch.int64), torch.full((slots,), 3), q)


def _of_unknown_parents(drafter: Faulty, slots: int) -> Draft:
    tokens = torch.ones(slots, 3, dtype=torch.int64)
    return Draft(tokens, torch.tensor([[2, 7, -5]] * slots), torch.full((slots,), 3))


GARBAGE: Mapping[str, Callable[[Faulty, int], Any]] = {
    "no draft": lambda drafter, slots: "nonsense",
    "ids": lambda drafter, slots: drafter.chain(slots, drafter.vocabulary + 7),
    "q": _of_another_q,
    "parents": _of_unknown_parents,
    "sizes": lambda drafter, slots: Draft.chain(torch.ones(slots, 3, dtype=torch.int64), torch.full((slots,), 99)),
}


def build(config: Config, target: Target) -> Faulty:
    return Faulty(config, ngram.build(ngram.Config(), target), target.spec.vocabulary)
