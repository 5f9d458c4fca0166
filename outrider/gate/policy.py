"""What a gate tolerates: a limit for each rule, and the false-alarm probability shared by all of them.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from outrider.config import Config as Base
from outrider.config import build, read

Rule = Literal[
    "exactness", "lossy rule", "machine", "speed", "tokens per step", "p99 TPOT", "acceptance by depth",
    "train-serve skew", "contamination", "clean figure", "left out",
]  # fmt: skip
TIMED: tuple[Rule, ...] = ("speed", "p99 TPOT")
"""Rules whose figures can't be compared between machines."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
# YAML reads a bare `off` as false
Action = Annotated[Literal["stop", "warn", "off"], BeforeValidator(lambda value: "off" if value is False else value)]


class Limit(Base):
    """How much of one kind of loss is tolerated, and what happens beyond that."""

    action: Action = "stop"
    tolerated: Fraction = 0.01


class Speed(Limit):
    """Speed, prompt by prompt."""

    by: Literal["speedup", "tokens_per_s"] = "speedup"
    """`speedup` is relative to the target alone in the same run, so drift of the machine cancels."""


class Policy(Base):
    """What the gate tolerates.  Inexact text always stops the gate; there is no setting for that."""

    REMOVED: ClassVar[Mapping[str, str]] = {"score": "use `outrider lm-eval` to compare scores, plain and drafted"}

    speed: Speed = Speed()
    tokens_per_step: Limit = Limit()
    p99_tpot: Limit = Limit(tolerated=0.05)
    """Time per output token of the slowest prompts."""
    acceptance_by_depth: Limit = Limit(tolerated=0.05)
    train_serve_skew: Limit = Limit(tolerated=0.05)
    """Points of acceptance below training's prediction."""
    contamination: Limit = Limit(tolerated=0.05)
    """Share of prompts that occur in what the drafter was trained on or drafts from."""
    clean_figure: Limit = Limit()
    """Tokens per step over prompts that occur in neither."""
    left_out: Limit = Limit(tolerated=0.05)
    """Points by which the share of prompts left out may grow."""
    lossy_rule: Literal["stop", "allow"] = "stop"
    """What happens to a candidate whose acceptance rule intentionally changes the output."""
    level: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Confidence level of the intervals that are shown and that lead to warnings."""
    false_stops: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Probability that any statistical test stops a draft as good as the old one, shared by all tests."""
    draws: Annotated[int, Field(ge=1000)] = 10_000
    seed: int = 0
    min_prompts: Annotated[int, Field(ge=5)] = 5
    """Minimum number of prompts for a test."""
    detectable_loss: Annotated[float, Field(gt=0, lt=1)] | None = 0.05
    """A pass needs enough prompts to detect a loss of speed this large with 80 % power; with fewer the gate is
    UNDERPOWERED.  null: min_prompts are enough."""
    shared: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of prompts that both reports must have, and share of those for which a figure must be present."""
    required: tuple[Rule, ...] = ("exactness", "speed", "tokens per step")
    """Rules that a pass requires: if one was not measured, the gate stops, or is UNDERPOWERED if it had too few
    prompts."""
    warnings_stop: bool = False


def policy_of(path: str | Path | None) -> Policy:
    """The built-in policy with the changes of a YAML file, if any.  ConfigError for unknown keys."""
    return Policy() if path is None else build(Policy, read(path), str(path))
