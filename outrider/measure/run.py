"""Measure drafters beside plain decoding, prompt by prompt in one interleaved run, so that a noisy machine wrongs none of them.

Every prompt is continued by transformers' own `generate`, by this engine without a drafter, and by every drafter; speed-up
is plain time over drafted time on the same prompts and lengths, exactness is equality with `generate`, token for token.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator
from torch import nn

from outrider.config import Config as Base
from outrider.config import nearest
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.state import Request, Scores
from outrider.errors import ConfigError, DataError
from outrider.generation import batch, serve
from outrider.measure import memory, tasks
from outrider.measure.fingerprint import fingerprint
from outrider.measure.rejections import Listening, judged, patterns
from outrider.measure.row import Entry, Measured, Overlaps, Run, parts, summarise
from outrider.measure.row import first_difference as first_difference
from outrider.measure.row import training_of as training_of
from outrider.measure.tasks import Prompt, check, task_name
from outrider.policies import lossy, named
from outrider.report.schema import Report, TaskSource
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.transformers import TransformersTarget

log = logging.getLogger(__name__)


class Config(Base):
    """What is measured."""

    tasks: tuple[str, ...] = Field(("stdlib",), min_length=1)
    """`stdlib`, or files of prompts."""
    prompts: PositiveInt = 24
    """Prompts measured per task; more are tried where some fall into loops."""
    max_new_tokens: PositiveInt = 96
    temperatures: tuple[NonNegativeFloat, ...] = Field((0.0, 1.0), min_length=1)
    """The drafter of this run is measured at each, those beside it at the first."""
    beside: tuple[str | dict[str, Any], ...] = ()
    """Other drafters in the same run: kinds, kinds with their settings, or checkpoint folders."""
    thinking: bool | None = None
    """Handed to the chat template as `enable_thinking`; unless given, the template does as it always does."""
    data: str | None = None
    """Folder with files of tasks, taken instead of the hub's: gsm8k.jsonl and so on."""
    revisions: dict[str, str] = Field(default={})
    """Pins, by task as `tasks` names it: a commit of its data set, the newest unless given, or `sha256:...` of a file."""
    observed: NonNegativeInt = 4
    """Prompts of each task that are run once more, untimed, to note what was kept where and why; 0 notes nothing."""
    score: bool = False
    """Compare answers with the references of tasks that have some, those of the target alone too."""
    allow_code_execution: bool = False
    """Score tasks of code by running the answers, in a sandbox; without it they have no score."""
    fresh: NonNegativeFloat = 0.6
    """A prompt whose plain text has a smaller share of first-time 8-grams loops: it is listed and left out, and so is one whose
    answer is one token.  0 keeps all."""
    seed: int = 0
    quantize: Literal["int8"] | None = None
    """Round the linear layers of this run's own draft model, whatever the target's are; needs torchao."""
    policy: Literal["fixed", "by_confidence", "adaptive"] = "fixed"
    """How much is drafted: all that the drafter offers, what is likely to be kept, or as much as pays by measured seconds."""
    verification: str = "standard"
    """`standard`, or `block`, which keeps more of a sampled chain; both are exact.  `typical` and `relaxed` keep likely tokens
    that the acceptance rule would not, and every row says so."""
    allow_lossy: bool = Field(default=False, validate_default=True)
    """A lossy verification is refused without it."""

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        known: dict[str, str] = {}
        for task in map(check, tasks):
            name = task_name(task)
            if name in known:
                both = f"{task} stands there twice" if known[name] == task else f"{known[name]} and {task} are both {name!r}"
                raise ConfigError(f"{both} in the report, and their rows would run together; leave one out, or rename its file")
            known[name] = task
        return tasks

    @field_validator("temperatures")
    @classmethod
    def _different_temperatures(cls, temperatures: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(temperatures)) < len(temperatures):
            raise ConfigError(f"{list(temperatures)} names a temperature twice, and its rows would run together; leave one out")
        return temperatures

    @field_validator("revisions")
    @classmethod
    def _known_pins(cls, revisions: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        measured = info.data.get("tasks", ())
        for task, revision in revisions.items():
            if task == "stdlib":
                raise ConfigError("stdlib is the library of the Python that runs, and can't be pinned; leave it out")
            if task not in measured and task not in tasks.TASKS:
                raise ConfigError(f"{task!r} is no task{nearest(task, [*tasks.TASKS, *measured])}")
            if task.endswith(tasks.FILES) and not revision.startswith(tasks.CONTENT):
                raise ConfigError(f"{task} is a file and has no commit {revision!r}; pin its content, {tasks.CONTENT}...")
            if measured and task not in measured:
                log.warning("evaluate.revisions: %s has no effect, since evaluate.tasks does not name it", task)
        return revisions

    @field_validator("verification")
    @classmethod
    def _known_verification(cls, verification: str) -> str:
        named.check_verification(verification, allow_lossy=True)
        return verification

    @field_validator("allow_lossy")
    @classmethod
    def _allowed_verification(cls, allow_lossy: bool, info: ValidationInfo) -> bool:
        named.judge(info.data.get("verification"), allow_lossy)
        return allow_lossy

    @model_validator(mode="after")
    def _says_what_is_idle(self) -> Config:
        if self.allow_code_execution and not self.score:
            log.warning("evaluate.allow_code_execution has no effect without evaluate.score: no answer is run")
        return self


SPARE = 4
"""Prompts drawn for each that is measured: some may fall into loops."""
SHOWN = 128
"""Tokens of each observed prompt that the report keeps in full; its patterns count all of them."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Prompts of a task, and where they are from."""

    prompts: list[Prompt]
    source: str
    revision: str | None
    count: int | None
    """Of the whole set."""


@dataclass(slots=True)
class Outcome:
    """Rows for the report, and the prompts that were left out of them."""

    rows: list[dict[str, Any]]
    left_out: list[dict[str, Any]]
    tried: int


def evaluate(
    target: TransformersTarget, drafters: Mapping[str, Drafter], config: Config | None = None, *,
    provenance: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None,
    overlaps: Mapping[str, Overlaps] | None = None, drawn: Mapping[str, Drawn] | None = None,
    on_prompt: Callable[[int, int, int], None] | None = None,
) -> Report:  # fmt: skip
    """Measure drafters by name beside the target alone; the last is measured at every temperature, the others at the first.

    overlaps: by drafter; one that is not named was not looked at.  drawn: prompts by task, where `draw` was asked before.
    Raises DataError where a task has no prompt that stays.
    """
    config = config or Config()
    first, *hotter = config.temperatures
    facts = training or {}
    entries = [
        Entry(
            name, drafter, first, trained_on=facts.get(name, {}).get("precision"),
            acceptance=tuple(facts.get(name, {}).get("acceptance") or ()),
        )
        for name, drafter in drafters.items()
    ]  # fmt: skip
    if entries:
        entries += [replace(entries[-1], temperature=heat) for heat in hotter]
    drawn = {task: draw(task, config) for task in config.tasks} if drawn is None else drawn
    outcome = measure(target, entries, config, on_prompt, overlaps, drawn)
    return Report(
        target=target.spec.name,
        provenance=dict(provenance or {}),
        rows=outcome.rows,
        left_out=outcome.left_out,
        share_left_out=len(outcome.left_out) / outcome.tried,
        training=dict(facts),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint(target, drafter_quantised=config.quantize),
        tasks={
            task_name(task): TaskSource(source=own.source, revision=own.revision, prompts=own.count)
            for task, own in drawn.items()
        },
    )


def measure(
    target: TransformersTarget,
    entries: Sequence[Entry],
    config: Config,
    on_prompt: Callable[[int, int, int], None] | None = None,
    overlaps: Mapping[str, Overlaps] | None = None,
    drawn: Mapping[str, Drawn] | None = None,
) -> Outcome:
    """Measure every entry on every task.  on_prompt(kept, wanted, left out), over all tasks, is called after each prompt.

    overlaps, drawn: as in `evaluate`.  Raises DataError where a task has no prompt that stays.
    """
    _refuse(target, entries, config)
    found = Outcome([], [], 0)
    wanted = config.prompts * len(config.tasks)
    done = lost = 0
    for task in config.tasks:
        judge = _judge(config)
        rule = judge.rule.name if isinstance(judge, lossy.LossyJudge) else None
        asked: Any = {"rule": rule, "policy": config.policy, "verification": config.verification}
        table = [Measured(entry, task_name(task), chosen=_policy(entry, config), **asked) for entry in entries]
        kept = tried = 0
        for prompt in (draw(task, config) if drawn is None else drawn[task]).prompts:
            if kept == config.prompts:
                break
            if not tried:
                _warm_up(target, entries, prompt, config)
            tried += 1
            left_out = _one_prompt(target, table, prompt, config, kept)
            if left_out is None:
                kept += 1
            else:
                found.left_out.append({"id": prompt.id, "task": task_name(task)} | left_out)
            if on_prompt is not None:
                on_prompt(done + kept, wanted, lost + tried - kept)
        if not tried:
            raise DataError(f"task {task} has no prompt; give it one, or leave it out of evaluate.tasks")
        if not kept:
            reasons = {left_out["reason"] for left_out in found.left_out[-tried:]}
            why = " or ".join({"loop": "falls into a loop", "short": "is answered with one token"}[r] for r in sorted(reasons))
            raise DataError(f"task {task}: every one of {tried} prompts {why}; set evaluate.fresh=0 to measure them anyway")
        done, lost, found.tried = done + kept, lost + tried - kept, found.tried + tried
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


def draw(task: str, config: Config) -> Drawn:
    """The prompts of a task from which those measured are taken, in order.

    Raises DataError as `tasks.load` does, and where code is to be scored by tests that can't be read.
    """
    most = config.prompts * SPARE
    if task == "stdlib":
        return Drawn(list(tasks.prompts(task, most, config.seed)), "the standard library of this Python", None, None)
    loaded = tasks.load(task, config.data, config.revisions.get(task))
    # a file's prompts are taken in their order, a data set's by the seed
    chosen = loaded.some(most, config.seed) if task in tasks.TASKS else loaded.prompts[:most]
    drawn = list(chosen)
    _refuse_tests(task, drawn, config)
    return Drawn(drawn, loaded.source, loaded.revision, loaded.count)


def _refuse_tests(task: str, prompts: Sequence[Prompt], config: Config) -> None:
    """Tests that can't be read, before anything is measured: an answer is scored only hours later."""
    name = task_name(task)
    if not config.score or not config.allow_code_execution or name not in tasks.TASKS or tasks.TASKS[name].score != "tests":
        return
    from outrider.measure import scoring

    for prompt in prompts:
        if prompt.reference is not None:
            scoring.program(name, prompt, "")


SHARED_NOISE = False
"""Here a seed fixes the noise and no more, so sampled runs can be repeated and are drawn as requests without a seed are; drafts
that share the target's noise, for the text's sake, are kept less often."""


def _judge(config: Config) -> SamplingJudge:
    """A fresh one, of the way to verify that is asked for."""
    return named.judge(config.verification, config.allow_lossy)


def _policy(entry: Entry, config: Config) -> Policy:
    """A fresh one, which goes on learning from prompt to prompt, as a server's does."""
    return named.policy(config.policy, entry.drafter) if entry.policy is None else entry.policy()


def _warm_up(target: TransformersTarget, entries: Sequence[Entry], prompt: Prompt, config: Config) -> None:
    """The first passes of a process pay for allocations and thread pools; they are nobody's measurement.

    Everybody who is timed runs: a baseline that pays for its own first passes would flatter the drafters.
    """
    new = min(16, target.spec.context - 2)
    tokens = as_tokens(target, prompt, thinking=config.thinking)[: min(64, target.spec.context - new - 1)]
    generate_once(target, tokens, new)
    for heat in dict.fromkeys(entry.temperature for entry in entries):
        run_once(target, Request(tokens, new, Sampling(heat, seed=0)), ends=False)
    for entry in entries:
        request = Request(tokens, new, Sampling(entry.temperature, seed=0))
        run_once(target, request, entry.drafter, judge=_judge(config), shared_noise=SHARED_NOISE)


def _one_prompt(
    target: TransformersTarget, table: Sequence[Measured], prompt: Prompt, config: Config, number: int
) -> dict[str, Any] | None:
    """Continue one prompt every way, turn after turn, and note the runs; or return why it is left out: it loops, or has a turn
    of one token.

    Between turns stand the target's own greedy answers, for everybody: prompts and lengths are the same for all.
    """
    asked, references, generate_s = _conversation(target, prompt, config)
    share = min(map(fresh_share, references))
    if config.fresh and (share < config.fresh or min(map(len, references)) < 2):
        return {"fresh_share": round(share, 3), "reason": "loop" if share < config.fresh else "short"}

    def requests(heat: float) -> list[Request]:
        seed = config.seed + number
        return [
            Request(tokens, config.max_new_tokens if heat == 0 else len(reference), Sampling(heat, seed=seed))
            for tokens, reference in zip(asked, references, strict=True)
        ]

    # who goes first changes from prompt to prompt
    plains: dict[float, Run] = {}
    for measured in (*table[number % len(table) :], *table[: number % len(table)]):
        entry = measured.entry
        heat = entry.temperature
        if heat not in plains:
            plains[heat] = _joined([run_once(target, request, ends=heat == 0) for request in requests(heat)])
        runs = [
            run_once(
                target,
                request,
                entry.drafter,
                measured.chosen,
                ends=heat == 0,
                judge=_judge(config),
                shared_noise=SHARED_NOISE,
            )
            for request in requests(heat)
        ]
        measured.ids.append(prompt.id)
        measured.runs.append(_joined(runs))
        measured.plain.append(plains[heat])
        measured.reference.append([token for reference in references for token in reference])
        measured.turns.append([len(reference) for reference in references])
        measured.generate_s.append(generate_s)
        measured.prompts.append(prompt)
        if len(measured.requests) < config.observed:
            measured.requests.append(requests(heat))
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


def _joined(runs: Sequence[Run]) -> Run:
    return functools.reduce(Run.joined, runs)


def _observe(target: TransformersTarget, measured: Measured, config: Config) -> None:
    """Run the first prompts once more, untimed, and note where drafts were turned down."""
    tested, entry = [], measured.entry
    for name, requests in zip(measured.ids, measured.requests, strict=False):
        places = []
        for request in requests:
            found = judged(
                target, request, entry.drafter, measured.chosen, ends=entry.temperature == 0, judge=_judge(config),
                shared_noise=SHARED_NOISE,
            )  # fmt: skip
            places += found.tested
            measured.overlap += found.overlap
        tested += places
        measured.observed.append({"id": name, "tokens": [place.model_dump() for place in places[:SHOWN]]})
    if measured.requests:
        measured.rejections = patterns(tested).model_dump()


def _score(target: TransformersTarget, measured: Measured, config: Config) -> None:
    """Compare answers with references, where that was asked for."""
    if not config.score:
        return
    from outrider.measure import scoring

    task = measured.task
    kind = tasks.TASKS[task].score if task in tasks.TASKS else None
    if kind is None:
        return
    measured.score_measure = {"answer": "exact match of the final answer", "tests": "passes its tests"}[kind]

    def value(prompt: Prompt, run: Run) -> float | None:
        try:
            return scoring.score(task, prompt, answers_of(target, run), allow_code=config.allow_code_execution)
        except DataError as error:  # such as a file that changed meanwhile; hours of measuring are not thrown away for it
            log.warning("%s; the prompt has no score", error)
            return None

    # the target's own answers stand beside every drafter: those are scored once for each temperature's texts
    known: dict[tuple[int, ...], float | None] = {}
    for prompt, run, alone in zip(measured.prompts, measured.runs, measured.plain, strict=True):
        both = []
        for text in (run, alone):
            key = (id(prompt), *text.turns, *text.tokens)
            if key not in known:
                known[key] = value(prompt, text)
            both.append(known[key])
        measured.scores.append((both[0], both[1]))


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


def run_once(
    target: TransformersTarget, request: Request, drafter: Drafter | None = None,
    policy: Policy | None = None, ends: bool = True, judge: SamplingJudge | None = None, shared_noise: bool = True,
) -> Run:  # fmt: skip
    """Continue one request alone and note every step.  ends False goes on past end-of-text, for equal lengths."""
    run = Run()

    def heard(draft: Draft, scores: Scores) -> None:
        run.nodes.append(sum(draft.live))

    state = batch(target, 1, judge or "standard", shared_noise, None if ends else frozenset())
    listening: Any = Listening(target, heard)
    is_watched = memory.forget(target.device)
    with model_clock(target, drafter) as clock:
        began = last = time.perf_counter()
        for progress in serve(listening, [request], drafter, policy=policy, state=state):
            now = time.perf_counter()
            if run.steps:
                run.gaps_s.append(now - last)
            else:
                run.first_s = now - began
            last = now
            run.tokens += progress.tokens
            run.steps += 1
            run.accepted.append(progress.accepted)
            # what stood behind the text's end was never judged
            is_cut = len(progress.tokens) == progress.accepted
            run.reached.append(progress.accepted if is_cut else progress.reached)
            if isinstance(judge, lossy.LossyJudge):
                run.strayed += judge.strayed[progress.row]
            run.draft_s += state.timing.draft
            run.verify_s += state.timing.verify
            run.other_s += state.timing.other
            run.model_s += clock.since(state.timing.began)
        run.seconds = time.perf_counter() - began
    run.memory_peak_bytes = memory.peak(target.device) if is_watched else None
    run.unlawful = state.invalid
    return run


class ModelClock:
    """When the outermost calls into the models began and ended."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []
        self._depth = 0

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its outermost calls noted."""

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._calls.append((began, time.perf_counter()))

        return timed

    def since(self, moment: float) -> float:
        """Seconds inside calls that began after `moment`; forgets them and all before."""
        seconds = sum(end - began for began, end in self._calls if began >= moment)
        self._calls.clear()
        return seconds


@contextmanager
def model_clock(target: TransformersTarget, drafter: Drafter | None) -> Iterator[ModelClock]:
    """Watch every forward call of target and drafter while the block runs.

    Around `forward`, not by hooks: a module with hooks is called by a longer way, which would count as the loop's.
    """
    clock, before = ModelClock(), {}
    for module in {*_modules(target), *_modules(drafter)}:
        before[module] = vars(module).get("forward")
        module.forward = clock.watched(module.forward)
    try:
        yield clock
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _modules(party: Any) -> list[nn.Module]:
    """The module whose calls are the party's model, and the graph that may stand for it."""
    model = getattr(party, "model", None)
    if isinstance(model, TransformersTarget):
        return _modules(model)
    if not isinstance(model, nn.Module):
        return []
    base = getattr(model, "base_model", model)
    steps: Any = [party.step] if isinstance(party, TransformersTarget) else party.steps
    return [*dict.fromkeys([model, base]), *(step.graph for step in steps if step.graph is not None)]


@torch.inference_mode()
def generate_once(target: TransformersTarget, tokens: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """transformers' own greedy `generate`: its new tokens, and its seconds."""
    began = time.perf_counter()
    inputs = torch.tensor([tokens], device=target.device)
    out = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False, temperature=None,
        top_p=None, top_k=None, repetition_penalty=1.0, eos_token_id=sorted(target.ends) or None,
        pad_token_id=min(target.ends, default=0),
    )  # fmt: skip
    return out[0, len(tokens) :].tolist(), time.perf_counter() - began


def fresh_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of n-grams that stand in a text for the first time: 1 is no repetition, near 0 is a loop."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
