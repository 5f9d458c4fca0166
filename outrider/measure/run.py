"""Measure drafters beside plain decoding, prompt by prompt in one interleaved run, so that a noisy machine wrongs none of them.

Every prompt is continued by transformers' own `generate`, by this engine without a drafter, and by every drafter; speed-up
is plain time over drafted time on the same prompts and lengths, exactness is equality with `generate`, token for token.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import ConfigError, DataError
from outrider.measure import scoring, tasks
from outrider.measure.config import Config
from outrider.measure.fingerprint import fingerprint
from outrider.measure.rejections import judged, patterns
from outrider.measure.row import Entry, Measured, Overlaps, Run, Sample, parts, summarise
from outrider.measure.tasks import Prompt, PromptSet, task_name
from outrider.measure.timing import generate_once, run_once
from outrider.policies import lossy, named
from outrider.report.schema import LeftOut, Observed, Report, Row, TaskSource, Tested, Training
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.transformers import TransformersTarget

log = logging.getLogger(__name__)


SPARE = 4
"""Prompts drawn for each that is measured: some may fall into loops."""
SHOWN = 128
"""Tokens of each observed prompt that the report keeps in full; its patterns count all of them."""


@dataclass(slots=True)
class Outcome:
    """Rows for the report, and the prompts that were left out of them."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    kept: int = 0
    """Prompts that stayed, of all tasks."""


def evaluate(
    target: TransformersTarget, drafters: Mapping[str, Drafter], config: Config | None = None, *,
    provenance: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None,
    overlaps: Mapping[str, Overlaps] | None = None, drawn: Mapping[str, PromptSet] | None = None,
    on_prompt: Callable[[int, int, int], None] | None = None,
) -> Report:  # fmt: skip
    """Measure drafters by name beside the target alone; the last is measured at every temperature, the others at the first.

    training: by drafter, as `row.training_of` has it.  overlaps: by drafter; one that is not named was not looked at.
    drawn: prompts by task, where `draw` was asked before.
    Raises DataError where a task has no prompt that stays.
    """
    config = config or Config()
    first, *hotter = config.temperatures
    known = {name: Training.model_validate(own) for name, own in (training or {}).items()}
    entries = []
    for name, drafter in drafters.items():
        own = known.get(name, Training())
        entries.append(Entry(name, drafter, first, own.precision, own.acceptance))
    if entries:
        entries += [replace(entries[-1], temperature=temperature) for temperature in hotter]
    drawn = {task: draw(task, config) for task in config.tasks} if drawn is None else drawn
    outcome = measure(target, entries, config, on_prompt, overlaps, drawn)
    sources = {
        task_name(task): TaskSource(source=own.source, revision=own.revision, prompts=own.count) for task, own in drawn.items()
    }
    return Report(
        target=target.spec.name, made=datetime.now(UTC).isoformat(timespec="seconds"), provenance=dict(provenance or {}),
        rows=tuple(outcome.rows), training=known, tasks=sources,
        left_out=tuple(outcome.left_out),
        share_left_out=len(outcome.left_out) / (outcome.kept + len(outcome.left_out)),
        fingerprint=fingerprint(target, drafter_quantised=config.quantize),
    )  # fmt: skip


def measure(
    target: TransformersTarget, entries: Sequence[Entry], config: Config,
    on_prompt: Callable[[int, int, int], None] | None = None, overlaps: Mapping[str, Overlaps] | None = None,
    drawn: Mapping[str, PromptSet] | None = None,
) -> Outcome:  # fmt: skip
    """Measure every entry on every task.  on_prompt(kept, wanted, left out), over all tasks, is called after each prompt.

    overlaps, drawn: as in `evaluate`.  Raises DataError where a task has no prompt that stays.
    """
    _refuse(target, entries, config)
    found = Outcome()
    wanted = config.prompts * len(config.tasks)
    for task in config.tasks:
        table, before = [_measured(entry, task, config) for entry in entries], len(found.left_out)
        prompts = (draw(task, config) if drawn is None else drawn[task]).prompts
        if not prompts:
            raise DataError(f"task {task} has no prompt; give it one, or leave it out of evaluate.tasks")
        _warm_up(target, entries, prompts[0], config)
        for prompt in prompts:
            if len(table[0].samples) == config.prompts:
                break
            left_out = _one_prompt(target, table, prompt, config)
            if left_out is None:
                found.kept += 1
            else:
                found.left_out.append(left_out)
            if on_prompt is not None:
                on_prompt(found.kept, wanted, len(found.left_out))
        if not table[0].samples:
            lost = found.left_out[before:]
            reasons = sorted({left_out.reason for left_out in lost})
            why = " or ".join({"loop": "falls into a loop", "short": "is answered with one token"}[r] for r in reasons)
            raise DataError(
                f"task {task}: every one of {len(lost)} prompts {why}; set evaluate.min_first_ngrams=0 to measure them anyway"
            )
        for measured in table:
            _observe(target, measured, config)
            _score(target, measured, config)
            found.rows.append(summarise(measured, target, None if overlaps is None else overlaps.get(measured.entry.name)))
    return found


def _refuse(target: TransformersTarget, entries: Sequence[Entry], config: Config) -> None:
    """What can't be measured, before the first prompt."""
    if not entries:
        raise ConfigError("no drafter to measure; name at least one, such as {'ngram': load_drafter('ngram', target)}")
    if config.max_new_tokens > target.spec.context - 2:
        raise ConfigError(
            f"evaluate.max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the context of "
            f"{target.spec.context} of {target.spec.name}; choose at most {target.spec.context - 2}"
        )
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    if config.thinking is not None and "enable_thinking" not in template:
        log.warning("evaluate.thinking has no effect: the chat template of %s knows no enable_thinking", target.spec.name)


def draw(task: str, config: Config) -> PromptSet:
    """The prompts of a task from which those measured are taken, in order.

    Raises DataError as `tasks.load` does, and where code is to be scored by tests that can't be read.
    """
    most, name = config.prompts * SPARE, task_name(task)
    if task == "stdlib":
        return PromptSet(list(tasks.prompts(task, most, config.seed)), "the standard library of this Python", None, None)
    loaded = tasks.load(task, config.data, config.revisions.get(task))
    # a file's prompts are taken in their order, a data set's by the seed
    prompts = list(loaded.some(most, config.seed) if task in tasks.TASKS else loaded.prompts[:most])
    if config.score and config.allow_code_execution and name in tasks.TASKS and tasks.TASKS[name].score == "tests":
        for prompt in prompts:  # an answer is scored only hours later
            if prompt.reference is not None:
                scoring.program(name, prompt, "")
    return replace(loaded, prompts=prompts)


SHARED_NOISE = False
"""Here a seed fixes the noise and no more, so sampled runs can be repeated and are drawn as requests without a seed are; drafts
that share the target's noise, for the text's sake, are kept less often."""


def _judge(config: Config) -> SamplingJudge:
    """A fresh one, of the way to verify that is asked for."""
    return named.judge(config.verification, config.allow_lossy)


def _measured(entry: Entry, task: str, config: Config) -> Measured:
    """An entry that no prompt was run of; its policy goes on learning from prompt to prompt, as a server's does."""
    judge = _judge(config)
    rule = judge.rule.name if isinstance(judge, lossy.LossyJudge) else None
    policy = named.policy(config.policy, entry.drafter)
    return Measured(entry, task_name(task), rule=rule, policy=config.policy, chosen=policy, verification=config.verification)


def _asked(measured: Measured, config: Config) -> dict[str, Any]:
    """How a run of an entry goes, timed or observed."""
    return {"ends": measured.entry.temperature == 0, "judge": _judge(config), "shared_noise": SHARED_NOISE}


def _warm_up(target: TransformersTarget, entries: Sequence[Entry], prompt: Prompt, config: Config) -> None:
    """The first passes of a process pay for allocations and thread pools; they are nobody's measurement.

    Everybody who is timed runs: a baseline that pays for its own first passes would flatter the drafters.
    """
    new = min(16, target.spec.context - 2)
    tokens = as_tokens(target, prompt, thinking=config.thinking)[: min(64, target.spec.context - new - 1)]
    generate_once(target, tokens, new)
    for temperature in dict.fromkeys(entry.temperature for entry in entries):
        run_once(target, Request(tokens, new, Sampling(temperature, seed=0)), ends=False)
    for entry in entries:
        request = Request(tokens, new, Sampling(entry.temperature, seed=0))
        run_once(target, request, entry.drafter, judge=_judge(config), shared_noise=SHARED_NOISE)


def _one_prompt(target: TransformersTarget, table: Sequence[Measured], prompt: Prompt, config: Config) -> LeftOut | None:
    """Continue one prompt every way, turn after turn, and note the runs; or return why it is left out: it loops, or has a turn
    of one token.

    Between turns stand the target's own greedy answers, for everybody: prompts and lengths are the same for all.
    """
    number = len(table[0].samples)
    asked, references, generate_s = _conversation(target, prompt, config)
    share = min(map(fresh_share, references))
    if config.min_first_ngrams and (share < config.min_first_ngrams or min(map(len, references)) < 2):
        reason = "loop" if share < config.min_first_ngrams else "short"
        return LeftOut(id=prompt.id, task=table[0].task, fresh_share=round(share, 3), reason=reason)

    def requests(temperature: float) -> list[Request]:
        seed = config.seed + number
        return [
            Request(tokens, config.max_new_tokens if temperature == 0 else len(reference), Sampling(temperature, seed=seed))
            for tokens, reference in zip(asked, references, strict=True)
        ]

    # who goes first changes from prompt to prompt
    plains: dict[float, Run] = {}
    for measured in (*table[number % len(table) :], *table[: number % len(table)]):
        entry = measured.entry
        temperature = entry.temperature
        if temperature not in plains:
            alone = [run_once(target, request, ends=temperature == 0) for request in requests(temperature)]
            plains[temperature] = functools.reduce(Run.joined, alone)
        own = requests(temperature)
        runs = [run_once(target, request, entry.drafter, measured.chosen, **_asked(measured, config)) for request in own]
        measured.samples.append(
            Sample(prompt, functools.reduce(Run.joined, runs), plains[temperature], references, generate_s, own)
        )
    return None


def _conversation(target: TransformersTarget, prompt: Prompt, config: Config) -> tuple[list[list[int]], list[list[int]], float]:
    """What is asked in every turn, as tokens; what transformers' generate answers; and its seconds in all."""
    asked: list[list[int]] = []
    references: list[list[int]] = []
    answers: list[str] = []
    seconds = 0.0
    for _ in prompt.turns:
        tokens = as_tokens(target, prompt, answers, config.thinking)
        asked.append(tokens[-(target.spec.context - config.max_new_tokens - 1) :])
        reference, own_s = generate_once(target, asked[-1], config.max_new_tokens)
        references.append(reference)
        answers.append(target.decode(reference))
        seconds += own_s
    return asked, references, seconds


def _observe(target: TransformersTarget, measured: Measured, config: Config) -> None:
    """Run the first prompts once more, untimed, and note where drafts were turned down."""
    tested: list[Tested] = []
    for sample in measured.samples[: config.traced_prompts]:
        places: list[Tested] = []
        for request in sample.requests:
            found = judged(target, request, measured.entry.drafter, measured.chosen, **_asked(measured, config))
            places += found.tested
            measured.overlap += found.overlap
        tested += places
        measured.observed.append(Observed(id=sample.prompt.id, tokens=tuple(places[:SHOWN])))
    if config.traced_prompts:
        measured.rejections = patterns(tested)


def _score(target: TransformersTarget, measured: Measured, config: Config) -> None:
    """Compare answers with references, where that was asked for."""
    task = measured.task
    kind = tasks.TASKS[task].score if task in tasks.TASKS else None
    if not config.score or kind is None:
        return
    measured.score_measure = {"answer": "exact match of the final answer", "tests": "passes its tests"}[kind]
    # the target's own answers stand beside every drafter: those are scored once for each temperature's texts
    known: dict[tuple[int, ...], float | None] = {}

    def value(prompt: Prompt, run: Run) -> float | None:
        key = (id(prompt), *run.turns, *run.tokens)
        if key not in known:
            try:
                known[key] = scoring.score(task, prompt, answers_of(target, run), allow_code=config.allow_code_execution)
            except DataError as error:  # such as a file that changed meanwhile; hours of measuring are not thrown away for it
                log.warning("%s; the prompt has no score", error)
                known[key] = None
        return known[key]

    for sample in measured.samples:
        sample.scores = value(sample.prompt, sample.run), value(sample.prompt, sample.plain)


def answers_of(target: TransformersTarget, run: Run) -> list[str]:
    """The text of every turn, up to its first end: sampled runs go on past it, for equal lengths."""
    answers = []
    for tokens in parts(run.tokens, run.turns):
        end = next((i for i, token in enumerate(tokens) if token in target.ends), len(tokens))
        answers.append(target.decode(tokens[:end]))
    return answers


def as_tokens(
    target: TransformersTarget, prompt: Prompt, answers: Sequence[str] = (), thinking: bool | None = None
) -> list[int]:
    """A task's prompt up to the answer wanted, as the target reads it: through the chat template where there is one."""
    messages = prompt.messages(answers)
    if getattr(target.tokenizer, "chat_template", None) is None:
        return target.encode("".join(message["content"] for message in messages))
    return target.encode(messages, thinking)


def fresh_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of n-grams that stand in a text for the first time: 1 is no repetition, near 0 is a loop."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
