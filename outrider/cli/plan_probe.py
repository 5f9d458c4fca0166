"""The probe of `outrider plan`: a sample of the log, replayed on the target with drafters that need no training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.cli import console
from outrider.cli.console import bar, counted, lasting, say, stopping
from outrider.decoding.protocols import Drafter
from outrider.loading import load_drafter
from outrider.plan import probe, probed
from outrider.plan.acceptance import Acceptance
from outrider.plan.planner import Subject
from outrider.plan.probe import CachedRecords, Read
from outrider.plan.sample import MOST_NEW, Sample, draw
from outrider.plan.schema import Probed
from outrider.report.bootstrap import MIN_PROMPTS
from outrider.report.parts import Range
from outrider.targets.transformers import TransformersTarget

ADDED = ("recycle",)
"""Methods that are looked at beside the usual ones where they can be measured."""
REQUESTS = 24
"""Replayed unless a number was given."""
UNASKED_S = 60.0
"""Most seconds of a replay that nobody asked for."""
SEED = 0
SHOWN = (1, 2, 4)
"""Depths whose shares are printed; the JSON has all."""


def replayed(
    own: Subject, log: Path, format: str | None, asked: int | None, draft_model: str | None, again: bool,
    load: Callable[[str], Any],
) -> tuple[Probed, dict[str, Acceptance]]:  # fmt: skip
    """Replay a sample; what was found, and by method the acceptance that a plan can rest on.

    asked: requests; None takes so few that they take about a minute.  again: not what was replayed before.
    """
    sample = draw(log, format, REQUESTS if asked is None else asked, SEED)
    names = [name for name, each in own.methods.items() if probe.can_probe(each, draft_model)]
    why = _why_not(own, sample, names, asked)
    if why is not None:
        say(f"probe     none: {why}")
        return _found(sample, asked, [], 0, {}, why), {}
    texts = f"{len(sample.questions)} of {sample.texts} requests with a text, seed {SEED}"
    say(f"probe     {texts}, with {', '.join(names)}; answers of at most {MOST_NEW} tokens; loading {own.target}")
    target = load(own.target)
    drafters = {name: drafter_of(own, name, target, draft_model) for name in names}
    reads, refused = probe.read(target, sample.questions)
    cached = CachedRecords(target, {name: own.methods[name] for name in names}, draft_model)
    if again:
        cached.records.clear()
    reads, why = _within(target, reads, cached, names, asked)
    records = _run(target, drafters, reads, cached)
    records, loops = probed.counted(records)
    left_out = {"refused by the target": refused, "the answer loops": loops}
    found = _found(sample, asked, probed.rows(records), len({record.number for record in records}), left_out, why)
    source = f"measured on {found.requests} of your {sample.texts} requests"
    acceptance = {name: probed.acceptance([one for one in records if one.method == name], source) for name in names}
    return found, {name: each for name, each in acceptance.items() if each is not None}


def drafter_of(own: Subject, name: str, target: TransformersTarget, draft_model: str | None) -> Drafter:
    """The drafter of a method."""
    is_small = own.methods[name].kind == name == "small_model"
    return load_drafter(name, target, **({"model": draft_model} if is_small else {}))


def _why_not(own: Subject, sample: Sample, names: list[str], asked: int | None) -> str | None:
    """Why nothing is replayed; None where something is."""
    if not sample.questions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sample.left_out.items())
        return f"no request in the log has a text ({reasons}), so its acceptance can't be measured"
    if not names:
        return f"{', '.join(own.methods)} must be trained first; add --method ngram to replay with a lookup"
    if asked is None:
        why = probe.missing(own.target, own.model)
        return why and f"{why}; --probe {REQUESTS} loads it all the same"
    if Path(own.target).expanduser().is_dir() and not probe.has_weights(own.target):
        return f"{own.target} has a config and no weights"
    return None


def _within(
    target: TransformersTarget, reads: list[Read], cached: CachedRecords, names: list[str], asked: int | None
) -> tuple[list[Read], str | None]:
    """The requests that are replayed, and why they are fewer than were drawn; says how long they take."""
    seconds = probe.seconds(target, reads, len(names))
    left = [0.0 if all(cached.key(name, own) in cached.records for name in names) else each
            for own, each in zip(reads, seconds, strict=True)]  # fmt: skip
    before = left.count(0.0)
    say(f"          about {lasting(sum(left))} for all{f', {before} were replayed before' if before else ''}")
    if asked is not None or sum(left) <= UNASKED_S:
        return reads, None
    taken = 0
    while taken < len(reads) and sum(left[: taken + 1]) <= UNASKED_S:
        taken += 1
    why = f"all {len(reads)} would take {lasting(sum(left))}; --probe {len(reads)} replays them"
    say(f"          the first {taken} are replayed: {why}")
    return reads[:taken], why


def _run(
    target: TransformersTarget, drafters: Mapping[str, Drafter], reads: list[Read], cached: CachedRecords
) -> list[probe.Replayed]:
    began = time.monotonic()
    with stopping("the same command goes on from there"), bar("replays", len(reads) * len(drafters)) as update:
        records = probe.replay(target, drafters, reads, cached, update)
    tokens = sum(record.tokens for record in records)
    say(f"          {counted(tokens)} tokens, took {lasting(time.monotonic() - began)}; counts are in {cached.path}")
    return records


def _found(
    sample: Sample, asked: int | None, rows: Any, requests: int, left_out: Mapping[str, int], why: str | None
) -> Probed:
    return Probed(
        requests=requests, wanted=REQUESTS if asked is None else asked, because=why, calls=sample.calls,
        categories=dict(sample.categories), rows=tuple(rows), seed=SEED, new_tokens=MOST_NEW,
        left_out=dict(sample.left_out) | {reason: count for reason, count in left_out.items() if count},
    )  # fmt: skip


def show_probe(found: Probed) -> None:
    """Acceptance by category and method, with intervals over requests."""
    heads = ("requests", "tokens/step", *(f"≥ {depth} accepted" for depth in SHOWN))
    shown = console.table("category", "method", *heads, right=heads)
    for row in sorted(found.rows, key=lambda row: row.category):
        shares = (around(row.survival[depth - 1]) for depth in SHOWN)
        shown.add_row(row.category, row.method, str(row.requests), around(row.tokens_per_step), *shares)
    console.show(shown)
    for reason, count in found.left_out.items():
        say(f"          {count} left out: {reason}")
    if 0 < found.requests < MIN_PROMPTS:
        say(f"          {found.requests} requests are too few for an interval; the plan does not rest on them")


def around(found: Range) -> str:
    """A figure with its interval, where it has one."""
    return f"{found.center:.2f}" + ("" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]")
