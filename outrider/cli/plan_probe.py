"""The probe of `outrider plan`: a sample of the log, replayed on the target with drafters that need no training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from outrider.cli import console
from outrider.cli.console import bar, counted, lasting, say, stopping
from outrider.decoding.protocols import Drafter
from outrider.plan.acceptance import Acceptance
from outrider.plan.measured import probe, probed
from outrider.plan.measured.probe import SEED, CachedRecords, Share
from outrider.plan.measured.sample import MOST_NEW, draw
from outrider.plan.options import PlanOptions
from outrider.plan.schema import Probed
from outrider.plan.subject import Subject
from outrider.report.bootstrap import MIN_PROMPTS
from outrider.report.parts import Range
from outrider.targets.hf.transformers import TransformersTarget

SHOWN = (1, 2, 4)
"""Depths whose shares are printed; the JSON has all of them."""


def replayed(
    subject: Subject, options: PlanOptions, load: Callable[[str], Any]
) -> tuple[Probed, dict[str, Acceptance]]:
    """Replay a sample; returns the results, and acceptance by method where there are enough requests."""
    assert options.log is not None
    sample = draw(options.log, options.format, probe.num_requests(options.probe), SEED)
    names = [name for name, each in subject.methods.items() if probe.can_probe(each, options.draft_model)]
    why = probe.why_not(subject, sample, names, options.probe)
    if why is not None:
        say(f"probe     none: {why}")
        return probed.summary(sample, options.probe, [], {}, why), {}
    texts = f"{len(sample.questions)} of {sample.texts} requests with text, seed {SEED}"
    say(f"probe     {texts}, with {', '.join(names)}; answers of at most {MOST_NEW} tokens; loading {subject.target}")
    target = load(subject.target)
    drafters = {name: probe.drafter_of(subject, name, target, options.draft_model) for name in names}
    reads, refused = probe.encode(target, sample.questions)
    cached = CachedRecords(target, {name: subject.methods[name] for name in names}, options.draft_model)
    if options.again:
        cached.records.clear()
    share = probe.limited(target, reads, cached, drafters, options.probe)
    records, loops = probed.without_loops(_run(target, drafters, share, cached))
    left_out = {"refused by the target": refused, "the answer loops": loops}
    result = probed.summary(sample, options.probe, records, left_out, share.because)
    return result, probed.acceptances(records, result.requests, sample.texts)


def _run(
    target: TransformersTarget, drafters: Mapping[str, Drafter], share: Share, cached: CachedRecords
) -> list[probe.Replayed]:
    """Run the replay, printing its expected and actual time."""
    before = f", {share.before} of them already stored" if share.before else ""
    say(f"          about {lasting(share.seconds)} for all{before}")
    if share.because is not None:
        say(f"          only the first {len(share.reads)} are replayed: {share.because}")
    began = time.monotonic()
    with stopping("rerun the same command to resume"), bar("replays", len(share.reads) * len(drafters)) as update:
        records = probe.replay(target, drafters, share.reads, cached, update)
    tokens = sum(record.tokens for record in records)
    say(f"          {counted(tokens)} tokens, took {lasting(time.monotonic() - began)}; counts are in {cached.path}")
    return records


def show_probe(probed: Probed) -> None:
    """Acceptance by category and method, with intervals over requests."""
    heads = ("requests", "tokens/step", *(f"≥ {depth} accepted" for depth in SHOWN))
    shown = console.table("category", "method", *heads, right=heads)
    for row in sorted(probed.rows, key=lambda row: row.category):
        shares = (around(row.survival[depth - 1]) for depth in SHOWN)
        shown.add_row(row.category, row.method, str(row.requests), around(row.tokens_per_step), *shares)
    console.show(shown)
    for reason, count in probed.left_out.items():
        say(f"          {count} left out: {reason}")
    if 0 < probed.requests < MIN_PROMPTS:
        say(f"          {probed.requests} requests are too few for an interval; the plan does not use them")


def around(figure: Range) -> str:
    """A figure with its interval, if there is one."""
    return f"{figure.center:.2f}" + ("" if figure.low is None else f" [{figure.low:.2f}, {figure.high:.2f}]")
