"""Measure drafters beside plain decoding, prompt by prompt in one interleaved run, so that a noisy machine wrongs none of them.

Every prompt is continued by transformers' own `generate`, by this engine without a drafter, and by every drafter; speed-up
is plain time over drafted time on the same prompts and lengths, exactness is equality with `generate`, token for token.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationInfo, field_validator
from torch import nn

from outrider.config import Config as Base
from outrider.decoding import lossy
from outrider.decoding.accept import accept
from outrider.decoding.generate import advance
from outrider.decoding.loop import Rule
from outrider.decoding.parties import Drafter
from outrider.decoding.policy import Policy
from outrider.decoding.sampling import Sampling
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError, DataError
from outrider.evaluate.report import Report
from outrider.evaluate.tasks import Prompt, check, task_name
from outrider.evaluate.tasks import prompts as prompts_of
from outrider.targets.transformers import TransformersTarget


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
    fresh: NonNegativeFloat = 0.6
    """A prompt whose plain text has a smaller share of first-time 8-grams loops: it is listed and left out.  0 keeps all."""
    seed: int = 0
    quantize: Literal["int8"] | None = None
    """Round the linear layers of this run's own draft model, whatever the target's are; needs torchao."""
    rule: str | None = None
    """`typical` or `relaxed` keeps likely tokens that the law would not, and every row says so; none is exact."""
    allow_lossy: bool = Field(default=False, validate_default=True)
    """A lossy rule is refused without it."""

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check, tasks))

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, rule: str | None) -> str | None:
        if rule is not None:
            lossy.find(rule, allow_lossy=True)
        return rule

    @field_validator("allow_lossy")
    @classmethod
    def _allowed_rule(cls, allow_lossy: bool, info: ValidationInfo) -> bool:
        lossy.choose(info.data.get("rule"), allow_lossy)
        return allow_lossy


@dataclass(frozen=True, slots=True)
class Entry:
    """One drafter to measure, at one temperature."""

    name: str
    drafter: Drafter
    temperature: float = 0.0
    policy: Callable[[], Policy] | None = None
    trained_on: str | None = None
    """The precision of the target that it was trained beside, such as float32."""


@dataclass(slots=True)
class Run:
    """One prompt continued once."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    model_s: float = 0.0
    unlawful: int = 0
    strayed: float = 0.0
    """Total variation of its tokens from the target's law, added up."""


@dataclass(slots=True)
class Measured:
    """All prompts of one entry, beside plain decoding of the same."""

    entry: Entry
    task: str
    ids: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    plain: list[Run] = field(default_factory=list)
    reference: list[list[int]] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)
    rule: str | None = None
    """The lossy rule's name, with its numbers."""


@dataclass(slots=True)
class Outcome:
    """Rows for the report, and the prompts that were left out of them."""

    rows: list[dict[str, Any]]
    left_out: list[dict[str, Any]]
    tried: int


def evaluate(
    target: TransformersTarget, drafters: Mapping[str, Drafter], config: Config | None = None, *,
    provenance: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None,
    on_prompt: Callable[[int, int, int], None] | None = None,
) -> Report:  # fmt: skip
    """Measure drafters by name beside the target alone; the last is measured at every temperature, the others at the first.

    Raises DataError where a task has no prompt that stays.
    """
    config = config or Config()
    first, *hotter = config.temperatures
    trained_on = {name: facts.get("precision") for name, facts in (training or {}).items()}
    entries = [Entry(name, drafter, first, trained_on=trained_on.get(name)) for name, drafter in drafters.items()]
    if entries:
        entries += [replace(entries[-1], temperature=heat) for heat in hotter]
    outcome = measure(target, entries, config, on_prompt)
    return Report(
        target=target.spec.name,
        provenance=dict(provenance or {}),
        rows=outcome.rows,
        left_out=outcome.left_out,
        share_left_out=len(outcome.left_out) / outcome.tried,
        training=dict(training or {}),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measure(
    target: TransformersTarget,
    entries: Sequence[Entry],
    config: Config,
    on_prompt: Callable[[int, int, int], None] | None = None,
) -> Outcome:
    """Measure every entry on every task.  on_prompt(kept, wanted, left out) is called after each prompt.

    Raises DataError where a task has no prompt that stays.
    """
    if not entries:
        raise ConfigError("no drafter to measure; name at least one, such as {'ngram': load_drafter('ngram', target)}")
    if config.max_new_tokens > target.spec.context - 2:
        raise ConfigError(
            f"evaluate.max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the context of "
            f"{target.spec.context} of {target.spec.name}; choose at most {target.spec.context - 2}"
        )
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    tried = 0
    for task in config.tasks:
        rule = _rule(config)
        table = [Measured(entry, task_name(task), rule=None if rule is None else rule.rule.name) for entry in entries]
        kept, lost = 0, 0
        _warm_up(target, entries, task, config)
        for prompt in prompts_of(task, config.prompts * 4, config.seed):
            if kept == config.prompts:
                break
            tried += 1
            share = _one_prompt(target, table, prompt, config, kept)
            kept, lost = (kept + 1, lost) if share is None else (kept, lost + 1)
            if share is not None:
                left_out.append({"id": prompt.id, "task": task_name(task), "fresh_share": round(share, 3)})
            if on_prompt is not None:
                on_prompt(kept, config.prompts, lost)
        if not kept:
            raise DataError(
                f"task {task}: every one of {lost} prompts falls into a loop; set evaluate.fresh=0 to measure them anyway"
            )
        rows += [summarise(measured, target) for measured in table]
    return Outcome(rows, left_out, tried)


def _rule(config: Config) -> lossy.Meter | None:
    """A fresh meter of the lossy rule asked for; None is the law."""
    return None if config.rule is None else lossy.Meter(lossy.find(config.rule, config.allow_lossy)())


def _warm_up(target: TransformersTarget, entries: Sequence[Entry], task: str, config: Config) -> None:
    """The first passes of a process pay for allocations and thread pools; they are nobody's measurement."""
    prompt = next(iter(prompts_of(task, 1, config.seed)))
    tokens = as_tokens(target, prompt)[:64]
    for entry in entries:
        run_once(target, Request(tokens, 16, Sampling(entry.temperature, seed=0)), entry.drafter)


def _one_prompt(
    target: TransformersTarget, table: Sequence[Measured], prompt: Prompt, config: Config, turn: int
) -> float | None:
    """Continue one prompt every way and note the runs; or return its share of fresh 8-grams where it loops."""
    tokens = as_tokens(target, prompt)
    tokens = tokens[-(target.spec.context - config.max_new_tokens - 1) :]
    reference, generate_s = generate_once(target, tokens, config.max_new_tokens)
    share = fresh_share(reference)
    if share < config.fresh or len(reference) < 2:
        return share
    # who goes first changes from prompt to prompt
    plains: dict[float, Run] = {}
    entries = list(table[turn % len(table) :]) + list(table[: turn % len(table)])
    for measured in entries:
        heat = measured.entry.temperature
        request = Request(
            tokens, config.max_new_tokens if heat == 0 else len(reference), Sampling(heat, seed=config.seed + turn)
        )
        if heat not in plains:
            plains[heat] = run_once(target, request, ends=heat == 0)
        rule = _rule(config) or accept
        run = run_once(target, request, measured.entry.drafter, measured.entry.policy, ends=heat == 0, rule=rule)
        measured.ids.append(prompt.id)
        measured.runs.append(run)
        measured.plain.append(plains[heat])
        measured.reference.append(reference)
        measured.generate_s.append(generate_s)
    return None


def as_tokens(target: TransformersTarget, prompt: Prompt) -> list[int]:
    """A task's prompt as the target reads it: through the chat template where there is one."""
    has_template = getattr(target.tokenizer, "chat_template", None) is not None
    return target.encode(prompt.messages() if has_template else prompt.turns[0])


def run_once(
    target: TransformersTarget, request: Request, drafter: Drafter | None = None, policy: Callable[[], Policy] | None = None,
    ends: bool = True, rule: Rule = accept,
) -> Run:  # fmt: skip
    """Continue one request alone and note every step.  ends False goes on past end-of-text, for equal lengths."""
    run = Run()
    state = DecodeState(1, target.spec.context, target.ends if ends else frozenset(), target.device)
    with model_clock(target, drafter) as clock:
        began = last = time.perf_counter()
        chosen = policy() if policy else None
        for progress in advance(target, [request], drafter, policy=chosen, slots=1, rule=rule, state=state):
            now = time.perf_counter()
            if run.steps:
                run.gaps_s.append(now - last)
            else:
                run.first_s = now - began
            last = now
            run.tokens += progress.tokens
            run.steps += 1
            run.accepted.append(progress.accepted)
            run.reached.append(progress.reached)
            run.strayed += progress.strayed
            run.draft_s += state.timing.draft
            run.verify_s += state.timing.verify
            run.other_s += state.timing.other
            run.model_s += clock.since(state.timing.began)
        run.seconds = time.perf_counter() - began
    run.unlawful = state.unlawful
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
    """The module whose calls are the party's model, and the graphs that may stand for it."""
    model = getattr(party, "model", None)
    if isinstance(model, TransformersTarget):
        return _modules(model)
    if not isinstance(model, nn.Module):
        return []
    base = getattr(model, "base_model", model)
    graphs = getattr(getattr(party, "step", None), "graphs", {})
    return [*dict.fromkeys([model, base]), *graphs.values()]


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


# ── from runs to a row ─────────────────────────────────────────────────────────────────────────────────────────────────


def summarise(measured: Measured, target: TransformersTarget) -> dict[str, Any]:
    """One row of the report."""
    entry, runs, plain = measured.entry, measured.runs, measured.plain
    accepted = [a for run in runs for a in run.accepted]
    reached = [r for run in runs for r in run.reached]
    tokens, steps = sum(len(run.tokens) for run in runs), sum(run.steps for run in runs)
    seconds, plain_seconds = sum(run.seconds for run in runs), sum(run.seconds for run in plain)
    plain_tokens = sum(len(run.tokens) for run in plain)
    parts = {
        "draft": sum(r.draft_s for r in runs),
        "verify": sum(r.verify_s for r in runs),
        "other": sum(r.other_s for r in runs),
    }
    inside = sum(parts.values())
    is_greedy = entry.temperature == 0
    firsts = (
        [first_difference(run.tokens, wanted) for run, wanted in zip(runs, measured.reference, strict=True)]
        if is_greedy
        else []
    )
    depths = max(reached, default=0)
    return {
        "drafter": entry.name,
        "task": measured.task,
        "prompts": len(runs),
        "temperature": entry.temperature,
        "tokens_per_step": tokens / steps,
        "accepted_by_depth": [_share(sum(a > k for a in accepted), sum(r > k for r in reached)) for k in range(depths)],
        "conditional_acceptance": conditional(accepted, reached),
        "rejections_by_depth": [sum(a == k < r for a, r in zip(accepted, reached, strict=True)) for k in range(depths)],
        "tokens_per_s": tokens / seconds,
        "plain_tokens_per_s": plain_tokens / plain_seconds,
        "generate_tokens_per_s": sum(map(len, measured.reference)) / sum(measured.generate_s),
        "speedup": plain_seconds / plain_tokens * tokens / seconds,
        "exact": all(first is None for first in firsts) if is_greedy else None,
        "compared_tokens": sum(map(len, measured.reference)) if is_greedy else 0,
        "share": {name: part / inside for name, part in parts.items()},
        "loop_overhead": 1 - sum(run.model_s for run in runs) / inside,
        "plain_loop_overhead": 1 - sum(r.model_s for r in plain) / sum(r.draft_s + r.verify_s + r.other_s for r in plain),
        "plain_exact": all(run.tokens == wanted for run, wanted in zip(plain, measured.reference, strict=True))
        if is_greedy
        else None,
        "ttft_ms": _three([run.first_s for run in runs]),
        "itl_ms": _three([gap for run in runs for gap in run.gaps_s]),
        "tpot_ms": _three([_per_token(run) for run in runs]),
        "plain_ttft_ms": _three([run.first_s for run in plain]),
        "plain_itl_ms": _three([gap for run in plain for gap in run.gaps_s]),
        "itl_curve_ms": _curve([gap for run in runs for gap in run.gaps_s]),
        "plain_itl_curve_ms": _curve([gap for run in plain for gap in run.gaps_s]),
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "dtype": target.spec.dtype,
        "precision": target.spec.precision,
        "trained_on": entry.trained_on,
        "batch": 1,
        "device": str(target.device),
        "unlawful": sum(run.unlawful for run in runs),
        "rule": measured.rule,
        "lossless": measured.rule is None,
        "distance": sum(run.strayed for run in runs) / tokens,
        "per_prompt": [
            {
                "id": name,
                "tokens": len(run.tokens),
                "steps": run.steps,
                "tokens_per_s": len(run.tokens) / run.seconds,
                "plain_tokens_per_s": len(alone.tokens) / alone.seconds,
                "speedup": alone.seconds / len(alone.tokens) * len(run.tokens) / run.seconds,
                "exact": firsts[i] is None if is_greedy else None,
                "first_difference": firsts[i] if is_greedy else None,
            }
            for i, (name, run, alone) in enumerate(zip(measured.ids, runs, plain, strict=True))
        ],
    }


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter one's length where one ends early; None where they are equal."""
    if list(mine) == list(theirs):
        return None
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def conditional(accepted: Sequence[int], reached: Sequence[int]) -> list[float | None]:
    """Acceptance at depth k given that depth k - 1 was accepted and the draft went on."""
    pairs = list(zip(accepted, reached, strict=True))
    return [_share(sum(a > k for a, _ in pairs), sum(a >= k < r for a, r in pairs)) for k in range(max(reached, default=0))]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _per_token(run: Run) -> float:
    return (run.seconds - run.first_s) / max(1, len(run.tokens) - 1)


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the ordered values; NaN without any."""
    if not values:
        return math.nan
    ordered, at = sorted(values), share * (len(values) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _three(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": 1000 * _quantile(seconds, p / 100) for p in (50, 95, 99)}


def _curve(seconds: Sequence[float]) -> list[float]:
    return [1000 * _quantile(seconds, p / 100) for p in range(101)]


def training_of(manifest: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the report says of a drafter's training."""
    training = manifest.get("training", {})
    curve = [[row["step"], row["loss"]] for row in metrics if "loss" in row]
    return {
        "steps": training.get("step"),
        "seconds": training.get("seconds"),
        "tokens": training.get("tokens"),
        "precision": manifest.get("target", {}).get("precision"),
        "loss_curve": curve,
    }
