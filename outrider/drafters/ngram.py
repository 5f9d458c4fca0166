"""Prompt lookup: propose what followed the last time these tokens stood here.  (Saxena 2023; Yang et al. 2304.04487.)

The longest match wins, among equals the most recent.  Needs no training and no pass of any model; strong where text repeats
itself, such as code and summaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Scores, Target
from outrider.decoding.state import DecodeState


class Config(Base):
    kind: Literal["ngram"] = "ngram"
    length: PositiveInt = 7
    """Most tokens proposed per step."""
    longest: PositiveInt = 4
    """Tokens of the longest match looked for."""
    shortest: PositiveInt = 2
    """Tokens of the shortest match that is believed."""

    @model_validator(mode="after")
    def _in_order(self) -> Config:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is more than longest {self.longest}")
        return self


class History:
    """One slot's text by its n-grams: where the token after each stood most recently."""

    def __init__(self) -> None:
        self.read = 0
        self.follows: dict[tuple[int, ...], int] = {}


class NGram:
    """Looks the end of the text up in the text itself."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: Config):
        self.config = config
        self.limit = config.length

    def allocate(self, cache: Cache) -> list[History]:
        return [History() for _ in range(cache.slots)]

    def admit(self, memory: list[History], rows: Sequence[int], state: DecodeState, scores: Scores) -> None: ...

    def propose(self, memory: list[History], state: DecodeState, budget: Tensor) -> Draft:
        found = []
        for row, most in zip(state.rows, budget.tolist(), strict=True):
            self._read(memory[row], state.tokens[row])
            found.append(self._look_up(memory[row], state.tokens[row], most))
        width = max(map(len, found))
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in found], dtype=torch.int64)
        return Draft.chain(tokens.view(len(found), width).to(state.device), torch.tensor([len(tokens) for tokens in found]))

    def observe(self, memory: list[History], state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None: ...

    def free(self, memory: list[History], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = History()

    def _read(self, history: History, tokens: list[int]) -> None:
        """Learn the n-grams that new tokens follow.  The text's own end follows nothing yet, so it never finds itself."""
        for at in range(max(history.read, 1), len(tokens)):
            for n in range(self.config.shortest, min(self.config.longest, at) + 1):
                history.follows[tuple(tokens[at - n : at])] = at
        history.read = len(tokens)

    def _look_up(self, history: History, tokens: list[int], most: int) -> list[int]:
        for n in range(min(self.config.longest, len(tokens)), self.config.shortest - 1, -1):
            at = history.follows.get(tuple(tokens[-n:]))
            if at is not None:
                return tokens[at : at + most]
        return []


def build(config: Config, target: Target) -> NGram:
    return NGram(config)
