"""The section `evaluate` of a run file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from outrider.config import Config as Base
from outrider.config import Quantization, nearest
from outrider.errors import ConfigError
from outrider.measure.tasks import names as tasks
from outrider.measure.tasks.names import check, task_name
from outrider.policies import named

log = logging.getLogger(__name__)
NO_SCORES = "use `outrider lm-eval` for scores of tasks, plain and drafted (pip install 'outrider[eval]')"


class Config(Base):
    """Settings of an evaluation."""

    REMOVED: ClassVar[Mapping[str, str]] = {"score": NO_SCORES, "allow_code_execution": NO_SCORES}

    tasks: tuple[str, ...] = Field(("stdlib",), min_length=1)
    """Names from `outrider tasks`, or files of prompts."""
    prompts: PositiveInt = 24
    """Number of prompts measured per task; more are tried if some answers fall into loops."""
    max_new_tokens: PositiveInt = 96
    """Maximum number of tokens per answer."""
    temperatures: tuple[NonNegativeFloat, ...] = Field((0.0, 1.0), min_length=1)
    """Temperatures at which every drafter is measured; 0 is greedy."""
    baseline_temperatures: tuple[NonNegativeFloat, ...] | None = Field(None, min_length=1)
    """Those of `temperatures` at which the baselines are measured; all by default."""
    baselines: tuple[str | dict[str, Any], ...] = ()
    """Other drafters measured in the same run: kinds, kinds with settings, or checkpoint folders."""
    batch: PositiveInt = 1
    """Number of prompts served together, both plain and drafted."""
    processes: PositiveInt = 1
    """Number of processes that share the prompts.  Each loads target and drafters; on one machine they slow each other
    down."""
    repeats: NonNegativeInt = 2
    """How often a run that takes seconds is repeated while other programs keep the machine busy."""
    overwrite: bool = False
    """Measure all prompts again, and replace a report even if it has more prompts, tasks or drafters, or other
    settings."""
    thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`; by default the template decides."""
    data: str | None = None
    """Folder with task files (gsm8k.jsonl and so on), used instead of the hub's."""
    revisions: dict[str, str] = Field(default={})
    """Pinned revision of each task, named as in `tasks`: a commit of the data set (by default the newest), or
    `sha256:...` of a file."""
    traced_prompts: NonNegativeInt = 4
    """Number of prompts per task that are rerun, untimed, to record every drafted token."""
    min_first_ngrams: NonNegativeFloat = 0.6
    """An answer loops if fewer than this share of the 8-grams in the plain text occur for the first time.  Prompts
    whose answers loop or have a single token are listed and left out; 0 keeps all."""
    seed: int = 0
    """Seed for sampling at temperatures above 0."""
    quantize: Quantization | None = None
    """Quantize the linear layers of this run's own draft model, independently of the target; int8 needs torchao."""
    policy: Literal["fixed", "auto"] = "fixed"
    """How much is drafted: everything the drafter offers, or what pays off according to measured times."""
    verification: str = "standard"
    """`standard`, or `block`, which accepts more of a sampled chain; both are exact.  `typical`, `relaxed`,
    `relay(cues=FILE)`, `scorer(tau=NUMBER)` and `counterfactual(swap=FILE)` accept tokens that the acceptance rule
    would reject; every row of the report says so."""
    allow_lossy: bool = Field(default=False, validate_default=True)
    """Required for a lossy verification."""

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        by_name: dict[str, str] = {}
        for task in map(check, tasks):
            name = task_name(task)
            if name in by_name:
                both = (
                    f"{task} is named twice"
                    if by_name[name] == task
                    else f"{by_name[name]} and {task} have one name, {name!r}"
                )
                raise ConfigError(f"{both}, so the report would mix their rows; leave one out, or rename its file")
            by_name[name] = task
        return tasks

    @field_validator("temperatures")
    @classmethod
    def _different_temperatures(cls, temperatures: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(temperatures)) < len(temperatures):
            raise ConfigError(f"{list(temperatures)} has a temperature twice; leave one out")
        return temperatures

    @field_validator("baseline_temperatures")
    @classmethod
    def _among_temperatures(
        cls, temperatures: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        measured = info.data.get("temperatures", ())
        if measured and (others := [each for each in temperatures or () if each not in measured]):
            raise ConfigError(
                f"baseline temperature {others[0]:g} is not in evaluate.temperatures {list(measured)}; add it there, "
                "or leave it out"
            )
        return temperatures

    @field_validator("revisions")
    @classmethod
    def _known_pins(cls, revisions: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        measured = info.data.get("tasks", ())
        for task, revision in revisions.items():
            if task in tasks.BUILT_IN:
                where = "the standard library of this Python" if task == "stdlib" else "part of this package"
                raise ConfigError(f"{task} is {where} and can't be pinned; leave it out")
            if task not in measured and task not in tasks.TASKS:
                raise ConfigError(f"{task!r} is not a task{nearest(task, [*tasks.TASKS, *measured])}")
            if task.endswith(tasks.FILES) and not revision.startswith(tasks.CONTENT):
                raise ConfigError(
                    f"{task} is a file and has no commit, got {revision!r}; pin its content instead: {tasks.CONTENT}..."
                )
            if measured and task not in measured:
                log.warning("evaluate.revisions: %s has no effect, since evaluate.tasks does not name it", task)
        return revisions

    @field_validator("verification")
    @classmethod
    def _known_verification(cls, verification: str) -> str:
        named.check_verification(verification, allow_lossy=True)
        return verification

    @field_validator("allow_lossy")
    @classmethod
    def _allowed_verification(cls, allow_lossy: bool, info: ValidationInfo) -> bool:
        named.judge(info.data.get("verification"), allow_lossy)
        return allow_lossy
