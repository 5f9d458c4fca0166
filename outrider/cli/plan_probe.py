"""The probe of `outrider plan`: a sample of the log, replayed on the target with drafters that need no training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from outrider.cli import console
from outrider.cli.console import bar, counted, lasting, say, stopping
from outrider.decoding.protocols import Drafter
from outrider.plan.acceptance import Acceptance
from outrider.plan.asked import Asked
from outrider.plan.measured import probe, probed
from outrider.plan.measured.probe import SEED, CachedRecords, Share
from outrider.plan.measured.sample import MOST_NEW, draw
from outrider.plan.schema import Probed
from outrider.plan.subject import Subject
from outrider.report.bootstrap import MIN_PROMPTS
from outrider.report.parts import Range
from outrider.targets.hf.transformers import TransformersTarget

SHOWN = (1, 2, 4)
"""Depths whose shares are printed; the JSON has all."""


def replayed(own: Subject, asked: Asked, load: Callable[[str], Any]) -> tuple[Probed, dict[str, Acceptance]]:
    """Replay a sample; what was found, and by method the acceptance that a plan can rest on."""
    assert asked.log is not None
    sample = draw(asked.log, asked.format, probe.wanted(asked.probe), SEED)
    names = [name for name, each in own.methods.items() if probe.can_probe(each, asked.draft_model)]
    why = probe.why_not(own, sample, names, asked.probe)
    if why is not None:
        say(f"probe     none: {why}")
        return probed.found(sample, asked.probe, [], {}, why), {}
    texts = f"{len(sample.questions)} of {sample.texts} requests with a text, seed {SEED}"
    say(f"probe     {texts}, with {', '.join(names)}; answers of at most {MOST_NEW} tokens; loading {own.target}")
    target = load(own.target)
    drafters = {name: probe.drafter_of(own, name, target, asked.draft_model) for name in names}
    reads, refused = probe.read(target, sample.questions)
    cached = CachedRecords(target, {name: own.methods[name] for name in names}, asked.draft_model)
    if asked.again:
        cached.records.clear()
    share = probe.within(target, reads, cached, drafters, asked.probe)
    records, loops = probed.counted(_run(target, drafters, share, cached))
    left_out = {"refused by the target": refused, "the answer loops": loops}
    found = probed.found(sample, asked.probe, records, left_out, share.because)
    return found, probed.known(records, found.requests, sample.texts)


def _run(
    target: TransformersTarget, drafters: Mapping[str, Drafter], share: Share, cached: CachedRecords
) -> list[probe.Replayed]:
    """The replay, with its time said before and after."""
    before = f", {share.before} were replayed before" if share.before else ""
    say(f"          about {lasting(share.seconds)} for all{before}")
    if share.because is not None:
        say(f"          the first {len(share.reads)} are replayed: {share.because}")
    began = time.monotonic()
    with stopping("the same command goes on from there"), bar("replays", len(share.reads) * len(drafters)) as update:
        records = probe.replay(target, drafters, share.reads, cached, update)
    tokens = sum(record.tokens for record in records)
    say(f"          {counted(tokens)} tokens, took {lasting(time.monotonic() - began)}; counts are in {cached.path}")
    return records


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
