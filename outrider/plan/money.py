"""Up-front cost of a drafter, and its savings per day: hours, bytes, money.  No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from outrider.data.features import encodings
from outrider.plan.demand import Demand, at_once
from outrider.plan.paper.anatomy import Anatomy
from outrider.plan.paper.drafts import DraftModelOnPaper
from outrider.plan.paper.hardware import Place
from outrider.plan.predict import MOST_AT_ONCE, Costs, Memory, request_seconds
from outrider.plan.schema import Cost, Once, Row

DAY_S = 86_400
SHARES = (0.5, 1.0, 2.0)
"""Shares of the traffic for which costs are shown."""
MONTHS = 12


class Prices(NamedTuple):
    """The user's prices, in any currency; None if unknown."""

    device_hour: float | None = None
    gb_month: float | None = None


class Training(NamedTuple):
    """How a drafter would be trained."""

    answers: int
    """Number of the target's answers to train on."""
    epochs: float
    token_bytes: float
    """Bytes of a token's stored features; 0 if the target reads the texts in every epoch instead."""


def token_bytes(model: Anatomy) -> float:
    """Bytes of a token's stored features: five taps and the final state, in bfloat16."""
    return encodings.bytes_per_token("bf16", model.hidden, 5)


def once(
    training: Training, demand: Demand, draft: DraftModelOnPaper, model: Anatomy, place: Place, costs: Costs,
    memory: Memory | None, prices: Prices,
) -> Once:  # fmt: skip
    """Up-front cost of a drafter.  Training answers are assumed to be as long as the traffic's."""
    length = demand.prompt_tokens + demand.new_tokens
    slots = min(256, memory.slots(length)) if memory else 256
    writing = training.answers * demand.new_tokens * costs.plain(max(1, slots), demand.context) / max(1, slots)
    tokens = training.answers * length
    passes = 1.0 if training.token_bytes else training.epochs
    reading = 2 * model.active * tokens * passes
    trained = draft.training_flops(model, length, demand.new_tokens) * training.answers * training.epochs
    operations = reading + trained
    hours = writing / 3600, operations / place.training_flops / 3600
    stored = training.token_bytes * tokens + draft.weight_bytes
    priced = None if prices.device_hour is None else [each * place.devices * prices.device_hour for each in hours]
    storage = None if prices.gb_month is None else stored / 1e9 * MONTHS * prices.gb_month
    parts = [*(priced or ()), *([] if storage is None else [storage])]
    assumed = (
        f"{training.answers:,} answers of {demand.new_tokens:.0f} tokens, generated {slots} at once",
        f"{training.epochs:g} epochs over {tokens:,.0f} tokens, six operations per trained weight and row",
        *(["hours have no price"] if priced is None and storage is not None else []),
        *(["storage has no price"] if priced is not None and storage is None else []),
    )
    return Once(
        data_hours=hours[0], training_hours=hours[1], storage_bytes=stored, data_money=priced and priced[0],
        training_money=priced and priced[1], storage_money=storage, money=sum(parts) if parts else None,
        assumed=assumed,
    )  # fmt: skip


def daily(
    demand: Demand, costs: Costs, devices: int, row_at: Callable[[float], Row | None], most: float, prices: Prices,
    spent: float | None,
) -> list[Cost]:  # fmt: skip
    """Cost and savings of serving at half, all and twice the traffic.

    row_at: the chosen method's row at a number of concurrent requests; None if no method was chosen.  most: texts that
    fit.  spent: up-front cost.
    """
    if demand.rate is None:
        return []
    costs_by_share = []
    for share in SHARES:
        rate = share * demand.rate
        load = at_once(rate, lambda many: request_seconds(costs, demand, many), most)
        if load is None:
            costs_by_share.append(Cost(traffic=share))
            continue
        row = row_at(max(1.0, load))
        # a step serves all texts, so the machine is busy all day unless the load is below one text
        seconds = DAY_S * min(1.0, load)
        hours = devices * seconds / 3600
        speedup = row.speedup.center if row else None
        saved = hours * max(0.0, 1 - 1 / speedup) if speedup else 0.0
        money = lambda hours: None if prices.device_hour is None else hours * prices.device_hour
        gain = money(saved)
        costs_by_share.append(
            Cost(
                traffic=share, concurrency=load, speedup=speedup, device_hours_per_day=hours,
                device_hours_saved_per_day=saved, memory_bytes=row.memory_bytes if row else None,
                spent_per_day=money(hours), saved_per_day=gain,
                pays_back_after_days=spent / gain if spent is not None and gain else None,
            )
        )  # fmt: skip
    return costs_by_share


def most_at_once(demand: Demand, memory: Memory | None) -> float:
    """Maximum number of texts that fit; `MOST_AT_ONCE` if the memory size is unknown."""
    most = memory.slots(demand.prompt_tokens + demand.new_tokens) if memory else MOST_AT_ONCE
    return float(max(1, min(most, MOST_AT_ONCE)))
