"""What is asked of a plan: options as they were given, and those that can't be followed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.drafters import method
from outrider.errors import ConfigError
from outrider.plan import demand as demands
from outrider.plan import money, planner
from outrider.plan.demand import Demand
from outrider.plan.paper import hardware as table
from outrider.plan.paper.drafts import added, usual
from outrider.plan.predict import Memory
from outrider.plan.schema import Plan
from outrider.plan.subject import Subject, subject
from outrider.traffic.replay.plan import limits

EPOCHS = 10.0
SLO = ("tpot",)
"""Limits that a plan can judge: of a token's time, not of queues."""


class Asked(NamedTuple):
    """The options of `outrider plan`; docs/plan.md says what each does."""

    target: str = "demo"
    hardware: str | None = None
    measure: bool = False
    devices: int = 1
    weights: str | None = None
    log: Path | None = None
    format: str | None = None
    prompt_tokens: float | None = None
    new_tokens: float | None = None
    concurrency: float | None = None
    rate: float | None = None
    slo: str | None = None
    method: Sequence[str] = ()
    draft_model: str | None = None
    report: Sequence[str] = ()
    again: bool = False
    price_per_hour: float | None = None
    price_per_gb_month: float | None = None
    train_answers: int | None = None
    epochs: float | None = None
    probe: int | None = None
    minutes: float | None = None

    @property
    def is_probed(self) -> bool:
        return self.log is not None and self.probe != 0

    @property
    def added(self) -> tuple[str, ...]:
        """Methods that nobody asked for, which stay where their acceptance is measured."""
        return () if self.method or not self.is_probed else added()

    @property
    def prices(self) -> money.Prices:
        return money.Prices(self.price_per_hour, self.price_per_gb_month)

    def training(self, own: Subject) -> money.Training | None:
        """How the drafter would be trained; None where nobody asked."""
        if self.train_answers is None:
            return None
        return money.Training(self.train_answers, self.epochs or EPOCHS, money.token_bytes(own.model))

    def subject(self) -> Subject:
        """Target and methods, by their configs.  Raises TargetError, ConfigError, DataError."""
        methods = self.method or (*usual(), *self.added)
        own = subject(self.target, methods, self.weights, self.draft_model, self.report)
        if self.draft_model is not None and not any(method(each.kind).is_model for each in own.methods.values()):
            raise ConfigError("--draft-model has no effect without --method small_model; give both, or neither")
        return own

    def demand(self, own: Subject) -> tuple[Demand | None, str]:
        """The traffic, or None and what is missing.  Raises ConfigError for texts that the target can't read."""
        log = None if self.log is None else demands.of_log(self.log, self.format)
        slo = limits(self.slo)
        found, missing = demands.given(
            self.prompt_tokens, self.new_tokens, self.concurrency, self.rate, slo, log
        )  # fmt: skip
        if found is not None and own.context is not None and found.prompt_tokens + found.new_tokens > own.context:
            raise ConfigError(
                f"texts of {found.prompt_tokens:.0f} and {found.new_tokens:.0f} tokens are longer than the "
                f"{own.context} that {own.target} reads; give fewer --prompt-tokens or --new-tokens"
            )
        return found, missing


def refuse(asked: Asked) -> None:
    """ConfigError for options that are no numbers, contradict each other, or have no effect."""
    _refuse_numbers(asked)
    if asked.hardware is None and not asked.measure and not asked.is_probed:
        raise ConfigError(
            f"no hardware was given; name it with --hardware ({', '.join(table.names())}), or --measure on this machine"
        )
    if asked.hardware is not None and asked.measure:
        raise ConfigError("--hardware and --measure were both given; choose one")
    if asked.rate is not None and asked.concurrency is not None:
        raise ConfigError("--rate and --concurrency were both given; choose one")
    _refuse_idle(
        ("--devices", asked.devices != 1, "--hardware", asked.hardware),
        ("--weights", asked.weights, "--hardware", asked.hardware),
        ("--train-answers", asked.train_answers, "--hardware", asked.hardware),
        ("--again", asked.again, "--measure or --log", asked.measure or asked.is_probed),
        ("--price-per-hour", asked.price_per_hour, "--rate, a --log or --train-answers",
         asked.rate or asked.log or asked.train_answers),
        ("--price-per-gb-month", asked.price_per_gb_month, "--train-answers", asked.train_answers),
        ("--epochs", asked.epochs, "--train-answers", asked.train_answers),
        ("--format", asked.format, "--log", asked.log), ("--probe", asked.probe, "--log", asked.log),
        ("--minutes", asked.minutes, "--measure", asked.measure),
    )  # fmt: skip


def refuse_with_checklist(asked: Asked, run: Path) -> None:
    """ConfigError for options of a plan, which a checklist does not make."""
    idle = [
        f"--{name.replace('_', '-')}" for name, value in asked._asdict().items()
        if name not in ("target", "log") and value != Asked._field_defaults[name] and value
    ]  # fmt: skip
    if idle:
        raise ConfigError(f"{', '.join(idle)} has no effect with --checklist {run}; leave it out")


def _refuse_numbers(asked: Asked) -> None:
    minima = {"--devices": (asked.devices, 1), "--train-answers": (asked.train_answers, 1)}
    for name, (count, minimum) in minima.items():
        if count is not None and count < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {count}")
    prices = {"--price-per-hour": asked.price_per_hour, "--price-per-gb-month": asked.price_per_gb_month}
    for name, value in {**prices, "--epochs": asked.epochs, "--minutes": asked.minutes}.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0, got {value:g}")
    for name, seconds in limits(asked.slo).items():
        if name not in SLO:
            raise ConfigError(f"--slo {name} is no limit that a plan can judge; give tpot, in ms: --slo tpot=50")
        if not 0 < seconds < math.inf:
            raise ConfigError(f"--slo {name} must be above 0 ms, got {1000 * seconds:g}")


def _refuse_idle(*options: tuple[str, Any, str, Any]) -> None:
    """ConfigError for an option that has no effect without another."""
    for name, given, other, there in options:
        if given and not there:
            raise ConfigError(f"{name} has no effect without {other}; give {other} too, or leave {name} out")


def on_paper(asked: Asked, own: Subject, demand: Demand | None, missing: str) -> Plan:
    """The plan for an accelerator of the table.  Raises ConfigError."""
    assert asked.hardware is not None
    place = table.place(asked.hardware, asked.devices)
    memory = Memory(place.memory_bytes, own.model, own.drafts)
    name = f"{asked.devices} {place.accelerator.name}" if asked.devices > 1 else place.accelerator.name
    given = planner.Given(planner.on_paper(own, place), demand, missing, name, memory)
    return planner.plan(own, given, asked.prices, asked.training(own), place)
