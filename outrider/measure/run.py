"""Measure drafters and plain decoding in one run, alternating prompt by prompt, so that noise affects them all alike.

Every prompt is continued by transformers' `generate`, by this engine without a drafter, and with every drafter.
Speed-up is plain time over drafted time on the same prompts and lengths.  Exactness is equality with `generate`, token
for token.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import ConfigError, DataError
from outrider.generation import DrafterLike, as_drafters, as_target, stored_costs
from outrider.kernels import contents
from outrider.measure import groups, journal, timing
from outrider.measure.config import Config
from outrider.measure.fingerprint import fingerprint
from outrider.measure.groups import PreparedPrompt
from outrider.measure.journal import Journal, Record, Shard
from outrider.measure.record import Entry, Measured, Overlaps, Sample
from outrider.measure.rejections import patterns
from outrider.measure.row import summarise
from outrider.measure.tasks.names import Prompt, PromptSet, task_name
from outrider.measure.tasks.prompts import answer, as_tokens, digest, draw, fitted, left_out
from outrider.measure.trust import trust
from outrider.policies import lossy, named
from outrider.report.parts import LeftOut, Load, TaskSource, TracedPrompt, Training
from outrider.report.schema import Report, Row
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts

log = logging.getLogger(__name__)

SHOWN = 128
"""Tokens of each traced prompt shown in the report; its patterns count all of them."""
POLL_S = 0.2
"""Seconds between checks of what other processes have measured."""
ALONE = Shard()


@dataclass(slots=True)
class Measurements:
    """Rows for the report, and the prompts that were left out."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    prompts: int = 0
    """Prompts measured, over all tasks."""
    cuts: Cuts = field(default_factory=Cuts)
    load: Load = field(default_factory=Load)


def evaluate(
    target: TransformersTarget | str | Path, drafters: DrafterLike | Iterable[DrafterLike] | Mapping[str, DrafterLike],
    config: Config | None = None, *,
    provenance: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None,
    overlaps: Mapping[str, Overlaps] | None = None, drawn: Mapping[str, PromptSet] | None = None,
    on_prompt: Callable[[int, int, int], None] | None = None, done: Journal | None = None, shard: Shard = ALONE,
    on_wait: Callable[[], None] = lambda: None,
) -> Report:  # fmt: skip
    """Measure drafters by name, and the target alone, at every temperature.

    target: names and folders are loaded.  drafters: one or several kinds such as `ngram`, or folders of trained ones;
    or a mapping from names in the report to these, or to drafters.
    training: by drafter, as returned by `row.training_of`.  overlaps: by drafter; drafters that were not checked are
    missing.  drawn: prompts by task, if `draw` was called before.  on_prompt: as in `measure`.
    done: earlier measurements, which are not repeated.  shard: this process's share, if others measure the rest into
    the same folder; on_wait is called while waiting for them, and may raise.
    Raises DataError if all prompts of a task are left out.
    """
    config = config or Config()
    target = as_target(target)
    trainings = {name: Training.model_validate(values) for name, values in (training or {}).items()}
    drawn = {task: draw(task, config) for task in config.tasks} if drawn is None else drawn
    entries = entries_of(as_drafters(drafters, target), config, trainings)
    measurements = measure(target, entries, config, on_prompt, overlaps, drawn, done, shard, on_wait)
    sources = {
        task_name(task): TaskSource(source=prompt_set.source, revision=prompt_set.revision, prompts=prompt_set.count)
        for task, prompt_set in drawn.items()
    }
    num_left_out = len(measurements.left_out)
    return Report(
        target=target.spec.name, made=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=dict(provenance or {}),
        rows=tuple(measurements.rows), training=trainings, tasks=sources, left_out=tuple(measurements.left_out),
        share_left_out=num_left_out / (measurements.prompts + num_left_out), cut=measurements.cuts.lost,
        fingerprint=fingerprint(target, drafter_quantised=config.quantize), machine_load=measurements.load,
    )  # fmt: skip


def entries_of(
    drafters: Mapping[str, Drafter], config: Config, training: Mapping[str, Training] | None = None
) -> list[Entry]:
    """Every drafter at every temperature; all but the last at `baseline_temperatures`, if set."""
    entries = []
    for number, (name, drafter) in enumerate(drafters.items(), 1):
        has_all = number == len(drafters) or config.baseline_temperatures is None
        trained = (training or {}).get(name, Training())
        for temperature in config.temperatures if has_all else config.baseline_temperatures or ():
            entries.append(Entry(name, drafter, temperature, trained.precision, trained.accepted_by_depth(temperature)))
    return entries


def measure(
    target: TransformersTarget, entries: Sequence[Entry], config: Config,
    on_prompt: Callable[[int, int, int], None] | None = None, overlaps: Mapping[str, Overlaps] | None = None,
    drawn: Mapping[str, PromptSet] | None = None, done: Journal | None = None, shard: Shard = ALONE,
    on_wait: Callable[[], None] = lambda: None,
) -> Measurements:  # fmt: skip
    """Measure every entry on every task.

    on_prompt(measured, total, left_out), counts over all tasks, is called after each batch.  overlaps, drawn, done,
    shard, on_wait: as in `evaluate`.  Raises DataError if all prompts of a task are left out.
    """
    sets = {task: (draw(task, config) if drawn is None else drawn[task]).prompts for task in config.tasks}
    done = measure_share(target, entries, config, sets, on_prompt, done, shard, on_wait)
    measurements = Measurements()
    for task, prompts in sets.items():
        _add_rows(target, entries, task, prompts, config, done, overlaps, measurements, shard)
    return measurements


def measure_share(
    target: TransformersTarget, entries: Sequence[Entry], config: Config, sets: Mapping[str, Sequence[Prompt]],
    on_prompt: Callable[[int, int, int], None] | None = None, done: Journal | None = None, shard: Shard = ALONE,
    on_wait: Callable[[], None] = lambda: None,
) -> Journal:  # fmt: skip
    """Measure this process's share of the prompts of every task, except for what `done` has, and add it to `done`.

    Returns when all prompts are measured: if other processes leave prompts out, this one measures more.
    """
    _check(target, entries, config)
    done = Journal() if done is None else done
    report_progress = functools.partial(_report_progress, done, sets, config, on_prompt)
    if done.records:
        report_progress()
    if empty := [task for task, prompts in sets.items() if not prompts]:
        raise DataError(f"task {empty[0]} has no prompt; give it one, or leave it out of evaluate.tasks")
    tables = {task: [_measured(target, entry, task, config, shard) for entry in entries] for task in sets}
    for task, prompts in sets.items():
        _prepare_task(target, tables[task], task, prompts, config, done)
        _measure_task(target, tables[task], task, prompts, config, done, shard, report_progress)
    while left := [task for task, prompts in sets.items() if not _is_complete(done, task, prompts, config)]:
        on_wait()
        time.sleep(POLL_S)
        for task in left:
            _measure_task(target, tables[task], task, sets[task], config, done, shard, report_progress)
        report_progress()
    return done


def _prepare_task(
    target: TransformersTarget,
    table: Sequence[Measured],
    task: str,
    prompts: Sequence[Prompt],
    config: Config,
    done: Journal,
) -> None:
    """Warm up, and restore what policies and drafters had learnt before the task was interrupted."""
    records = [
        record for record in done.own_records if record.task == task_name(task) and journal.is_of(record, prompts)
    ]
    if not _is_complete(done, task, prompts, config):
        _warm_up(target, [measured.entry for measured in table], prompts[0], config)
    if lost := groups.restore(target, records, prompts, table, config):
        log.warning(
            "policy %s starts learning again: what it had learnt with %s before the interruption can't be restored",
            config.policy, ", ".join(lost),
        )  # fmt: skip


def _measure_task(
    target: TransformersTarget, table: Sequence[Measured], task: str, prompts: Sequence[Prompt], config: Config,
    done: Journal, shard: Shard, report_progress: Callable[[], None],
) -> None:  # fmt: skip
    """Measure this process's prompts of a task, as far as the current journal requires."""
    name = task_name(task)
    while True:
        done.refresh()
        group = _next_group(target, name, prompts, config, done, shard, report_progress)
        if not group:
            return
        traced = sum(bool(each.traced) for record in done.own_records if record.task == name for each in record.prompts)
        num_to_trace = max(0, -(-config.traced_prompts // shard.count) - traced)
        with contents.held():
            record = groups.measure(target, name, group, table, config, num_to_trace)
        done.append(record)
        _warn_of_load(done, record)
        report_progress()


def _warn_of_load(done: Journal, record: Record) -> None:
    """Warn about load the first time it occurs."""
    lost = [each.lost or 0.0 for each in record.contention if each.is_high]
    if lost and sum(any(each.is_high for each in earlier.contention) for earlier in done.own_records) == 1:
        log.warning(
            "other programs took %.0f %% of a run's time: short runs are repeated while that lasts, and the "
            "report marks times that can't be trusted; stop these programs for accurate times", 100 * max(lost),
        )  # fmt: skip


def _next_group(
    target: TransformersTarget, task: str, prompts: Sequence[Prompt], config: Config, done: Journal, shard: Shard,
    report_progress: Callable[[], None],
) -> list[PreparedPrompt]:  # fmt: skip
    """The next prompts to serve together, with the target's own answers; empty if no more are needed.

    A prompt is needed as long as fewer than `config.prompts` before it are measured or might still be.
    """
    group: list[PreparedPrompt] = []
    records = done.by_index(task, prompts)
    missing = [index for index, record in records.items() if record.left_out is not None]
    for index in range(shard.rank, len(prompts), shard.count):
        if index in records:
            continue
        if index - sum(other < index for other in missing) >= config.prompts:
            break
        prompt = prompts[index]
        references, seconds = answer(target, prompt, config)
        if (reason := left_out(prompt, task, references, config)) is not None:
            done.append(Record(task, [index], [digest(prompt)], reason))
            missing.append(index)
            report_progress()
            continue
        group.append(PreparedPrompt(index, prompt, references, seconds))
        if len(group) == config.batch:
            break
    return group


def _is_complete(done: Journal, task: str, prompts: Sequence[Prompt], config: Config) -> bool:
    return journal.first(done.by_index(task_name(task), prompts), config.prompts, len(prompts))[1]


def _report_progress(
    done: Journal,
    sets: Mapping[str, Sequence[Prompt]],
    config: Config,
    on_prompt: Callable[[int, int, int], None] | None,
) -> None:
    """Call on_prompt with the numbers of prompts measured, in total, and left out."""
    if on_prompt is None:
        return
    measured = missing = 0
    for task, prompts in sets.items():
        reasons = [record.left_out for record in done.by_index(task_name(task), prompts).values()]
        measured += min(config.prompts, reasons.count(None))
        missing += len(reasons) - reasons.count(None)
    on_prompt(measured, config.prompts * len(sets), missing)


def _check(target: TransformersTarget, entries: Sequence[Entry], config: Config) -> None:
    """Raises ConfigError before the first prompt if nothing could be measured."""
    if not entries:
        raise ConfigError("no drafter to measure; name at least one, such as {'ngram': load_drafter('ngram', target)}")
    if config.max_new_tokens > target.spec.context - 2:
        raise ConfigError(
            f"evaluate.max_new_tokens {config.max_new_tokens} leaves no room for a prompt in {target.spec.name}'s "
            f"context of {target.spec.context}; choose at most {target.spec.context - 2}"
        )
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    if config.thinking is not None and "enable_thinking" not in template:
        log.warning("evaluate.thinking has no effect: the chat template of %s has no enable_thinking", target.spec.name)


def _measured(target: TransformersTarget, entry: Entry, task: str, config: Config, shard: Shard) -> Measured:
    """An entry without samples.  Its policy keeps learning from prompt to prompt, like a server's."""
    judge = groups.judge_of(config)
    rule = judge.rule.name if isinstance(judge, lossy.LossyJudge) else None
    policy = named.policy(config.policy, entry.drafter, functools.partial(stored_costs, target, entry.drafter))
    return Measured(
        entry, task_name(task), rule=rule, policy=config.policy, chosen=policy,
        batch=config.batch, processes=shard.count, verification=config.verification,
    )  # fmt: skip


def _warm_up(target: TransformersTarget, entries: Sequence[Entry], prompt: Prompt, config: Config) -> None:
    """Run everything that is timed once: the first passes of a process pay for allocations and thread pools.

    A baseline that included its first passes would flatter the drafters.
    """
    new = min(16, target.spec.context - 2)
    tokens = as_tokens(target, prompt, thinking=config.thinking)[: min(64, target.spec.context - new - 1)]
    timing.generate_once(target, tokens, new)

    def batch(temperature: float) -> list[Request]:
        return [Request(tokens, new, Sampling(temperature, seed=0), tenant="warm-up")] * config.batch

    for temperature in dict.fromkeys(entry.temperature for entry in entries):
        timing.run_batch(target, batch(temperature), ends=False)
    for entry in entries:
        judge = groups.judge_of(config)
        timing.run_batch(target, batch(entry.temperature), entry.drafter, judge=judge, shared_noise=groups.SHARED_NOISE)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _add_rows(
    target: TransformersTarget, entries: Sequence[Entry], task: str, prompts: Sequence[Prompt], config: Config,
    done: Journal, overlaps: Mapping[str, Overlaps] | None, measurements: Measurements, shard: Shard,
) -> None:  # fmt: skip
    """Add the rows of a task."""
    records = done.by_index(task_name(task), prompts)
    indices, _ = journal.first(records, config.prompts, len(prompts))
    last = indices[-1] if len(indices) == config.prompts else len(prompts)
    left_out = [reason for i in range(last) if i in records and (reason := records[i].left_out) is not None]
    if not indices:
        words = {"loop": "falls into a loop", "short": "is answered with one token"}
        why = " or ".join(words[reason] for reason in sorted({prompt.reason for prompt in left_out}))
        raise DataError(
            f"task {task}: every one of {len(left_out)} prompts {why}; set evaluate.min_first_ngrams=0 to measure them "
            "anyway"
        )
    measurements.left_out += left_out
    measurements.prompts += len(indices)
    for index in indices:
        references = records[index].of(index).reference
        for turn in range(len(references)):
            fitted(target, prompts[index], references[:turn], config, measurements.cuts)
    measurements.load = groups.with_load(measurements.load, [records[index] for index in indices])
    for number, entry in enumerate(entries):
        measured = _measured(target, entry, task, config, shard)
        _fill(measured, number, indices, records, prompts, config)
        row = summarise(measured, target, None if overlaps is None else overlaps.get(entry.name))
        measurements.rows.append(row.model_copy(update=trust(measured, row.speedup or 0.0)))


def _fill(
    measured: Measured, number: int, indices: Sequence[int], records: Mapping[int, Record], prompts: Sequence[Prompt],
    config: Config,
) -> None:  # fmt: skip
    """Give an entry its samples and traces.  number: of the entry."""
    tokens = []
    for index in indices:
        record = records[index]
        prompt = record.of(index)
        plain = prompt.plain[groups.plain_key(measured.entry.temperature)]
        group = record.indices[0] if config.batch > 1 else None
        measured.samples.append(
            Sample(prompts[index], prompt.runs[number], plain, prompt.reference, prompt.generate_s, group)
        )
        if prompt.traced and len(measured.traced) < config.traced_prompts:
            trace = prompt.traced[number]
            tokens += trace.tokens
            measured.overlap += trace.overlap
            measured.traced.append(TracedPrompt(id=prompts[index].id, tokens=tuple(trace.tokens[:SHOWN])))
    if config.traced_prompts:
        measured.rejections = patterns(tokens)
