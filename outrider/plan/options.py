"""The options of `outrider plan`, and the checks that refuse invalid ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from outrider.config import Config
from outrider.drafters import method
from outrider.errors import ConfigError
from outrider.plan import demand as demands
from outrider.plan import money, planner
from outrider.plan.demand import Demand
from outrider.plan.paper import hardware as table
from outrider.plan.paper.drafts import default_methods, extra_methods
from outrider.plan.predict import Memory
from outrider.plan.schema import Plan
from outrider.plan.subject import Subject, load_subject
from outrider.traffic.replay.plan import limits

EPOCHS = 10.0
SLO = ("tpot",)
"""Limits that a plan can predict: time per token, but not queueing."""


class PlanOptions(Config):
    """The options of `outrider plan`; docs/plan.md says what each does."""

    target: str = "demo"
    """`demo`, a folder with config.json, or a Hugging Face id; no weights are read."""
    hardware: str | None = None
    """Accelerator, by its data sheet; `--hardware list` lists all."""
    measure: bool = False
    """Time target and drafters on this machine instead."""
    devices: int = 1
    """Accelerators that share the target."""
    weights: str | None = None
    """How the weights will be stored: bf16, fp8, int8, q4_0 …; defaults to the target's config."""
    log: Path | None = None
    """Recorded requests; docs/replay.md lists the formats."""
    format: str | None = None
    """Format of the log; detected from its first row unless given."""
    prompt_tokens: float | None = None
    """Mean tokens of a prompt."""
    new_tokens: float | None = None
    """Mean tokens of an answer."""
    concurrency: float | None = None
    """Concurrent requests."""
    rate: float | None = None
    """Requests per second, in place of --concurrency."""
    slo: str | None = None
    """Limit that a method must meet, in ms per token: tpot=50."""
    method: Sequence[str] = ()
    """Drafter kind or folder; can be repeated."""
    draft_model: str | None = None
    """Language model for the method small_model."""
    report: Sequence[str] = ()
    """Report of `outrider evaluate` whose acceptance is used; can be repeated."""
    again: bool = False
    """Repeat measurements that are already stored."""
    price_per_hour: float | None = None
    """Price of one accelerator, in your currency."""
    price_per_gb_month: float | None = None
    """Price of storage."""
    train_answers: int | None = None
    """Answers that a drafter would be trained on."""
    epochs: float | None = None
    """Epochs of that training; 10 unless given."""
    probe: int | None = Field(None, ge=0)
    """Number of requests from the log to replay with drafters that need no training; defaults to 24 if that is quick.
    """
    minutes: float | None = None
    """Time limit of --measure; 2 unless given."""

    @property
    def is_probed(self) -> bool:
        return self.log is not None and self.probe != 0

    @property
    def extra_methods(self) -> tuple[str, ...]:
        """Methods to add if their acceptance can be measured, unless methods were given."""
        return () if self.method or not self.is_probed else extra_methods()

    @property
    def prices(self) -> money.Prices:
        return money.Prices(self.price_per_hour, self.price_per_gb_month)

    def training(self, subject: Subject) -> money.Training | None:
        """How the drafter would be trained; None without --train-answers."""
        if self.train_answers is None:
            return None
        return money.Training(self.train_answers, self.epochs or EPOCHS, money.token_bytes(subject.model))

    def subject(self) -> Subject:
        """Target and methods, from their configs.  Raises TargetError, ConfigError, DataError."""
        methods = self.method or (*default_methods(), *self.extra_methods)
        subject = load_subject(self.target, methods, self.weights, self.draft_model, self.report)
        if self.draft_model is not None and not any(method(each.kind).is_model for each in subject.methods.values()):
            raise ConfigError("--draft-model has no effect without --method small_model; give both, or neither")
        return subject

    def demand(self, subject: Subject) -> tuple[Demand | None, str]:
        """The traffic, or None and what is missing.  Raises ConfigError for texts longer than the target's context."""
        log = None if self.log is None else demands.of_log(self.log, self.format)
        slo = limits(self.slo)
        demand, missing = demands.resolve(
            self.prompt_tokens, self.new_tokens, self.concurrency, self.rate, slo, log
        )  # fmt: skip
        if (
            demand is not None
            and subject.context is not None
            and demand.prompt_tokens + demand.new_tokens > subject.context
        ):
            raise ConfigError(
                f"texts of {demand.prompt_tokens:.0f} and {demand.new_tokens:.0f} tokens are longer than the "
                f"context of {subject.target}, {subject.context}; give fewer --prompt-tokens or --new-tokens"
            )
        return demand, missing


def refuse(options: PlanOptions) -> None:
    """Raises ConfigError for options that are out of range, contradict each other, or have no effect."""
    _refuse_numbers(options)
    if options.hardware is None and not options.measure and not options.is_probed:
        raise ConfigError(
            f"no hardware was given; name it with --hardware ({', '.join(table.names())}), or --measure on this machine"
        )
    if options.hardware is not None and options.measure:
        raise ConfigError("--hardware and --measure were both given; choose one")
    if options.rate is not None and options.concurrency is not None:
        raise ConfigError("--rate and --concurrency were both given; choose one")
    _refuse_idle(
        ("--devices", options.devices != 1, "--hardware", options.hardware),
        ("--weights", options.weights, "--hardware", options.hardware),
        ("--train-answers", options.train_answers, "--hardware", options.hardware),
        ("--again", options.again, "--measure or --log", options.measure or options.is_probed),
        ("--price-per-hour", options.price_per_hour, "--rate, a --log or --train-answers",
         options.rate or options.log or options.train_answers),
        ("--price-per-gb-month", options.price_per_gb_month, "--train-answers", options.train_answers),
        ("--epochs", options.epochs, "--train-answers", options.train_answers),
        ("--format", options.format, "--log", options.log), ("--probe", options.probe, "--log", options.log),
        ("--minutes", options.minutes, "--measure", options.measure),
    )  # fmt: skip


def refuse_with_checklist(options: PlanOptions, run: Path) -> None:
    """Raises ConfigError for options of a plan that have no effect with --checklist."""
    changed = options.model_dump(exclude={"target", "log"}, exclude_defaults=True)
    idle = [f"--{name.replace('_', '-')}" for name, value in changed.items() if value]
    if idle:
        raise ConfigError(f"{', '.join(idle)} has no effect with --checklist {run}; leave it out")


def _refuse_numbers(options: PlanOptions) -> None:
    minima = {"--devices": (options.devices, 1), "--train-answers": (options.train_answers, 1)}
    for name, (count, minimum) in minima.items():
        if count is not None and count < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {count}")
    prices = {"--price-per-hour": options.price_per_hour, "--price-per-gb-month": options.price_per_gb_month}
    for name, value in {**prices, "--epochs": options.epochs, "--minutes": options.minutes}.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0, got {value:g}")
    for name, seconds in limits(options.slo).items():
        if name not in SLO:
            raise ConfigError(f"--slo {name} is not a limit that a plan can predict; give tpot in ms: --slo tpot=50")
        if not 0 < seconds < math.inf:
            raise ConfigError(f"--slo {name} must be above 0 ms, got {1000 * seconds:g}")


def _refuse_idle(*options: tuple[str, Any, str, Any]) -> None:
    """Raises ConfigError for an option that has no effect without another."""
    for name, value, required, required_value in options:
        if value and not required_value:
            raise ConfigError(f"{name} has no effect without {required}; give {required} too, or leave {name} out")


def on_paper(options: PlanOptions, subject: Subject, demand: Demand | None, missing: str) -> Plan:
    """The plan for an accelerator from the table.  Raises ConfigError."""
    assert options.hardware is not None
    place = table.place(options.hardware, options.devices)
    memory = Memory(place.memory_bytes, subject.model, subject.drafts)
    name = f"{options.devices} {place.accelerator.name}" if options.devices > 1 else place.accelerator.name
    inputs = planner.Inputs(planner.on_paper(subject, place), demand, missing, name, memory)
    return planner.plan(subject, inputs, options.prices, options.training(subject), place)
