"""Prompts that are served together: measured plain and with every drafter, traced, or rerun so that a drafter
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
"""Seeds only make sampled runs repeatable; tokens are drawn as for requests without a seed.  Drafts that share the
target's noise, so as to give the same text as without a drafter, are accepted less often."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt to measure, with the target's own greedy answers."""

    index: int
    prompt: Prompt
    references: list[list[int]]
    generate_s: float


def judge_of(config: Config) -> SamplingJudge:
    """A new judge for the configured verification."""
    return named.judge(config.verification, config.allow_lossy)


def plain_key(temperature: float) -> str:
    """The key of a temperature in `PromptRecord.plain`."""
    return f"{temperature:g}"


def run(
    target: TransformersTarget, conversations: Sequence[Sequence[Request]], measured: Measured | None, config: Config,
    policy: Policy | None = None,
) -> list[Run]:  # fmt: skip
    """Serve conversations together, turn by turn, with an entry's drafter or plain.  Each conversation is one run."""
    is_greedy = conversations[0][0].sampling.temperature == 0
    joined: list[Run | None] = [None] * len(conversations)
    for turn in range(max(map(len, conversations))):
        active = [i for i, requests in enumerate(conversations) if len(requests) > turn]
        batch = [conversations[i][turn] for i in active]
        if measured is None:
            runs = timing.run_batch(target, batch, ends=is_greedy)
        else:
            drafter = measured.entry.drafter
            runs = timing.run_batch(
                target, batch, drafter, policy, ends=is_greedy, judge=judge_of(config), shared_noise=SHARED_NOISE
            )
        for i, run in zip(active, runs, strict=True):
            before = joined[i]
            joined[i] = run if before is None else before.joined(run)
    return [run for run in joined if run is not None]


def measure(
    target: TransformersTarget, task: str, group: Sequence[PreparedPrompt], table: Sequence[Measured], config: Config,
    num_to_trace: int,
) -> Record:  # fmt: skip
    """Serve prompts together, plain and with every entry, and trace the first `num_to_trace` of them."""
    record = Record(task, [each.index for each in group], [prompts.digest(each.prompt) for each in group])
    plain: dict[str, list[Run]] = {}
    runs: dict[int, list[Run]] = {}
    for number in rotated(table, group[0].index):
        measured = table[number]
        temperature = measured.entry.temperature
        key = plain_key(temperature)
        if key not in plain:
            requests = _requests(target, group, config, temperature)
            plain[key] = _calm(record, functools.partial(run, target, requests, None, config), config.repeats)
        requests = _requests(target, group, config, temperature, f"timed at {key}")
        may_repeat = config.policy == "fixed" and not measured.entry.drafter.learns
        work = functools.partial(run, target, requests, measured, config, measured.chosen)
        runs[number] = _calm(record, work, config.repeats if may_repeat else 0)
    for i, prepared in enumerate(group):
        plain_runs = {key: batch[i] for key, batch in plain.items()}
        drafted_runs = [runs[number][i] for number in range(len(table))]
        record.prompts.append(PromptRecord(prepared.references, prepared.generate_s, plain_runs, drafted_runs))
        if i < num_to_trace:
            record.prompts[-1].traced = [trace(target, prepared, measured, config) for measured in table]
    record.policies = [_state(measured.chosen) for measured in table]
    return record


def rotated(table: Sequence[Measured], index: int) -> list[int]:
    """Numbers of the entries in the order of their runs, rotated by one for each prompt."""
    start = index % len(table)
    return [*range(start, len(table)), *range(start)]


def _requests(
    target: TransformersTarget, group: Sequence[PreparedPrompt], config: Config, temperature: float, tenant: str = ""
) -> list[list[Request]]:
    """tenant: separates what a drafter remembers at one temperature from other temperatures."""
    return [
        prompts.requests(target, each.prompt, each.references, config, temperature, each.index, tenant)
        for each in group
    ]


def _calm(record: Record, work: Callable[[], list[Run]], repeats: int) -> list[Run]:
    """The runs of the least disturbed of several tries; they and the record note the time lost to other programs."""
    tries, lost = calmest(work, repeats)
    for run in tries[0]:
        run.lost = lost[0].lost
        run.repeats = len(tries) - 1
    record.contention.append(lost[0])
    return tries[0]


def trace(target: TransformersTarget, prepared: PreparedPrompt, measured: Measured, config: Config) -> Traced:
    """Run a prompt once more, untimed, and record every token.  Policy and drafter learn nothing from it for timed
    runs."""
    entry = measured.entry
    policy = None if measured.chosen is None else named.snapshot(measured.chosen)
    tokens: list[TracedToken] = []
    overlap: list[float] = []
    tenant = f"traced at {plain_key(entry.temperature)}"
    for request in _requests(target, [prepared], config, entry.temperature, tenant)[0]:
        judged = rejections.judged(
            target, request, entry.drafter, policy, ends=entry.temperature == 0, judge=judge_of(config),
            shared_noise=SHARED_NOISE,
        )  # fmt: skip
        tokens += judged.tested
        overlap += judged.overlap
    return Traced(tokens, overlap)


# ── resuming ──


def _state(policy: Any) -> dict[str, Any] | None:
    """A policy's state as JSON; None if it holds more than numbers and lists."""
    try:
        state: dict[str, Any] = json.loads(json.dumps(vars(policy)))
    except (TypeError, ValueError):
        return None
    return state if state == vars(policy) else None


def restore(
    target: TransformersTarget, records: Sequence[Record], task_prompts: Sequence[Prompt], table: Sequence[Measured],
    config: Config,
) -> list[str]:  # fmt: skip
    """Restore policies and drafters of a task after an interruption, from the records of this process.

    Policies get their state back.  Drafters that learn are rerun, untimed.  Returns the entries whose policy can't
    be restored.
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
    group = [
        PreparedPrompt(index, task_prompts[index], prompt.reference, prompt.generate_s) for index, prompt in numbered
    ]
    learners = [number for number in rotated(table, group[0].index) if table[number].entry.drafter.learns]
    for number in learners:
        temperature = table[number].entry.temperature
        requests = _requests(target, group, config, temperature, f"timed at {plain_key(temperature)}")
        run(target, requests, table[number], config, table[number].chosen)
    for prepared, prompt in zip(group, record.prompts, strict=True):
        for number in sorted(learners) if prompt.traced else ():
            trace(target, prepared, table[number], config)


def with_load(before: Load, records: Sequence[Record]) -> Load:
    """The load so far, combined with that of further records."""
    unique = list({id(record): record for record in records}.values())
    runs = [run for record in unique for prompt in record.prompts for run in (*prompt.runs, *prompt.plain.values())]
    every = [each for record in unique for each in record.contention]
    weight = before.runs / max(1, before.runs + len(every))
    shares = {
        name: new if (old := getattr(before, name)) is None or new is None else weight * old + (1 - weight) * new
        for name, new in mean(every).items()
    }
    return Load(
        runs=before.runs + len(every), repeated=before.repeated + sum(run.repeats > 0 for run in runs),
        contended=before.contended + sum(each.is_high for each in every), **shares,
    )  # fmt: skip
