"""Prompts that are served together: measured plain and with every drafter, traced, or run again so that a drafter
learns."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.decoding.protocols import Policy
from outrider.decoding.state import Request
from outrider.machine.contention import calmest, mean
from outrider.measure import rejections, timing
from outrider.measure.config import Config
from outrider.measure.journal import PromptRecord, Record, Traced
from outrider.measure.record import Measured, Run
from outrider.measure.tasks import prompts
from outrider.measure.tasks.names import Prompt
from outrider.policies import named
from outrider.report.parts import Load, TracedToken
from outrider.sampling.judge import SamplingJudge
from outrider.targets.hf.transformers import TransformersTarget

SHARED_NOISE = False
"""Here a seed fixes the noise and no more: sampled runs can be repeated, and are drawn as requests without a seed are.
Drafts that share the target's noise, for the text's sake, are accepted less often."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to measure, with the target's own greedy answers."""

    index: int
    prompt: Prompt
    references: list[list[int]]
    generate_s: float


def judge_of(config: Config) -> SamplingJudge:
    """A new judge, of the verification that the config names."""
    return named.judge(config.verification, config.allow_lossy)


def plain_key(temperature: float) -> str:
    """What `PromptRecord.plain` calls a temperature."""
    return f"{temperature:g}"


def run(
    target: TransformersTarget, conversations: Sequence[Sequence[Request]], measured: Measured | None, config: Config,
    policy: Policy | None = None,
) -> list[Run]:  # fmt: skip
    """Serve conversations together, turn after turn: with an entry's drafter, or plain.  The turns of each are one
    run."""
    is_greedy = conversations[0][0].sampling.temperature == 0
    found: list[Run | None] = [None] * len(conversations)
    for turn in range(max(map(len, conversations))):
        which = [i for i, requests in enumerate(conversations) if len(requests) > turn]
        batch = [conversations[i][turn] for i in which]
        if measured is None:
            runs = timing.run_batch(target, batch, ends=is_greedy)
        else:
            drafter = measured.entry.drafter
            runs = timing.run_batch(
                target, batch, drafter, policy, ends=is_greedy, judge=judge_of(config), shared_noise=SHARED_NOISE
            )
        for i, own in zip(which, runs, strict=True):
            before = found[i]
            found[i] = own if before is None else before.joined(own)
    return [own for own in found if own is not None]


def measure(
    target: TransformersTarget, task: str, group: Sequence[Asked], table: Sequence[Measured], config: Config,
    traced: int,
) -> Record:  # fmt: skip
    """Serve prompts together, plain and with every entry, and trace the first `traced` of them."""
    record = Record(task, [asked.index for asked in group], [prompts.digest(asked.prompt) for asked in group])
    plain: dict[str, list[Run]] = {}
    runs: dict[int, list[Run]] = {}
    for number in rotated(table, group[0].index):
        measured = table[number]
        temperature = measured.entry.temperature
        key = plain_key(temperature)
        if key not in plain:
            own = _requests(target, group, config, temperature)
            plain[key] = _calm(record, functools.partial(run, target, own, None, config), config.repeats)
        own = _requests(target, group, config, temperature, f"timed at {key}")
        may_repeat = config.policy == "fixed" and not measured.entry.drafter.learns
        work = functools.partial(run, target, own, measured, config, measured.chosen)
        runs[number] = _calm(record, work, config.repeats if may_repeat else 0)
    for at, asked in enumerate(group):
        own_plain = {key: all_of[at] for key, all_of in plain.items()}
        own_runs = [runs[number][at] for number in range(len(table))]
        record.prompts.append(PromptRecord(asked.references, asked.generate_s, own_plain, own_runs))
        if at < traced:
            record.prompts[-1].traced = [trace(target, asked, measured, config) for measured in table]
    record.policies = [_state(measured.chosen) for measured in table]
    return record


def rotated(table: Sequence[Measured], index: int) -> list[int]:
    """Numbers of the entries in the order of their runs: who is first changes from prompt to prompt."""
    start = index % len(table)
    return [*range(start, len(table)), *range(start)]


def _requests(
    target: TransformersTarget, group: Sequence[Asked], config: Config, temperature: float, tenant: str = ""
) -> list[list[Request]]:
    """tenant: what a drafter remembers of one temperature's texts is not known at another."""
    return [
        prompts.requests(target, asked.prompt, asked.references, config, temperature, asked.index, tenant)
        for asked in group
    ]


def _calm(record: Record, work: Callable[[], list[Run]], repeats: int) -> list[Run]:
    """The runs of the calmest of several tries; what other programs took is noted in them and in the record."""
    tries, lost = calmest(work, repeats)
    for own in tries[0]:
        own.lost, own.repeats = lost[0].lost, len(tries) - 1
    record.contention.append(lost[0])
    return tries[0]


def trace(target: TransformersTarget, asked: Asked, measured: Measured, config: Config) -> Traced:
    """Run a prompt once more, untimed, and record every token.  Neither policy nor drafter learns from it for timed
    runs."""
    entry = measured.entry
    policy = None if measured.chosen is None else named.apart(measured.chosen)
    tokens: list[TracedToken] = []
    overlap: list[float] = []
    tenant = f"traced at {plain_key(entry.temperature)}"
    for request in _requests(target, [asked], config, entry.temperature, tenant)[0]:
        found = rejections.judged(
            target, request, entry.drafter, policy, ends=entry.temperature == 0, judge=judge_of(config),
            shared_noise=SHARED_NOISE,
        )  # fmt: skip
        tokens += found.tested
        overlap += found.overlap
    return Traced(tokens, overlap)


# ── what was learnt, after a stop ──


def _state(policy: Any) -> dict[str, Any] | None:
    """What a policy has learnt, as JSON; None where it holds more than numbers and lists."""
    try:
        state: dict[str, Any] = json.loads(json.dumps(vars(policy)))
    except (TypeError, ValueError):
        return None
    return state if state == vars(policy) else None


def restore(
    target: TransformersTarget, records: Sequence[Record], task_prompts: Sequence[Prompt], table: Sequence[Measured],
    config: Config,
) -> list[str]:  # fmt: skip
    """Let policies and drafters of a task know what they knew when it was stopped, by the records of this process.

    Policies get back what they had learnt.  Drafters that learn are run again, untimed.  Returns what can't be
    restored, by drafter.
    """
    served = [record for record in records if record.prompts]
    if not served:
        return []
    for record in served if any(measured.entry.drafter.learns for measured in table) else ():
        _teach(target, record, task_prompts, table, config)
    lost = []
    for measured, state in zip(table, served[-1].policies, strict=True):
        if state is not None:
            vars(measured.chosen).update(state)
        elif not measured.entry.drafter.learns:
            lost.append(f"{measured.entry.name} at temperature {measured.entry.temperature:g}")
    return lost


def _teach(
    target: TransformersTarget,
    record: Record,
    task_prompts: Sequence[Prompt],
    table: Sequence[Measured],
    config: Config,
) -> None:
    """Serve a record's prompts again, in the same order, with the drafters that learn."""
    numbered = zip(record.indices, record.prompts, strict=True)
    group = [Asked(index, task_prompts[index], own.reference, own.generate_s) for index, own in numbered]
    learners = [number for number in rotated(table, group[0].index) if table[number].entry.drafter.learns]
    for number in learners:
        temperature = table[number].entry.temperature
        own = _requests(target, group, config, temperature, f"timed at {plain_key(temperature)}")
        run(target, own, table[number], config, table[number].chosen)
    for asked, known in zip(group, record.prompts, strict=True):
        for number in sorted(learners) if known.traced else ():
            trace(target, asked, table[number], config)


def with_load(before: Load, records: Sequence[Record]) -> Load:
    """What other programs took, with that of further records."""
    unique = list({id(record): record for record in records}.values())
    runs = [run for record in unique for own in record.prompts for run in (*own.runs, *own.plain.values())]
    every = [each for record in unique for each in record.contention]
    means = mean(every)
    weight = before.runs / max(1, before.runs + len(every))
    shares = {
        name: own if (old := getattr(before, name)) is None or own is None else weight * old + (1 - weight) * own
        for name, own in means.items()
    }
    return Load(
        runs=before.runs + len(every), repeated=before.repeated + sum(run.repeats > 0 for run in runs),
        contended=before.contended + sum(each.is_high for each in every), **shares,
    )  # fmt: skip
