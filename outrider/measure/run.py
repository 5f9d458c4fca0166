"""Measure drafters and plain decoding, prompt by prompt in one interleaved run, so that noise falls on all alike.

Every prompt is continued by transformers' own `generate`, by this engine without a drafter, and by every drafter.
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
from outrider.generation import DrafterLike, as_drafters, as_target, kept_costs
from outrider.kernels import contents
from outrider.measure import groups, journal, timing
from outrider.measure.config import Config
from outrider.measure.fingerprint import fingerprint
from outrider.measure.groups import Asked
from outrider.measure.journal import Journal, Record, Shard
from outrider.measure.record import Entry, Measured, Overlaps, Run, Sample
from outrider.measure.rejections import patterns
from outrider.measure.row import parts, summarise
from outrider.measure.tasks import names, scoring
from outrider.measure.tasks.names import Prompt, PromptSet, task_name
from outrider.measure.tasks.prompts import answer, as_tokens, asked, digest, draw, left_out
from outrider.measure.trust import trust
from outrider.policies import lossy, named
from outrider.report.parts import LeftOut, Load, TaskSource, TracedPrompt, Training
from outrider.report.schema import Report, Row
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts

log = logging.getLogger(__name__)

SHOWN = 128
"""Tokens of each traced prompt that the report has in full; its patterns count all of them."""
LOOK_S = 0.2
"""Seconds between two looks at what other processes have measured."""
ALONE = Shard()


@dataclass(slots=True)
class Outcome:
    """Rows for the report, and the prompts that were left out of them."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    prompts: int = 0
    """That were measured, of all tasks."""
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

    target: a name or a folder is loaded.  drafters: one or several kinds such as `ngram` or folders of trained ones; or
    a mapping from names for the report to these, or to drafters.
    training: by drafter, as `row.training_of` has it.  overlaps: by drafter; a drafter that is missing was not checked.
    drawn: prompts by task, where `draw` was called before.  on_prompt: as in `measure`.
    done: what was measured before, which is not measured again.  shard: the part of this process, where others measure
    the rest into the same folder; on_wait is called while they do, and may raise.
    Raises DataError where all prompts of a task are left out.
    """
    config, target = config or Config(), as_target(target)
    known = {name: Training.model_validate(own) for name, own in (training or {}).items()}
    drawn = {task: draw(task, config) for task in config.tasks} if drawn is None else drawn
    entries = entries_of(as_drafters(drafters, target), config, known)
    outcome = measure(target, entries, config, on_prompt, overlaps, drawn, done, shard, on_wait)
    sources = {
        task_name(task): TaskSource(source=own.source, revision=own.revision, prompts=own.count)
        for task, own in drawn.items()
    }
    return Report(
        target=target.spec.name, made=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=dict(provenance or {}),
        rows=tuple(outcome.rows), training=known, tasks=sources, left_out=tuple(outcome.left_out),
        share_left_out=len(outcome.left_out) / (outcome.prompts + len(outcome.left_out)), cut=outcome.cuts.lost,
        fingerprint=fingerprint(target, drafter_quantised=config.quantize), machine_load=outcome.load,
    )  # fmt: skip


def entries_of(
    drafters: Mapping[str, Drafter], config: Config, training: Mapping[str, Training] | None = None
) -> list[Entry]:
    """What is measured: every drafter at every temperature, all but the last at `baseline_temperatures` where these are
    set."""
    entries = []
    for number, (name, drafter) in enumerate(drafters.items(), 1):
        is_own = number == len(drafters) or config.baseline_temperatures is None
        own = (training or {}).get(name, Training())
        for temperature in config.temperatures if is_own else config.baseline_temperatures or ():
            entries.append(Entry(name, drafter, temperature, own.precision, own.accepted_by_depth(temperature)))
    return entries


def measure(
    target: TransformersTarget, entries: Sequence[Entry], config: Config,
    on_prompt: Callable[[int, int, int], None] | None = None, overlaps: Mapping[str, Overlaps] | None = None,
    drawn: Mapping[str, PromptSet] | None = None, done: Journal | None = None, shard: Shard = ALONE,
    on_wait: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Measure every entry on every task.  on_prompt(measured, wanted, left out), over all tasks, is called after each
    batch.

    overlaps, drawn, done, shard, on_wait: as in `evaluate`.  Raises DataError where all prompts of a task are left out.
    """
    sets = {task: (draw(task, config) if drawn is None else drawn[task]).prompts for task in config.tasks}
    done = measure_share(target, entries, config, sets, on_prompt, done, shard, on_wait)
    found = Outcome()
    for task, prompts in sets.items():
        _summarise(target, entries, task, prompts, config, done, overlaps, found, shard)
    return found


def measure_share(
    target: TransformersTarget, entries: Sequence[Entry], config: Config, sets: Mapping[str, Sequence[Prompt]],
    on_prompt: Callable[[int, int, int], None] | None = None, done: Journal | None = None, shard: Shard = ALONE,
    on_wait: Callable[[], None] = lambda: None,
) -> Journal:  # fmt: skip
    """Measure this process's part of the prompts of every task, as far as it is not in `done`, and add it to `done`.

    Returns when all prompts were measured: other processes may leave out prompts, and this one then measures more.
    """
    _refuse(target, entries, config)
    done = Journal() if done is None else done
    _tell(done, sets, config, on_prompt if done.records else None)
    if empty := [task for task, prompts in sets.items() if not prompts]:
        raise DataError(f"task {empty[0]} has no prompt; give it one, or leave it out of evaluate.tasks")
    tables = {task: [_measured(target, entry, task, config, shard) for entry in entries] for task in sets}
    for task, prompts in sets.items():
        _prepare_task(target, tables[task], task, prompts, config, done)
        _measure_task(
            target, tables[task], task, prompts, config, done, shard, lambda: _tell(done, sets, config, on_prompt)
        )
    while left := [task for task, prompts in sets.items() if not _is_complete(done, task, prompts, config)]:
        on_wait()
        time.sleep(LOOK_S)
        for task in left:
            _measure_task(
                target,
                tables[task],
                task,
                sets[task],
                config,
                done,
                shard,
                lambda: _tell(done, sets, config, on_prompt),
            )
        _tell(done, sets, config, on_prompt)
    return done


def _prepare_task(
    target: TransformersTarget,
    table: Sequence[Measured],
    task: str,
    prompts: Sequence[Prompt],
    config: Config,
    done: Journal,
) -> None:
    """Warm up, and let policies and drafters know what they knew when the task was stopped."""
    own = [record for record in done.own if record.task == task_name(task) and journal.is_of(record, prompts)]
    if not _is_complete(done, task, prompts, config):
        _warm_up(target, [measured.entry for measured in table], prompts[0], config)
    if lost := groups.restore(target, own, prompts, table, config):
        log.warning(
            "policy %s learns again from here on: what it had learnt of %s before the stop can't be restored",
            config.policy, ", ".join(lost),
        )  # fmt: skip


def _measure_task(
    target: TransformersTarget, table: Sequence[Measured], task: str, prompts: Sequence[Prompt], config: Config,
    done: Journal, shard: Shard, tell: Callable[[], None],
) -> None:  # fmt: skip
    """Measure this process's prompts of a task, as far as they are needed by what is known now."""
    name = task_name(task)
    while True:
        done.refresh()
        group = _next_group(target, name, prompts, config, done, shard, tell)
        if not group:
            return
        traced = sum(bool(each.traced) for record in done.own if record.task == name for each in record.prompts)
        room = max(0, -(-config.traced_prompts // shard.count) - traced)
        with contents.held():
            record = groups.measure(target, name, group, table, config, room)
        done.append(record)
        _warn_of_load(done, record)
        tell()


def _warn_of_load(done: Journal, record: Record) -> None:
    """Report load when it is first found."""
    lost = [each.lost or 0.0 for each in record.contention if each.is_high]
    if lost and sum(any(each.is_high for each in own.contention) for own in done.own) == 1:
        log.warning(
            "other programs took %.0f %% of a run's time: short runs are measured again while that lasts, and the "
            "report "
            "marks what is not to be trusted; end them for true times", 100 * max(lost),
        )  # fmt: skip


def _next_group(
    target: TransformersTarget, task: str, prompts: Sequence[Prompt], config: Config, done: Journal, shard: Shard,
    tell: Callable[[], None],
) -> list[Asked]:  # fmt: skip
    """The next prompts to serve together, with the target's own answers; none where no more are needed.

    A prompt is needed while fewer than `config.prompts` before it are measured or may still be.
    """
    group: list[Asked] = []
    known = done.known(task, prompts)
    missing = [index for index, record in known.items() if record.left_out is not None]
    for index in range(shard.rank, len(prompts), shard.count):
        if index in known:
            continue
        if index - sum(other < index for other in missing) >= config.prompts:
            break
        prompt = prompts[index]
        references, seconds = answer(target, prompt, config)
        if (reason := left_out(prompt, task, references, config)) is not None:
            done.append(Record(task, [index], [digest(prompt)], reason))
            missing.append(index)
            tell()
            continue
        group.append(Asked(index, prompt, references, seconds))
        if len(group) == config.batch:
            break
    return group


def _is_complete(done: Journal, task: str, prompts: Sequence[Prompt], config: Config) -> bool:
    return journal.first(done.known(task_name(task), prompts), config.prompts, len(prompts))[1]


def _tell(
    done: Journal,
    sets: Mapping[str, Sequence[Prompt]],
    config: Config,
    on_prompt: Callable[[int, int, int], None] | None,
) -> None:
    """Report how many prompts were measured, of how many, and how many were left out."""
    if on_prompt is None:
        return
    measured = missing = 0
    for task, prompts in sets.items():
        reasons = [record.left_out for record in done.known(task_name(task), prompts).values()]
        measured += min(config.prompts, reasons.count(None))
        missing += len(reasons) - reasons.count(None)
    on_prompt(measured, config.prompts * len(sets), missing)


def _refuse(target: TransformersTarget, entries: Sequence[Entry], config: Config) -> None:
    """Raises ConfigError for what can't be measured, before the first prompt."""
    if not entries:
        raise ConfigError("no drafter to measure; name at least one, such as {'ngram': load_drafter('ngram', target)}")
    if config.max_new_tokens > target.spec.context - 2:
        raise ConfigError(
            f"evaluate.max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the context of "
            f"{target.spec.context} of {target.spec.name}; choose at most {target.spec.context - 2}"
        )
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    if config.thinking is not None and "enable_thinking" not in template:
        log.warning("evaluate.thinking has no effect: the chat template of %s has no enable_thinking", target.spec.name)


def _measured(target: TransformersTarget, entry: Entry, task: str, config: Config, shard: Shard) -> Measured:
    """An entry without samples.  Its policy goes on learning from prompt to prompt, as a server's does."""
    judge = groups.judge_of(config)
    rule = judge.rule.name if isinstance(judge, lossy.LossyJudge) else None
    policy = named.policy(config.policy, entry.drafter, functools.partial(kept_costs, target, entry.drafter))
    return Measured(
        entry, task_name(task), rule=rule, policy=config.policy, chosen=policy,
        batch=config.batch, processes=shard.count, verification=config.verification,
    )  # fmt: skip


def _warm_up(target: TransformersTarget, entries: Sequence[Entry], prompt: Prompt, config: Config) -> None:
    """Run everything that is timed once: the first passes of a process pay for allocations and thread pools.

    A baseline that paid for its own first passes would flatter the drafters.
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


def _summarise(
    target: TransformersTarget, entries: Sequence[Entry], task: str, prompts: Sequence[Prompt], config: Config,
    done: Journal, overlaps: Mapping[str, Overlaps] | None, found: Outcome, shard: Shard,
) -> None:  # fmt: skip
    """Add the rows of a task to what was found."""
    known = done.known(task_name(task), prompts)
    measured, _ = journal.first(known, config.prompts, len(prompts))
    last = measured[-1] if len(measured) == config.prompts else len(prompts)
    lost = [reason for index in range(last) if index in known and (reason := known[index].left_out) is not None]
    if not measured:
        words = {"loop": "falls into a loop", "short": "is answered with one token"}
        why = " or ".join(words[reason] for reason in sorted({out.reason for out in lost}))
        raise DataError(
            f"task {task}: every one of {len(lost)} prompts {why}; set evaluate.min_first_ngrams=0 to measure them "
            f"anyway"
        )
    found.left_out += lost
    found.prompts += len(measured)
    for index in measured:
        references = known[index].of(index).reference
        for turn in range(len(references)):
            asked(target, prompts[index], references[:turn], config, found.cuts)
    found.load = groups.with_load(found.load, [known[index] for index in measured])
    for number, entry in enumerate(entries):
        own = _measured(target, entry, task, config, shard)
        _fill(own, number, measured, known, prompts, config)
        _score(target, own, config)
        row = summarise(own, target, None if overlaps is None else overlaps.get(entry.name))
        found.rows.append(row.model_copy(update=trust(own, row.speedup or 0.0)))


def _fill(
    own: Measured, number: int, measured: Sequence[int], known: Mapping[int, Record], prompts: Sequence[Prompt],
    config: Config,
) -> None:  # fmt: skip
    """Give an entry its samples and traces.  number: of the entry."""
    tokens = []
    for index in measured:
        record = known[index]
        result = record.prompts[record.indices.index(index)]
        plain = result.plain[groups.plain_key(own.entry.temperature)]
        group = record.indices[0] if config.batch > 1 else None
        own.samples.append(
            Sample(prompts[index], result.runs[number], plain, result.reference, result.generate_s, group)
        )
        if result.traced and len(own.traced) < config.traced_prompts:
            trace = result.traced[number]
            tokens += trace.tokens
            own.overlap += trace.overlap
            own.traced.append(TracedPrompt(id=prompts[index].id, tokens=tuple(trace.tokens[:SHOWN])))
    if config.traced_prompts:
        own.rejections = patterns(tokens)


def _score(target: TransformersTarget, measured: Measured, config: Config) -> None:
    """Compare answers with references, where the config asks for scores."""
    task = measured.task
    kind = names.TASKS[task].score if task in names.TASKS else None
    if not config.score or kind is None:
        return
    measured.score_measure = {"answer": "exact match of the final answer", "tests": "passes its tests"}[kind]
    # every drafter is compared with the target's own answers: those of each temperature are scored once
    known: dict[tuple[int, ...], float | None] = {}

    def value(prompt: Prompt, run: Run) -> float | None:
        key = (id(prompt), *run.turns, *run.tokens)
        if key not in known:
            try:
                known[key] = scoring.score(
                    task, prompt, answers_of(target, run), allow_code=config.allow_code_execution
                )
            except DataError as error:  # such as a file that has changed; hours of measuring are not lost for it
                log.warning("%s; the prompt has no score", error)
                known[key] = None
        return known[key]

    for sample in measured.samples:
        sample.scores = value(sample.prompt, sample.run), value(sample.prompt, sample.plain)


def answers_of(target: TransformersTarget, run: Run) -> list[str]:
    """The text of every turn, up to its first end: sampled runs go on after it, for equal lengths."""
    answers = []
    for tokens in parts(run.tokens, run.turns):
        end = next((i for i, token in enumerate(tokens) if token in target.ends), len(tokens))
        answers.append(target.decode(tokens[:end]))
    return answers
