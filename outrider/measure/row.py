"""From runs to a row of the report.  docs/metrics.md explains every figure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.measure.record import Measured, Overlaps, Run, Sample
from outrider.report import bootstrap
from outrider.report.parts import Clean, Group, PositionRange, PromptResult, Training
from outrider.report.schema import Row
from outrider.targets.hf.transformers import TransformersTarget


def summarise(measured: Measured, target: TransformersTarget, overlaps: Overlaps | None = None) -> Row:
    """One row of the report.  overlaps: of this drafter, if they were checked."""
    entry, samples = measured.entry, measured.samples
    runs, plain = [sample.run for sample in samples], [sample.plain for sample in samples]
    is_greedy = entry.temperature == 0
    prompts = tuple(_prompt(measured, sample, overlaps) for sample in samples)
    references = sum(len(turn) for sample in samples for turn in sample.reference)
    return Row(
        drafter=entry.name, task=measured.task, temperature=entry.temperature, prompts=len(runs), per_prompt=prompts,
        **acceptance(runs), **_speed(samples), **_times(runs, plain),
        expected_acceptance=sum(measured.overlap) / len(measured.overlap) if measured.overlap else None,
        predicted_by_depth=entry.predicted,
        generate_tokens_per_s=references / sum(sample.generate_s for sample in samples),
        noise=None if is_greedy else "own",
        exact=all(prompt.exact for prompt in prompts) if is_greedy else None,
        compared_tokens=references if is_greedy else 0,
        plain_exact=all(difference(s.plain, s.reference) is None for s in samples) if is_greedy else None,
        memory_peak_bytes=max((peak for run in runs if (peak := run.memory_peak_bytes) is not None), default=None),
        device=str(target.device), dtype=target.spec.dtype, precision=target.spec.precision,
        trained_on=entry.trained_on,
        batch=measured.batch, invalid=sum(run.invalid for run in runs),
        rule=measured.rule, lossless=measured.rule is None, policy=measured.policy, verification=measured.verification,
        distance=sum(run.tv_distance for run in runs) / sum(len(run.tokens) for run in runs),
        rejections=measured.rejections, traced=tuple(measured.traced),
        clean=None if overlaps is None else _clean(measured, prompts, overlaps.rule),
        by_group=_by_group(samples), by_position=by_position(runs),
    )  # fmt: skip


# ── acceptance ────────────────────────────────────────────────────────────────────────────────────────────────────────


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """The row's fields about drafted and accepted tokens, over all steps of all runs."""
    accepted = [a for run in runs for a in run.accepted]
    reached = [r for run in runs for r in run.reached]
    per_step = list(zip(accepted, reached, strict=True))
    depths = max(reached, default=0)
    tokens = sum(len(run.tokens) for run in runs)
    steps = sum(run.steps for run in runs)
    total_accepted = sum(accepted)
    nodes = sum(sum(run.nodes or run.reached) for run in runs)
    interval = bootstrap.ratio_of_totals([len(run.tokens) for run in runs], [run.steps for run in runs])
    return {
        "tokens_per_step": tokens / steps,
        "tokens_per_step_range": interval._asdict(),
        "accepted_by_depth": [_share(sum(a > k for a in accepted), sum(r > k for r in reached)) for k in range(depths)],
        "conditional_acceptance": conditional(accepted, reached),
        "rejections_by_depth": [sum(a == k < r for a, r in per_step) for k in range(depths)],
        "token_acceptance": _share(total_accepted, sum(a + (a < r) for a, r in per_step)),
        "draft_acceptance": _share(total_accepted, sum(reached)),
        "accepted_histogram": histogram(accepted, reached),
        "wasted": _share(nodes - total_accepted, nodes),
        "steps": steps,
        "tokens": tokens,
    }


def conditional(accepted: Sequence[int], reached: Sequence[int]) -> list[float | None]:
    """Acceptance at depth k, given that depth k - 1 was accepted and the draft continued."""
    per_step = list(zip(accepted, reached, strict=True))
    return [
        _share(sum(a > k for a, _ in per_step), sum(a >= k < r for a, r in per_step))
        for k in range(max(reached, default=0))
    ]


def histogram(accepted: Sequence[int], reached: Sequence[int]) -> list[list[int]]:
    """[k][a]: steps whose draft was k deep, with a tokens accepted; row k has k + 1 numbers."""
    counts = [[0] * (k + 1) for k in range(max(reached, default=-1) + 1)]
    for a, r in zip(accepted, reached, strict=True):
        counts[r][a] += 1
    return counts


# ── speed ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _speed(samples: Sequence[Sample]) -> dict[str, Any]:
    """Speed of all samples.  Samples served together count as one, since they share a time."""
    parts = np.array(
        [[sum(values) for values in zip(*map(_amounts, group), strict=True)] for group in batches(samples)]
    )
    tokens, seconds, plain_tokens, plain_seconds = parts.sum(0).tolist()
    rates, plain_rates = parts[:, 0] / parts[:, 1], parts[:, 2] / parts[:, 3]
    ratios = (rates / plain_rates).tolist()
    has_interval = len(parts) >= bootstrap.MIN_PROMPTS
    return {
        "tokens_per_s": tokens / seconds,
        "plain_tokens_per_s": plain_tokens / plain_seconds,
        "speedup": plain_seconds / plain_tokens * tokens / seconds,
        "speedup_range": bootstrap.ratio_of_rates(parts.tolist())._asdict() if has_interval else None,
        "speedup_geomean": bootstrap.geometric_mean(ratios)._asdict(),
        "speedup_of_means": float(sum(rates) / sum(plain_rates)),
        "seconds": seconds,
        "plain_seconds": plain_seconds,
    }


def _amounts(sample: Sample) -> tuple[float, float, float, float]:
    run, plain = sample.run, sample.plain
    return len(run.tokens), run.seconds, len(plain.tokens), plain.seconds


def batches(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that were served together, in their order."""
    groups: dict[Any, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(("alone", number) if sample.group is None else sample.group, []).append(sample)
    return list(groups.values())


def _times(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """How the seconds of a step are spent, and latencies."""
    parts = {name: sum(getattr(run, f"{name}_s") for run in runs) for name in ("draft", "verify", "other")}
    inside = sum(parts.values())
    alone = sum(run.draft_s + run.verify_s + run.other_s for run in plain)
    gaps, plain_gaps = ([gap for run in some for gap in run.gaps_s] for some in (runs, plain))
    per_token, plain_per_token = ([_per_token(run) for run in some] for some in (runs, plain))
    return {
        "share": {name: part / inside for name, part in parts.items()},
        "loop_overhead": 1 - sum(run.model_s for run in runs) / inside,
        "plain_loop_overhead": 1 - sum(run.model_s for run in plain) / alone,
        "ttft_ms": _three([_first(run) for run in runs]),
        "itl_ms": _three(gaps),
        "tpot_ms": _three(per_token),
        "tpot_curve_ms": _curve(per_token),
        "plain_tpot_ms": _three(plain_per_token),
        "plain_tpot_curve_ms": _curve(plain_per_token),
        "plain_ttft_ms": _three([_first(run) for run in plain]),
        "plain_itl_ms": _three(plain_gaps),
        "itl_curve_ms": _curve(gaps),
        "plain_itl_curve_ms": _curve(plain_gaps),
    }


def _rate(run: Run) -> float:
    return len(run.tokens) / run.seconds


def _first(run: Run) -> float:
    """Seconds to the first token of a turn."""
    return run.first_s / max(1, len(run.turns))


def _per_token(run: Run) -> float:
    """Seconds per token after the first of each turn: (all - first) / (tokens - turns)."""
    return ((run.done_s or run.seconds) - run.first_s) / max(1, len(run.tokens) - max(1, len(run.turns)))


# ── one prompt ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _prompt(measured: Measured, sample: Sample, overlaps: Overlaps | None) -> PromptResult:
    run, alone, name = sample.run, sample.plain, sample.prompt.id
    is_greedy = measured.entry.temperature == 0
    first = difference(run, sample.reference) if is_greedy else None
    return PromptResult(
        id=name, tokens=len(run.tokens), steps=run.steps, tokens_per_s=_rate(run), plain_tokens_per_s=_rate(alone),
        speedup=alone.seconds / len(alone.tokens) * len(run.tokens) / run.seconds,
        exact=first is None if is_greedy else None, first_difference=first,
        tpot_ms=1000 * _per_token(run), plain_tpot_ms=1000 * _per_token(alone),
        contaminated=None if overlaps is None else overlaps.contaminated.get((measured.task, name)),
    )  # fmt: skip


def difference(run: Run, reference: Sequence[Sequence[int]]) -> int | None:
    """Index of the first token of a run that differs from the reference, over all turns; None if all are equal."""
    before = 0
    # turn by turn: a turn that ends early shifts the next one, and the concatenation might look equal
    for actual, expected in zip(turns_of(run.tokens, run.turns), reference, strict=True):
        first = first_difference(actual, expected)
        if first is not None:
            return before + first
        before += len(expected)
    return None


def turns_of(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    """The tokens of each turn."""
    start = 0
    for length in lengths or [len(tokens)]:
        yield tokens[start : start + length]
        start += length


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or the shorter length if one is a prefix; None if they are equal."""
    if list(one) == list(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ── without contaminated prompts ──────────────────────────────────────────────────────────────────────────────────────


def _clean(measured: Measured, prompts: Sequence[PromptResult], rule: str) -> Clean | None:
    """Figures over the prompts that were checked and not found in a source; None if none was checked."""
    if all(prompt.contaminated is None for prompt in prompts):
        return None
    clean = [(s, prompt) for s, prompt in zip(measured.samples, prompts, strict=True) if prompt.contaminated is False]
    runs = [sample.run for sample, _ in clean]
    return Clean(
        contaminated=tuple(prompt.id for prompt in prompts if prompt.contaminated),
        checked=sum(prompt.contaminated is not None for prompt in prompts),
        rule=rule,
        tokens_per_step=_share(sum(len(run.tokens) for run in runs), sum(run.steps for run in runs)),
        speedup=_speed([sample for sample, _ in clean])["speedup"] if clean else None,
    )


# ── by language or category ───────────────────────────────────────────────────────────────────────────────────────────


def _by_group(samples: Sequence[Sample]) -> tuple[Group, ...]:
    """Figures over the prompts of each group; empty if no prompt names a group."""
    names = sorted({sample.prompt.group for sample in samples})
    return tuple(_group(name, [s for s in samples if s.prompt.group == name]) for name in names) if any(names) else ()


def _group(name: str, samples: Sequence[Sample]) -> Group:
    runs = [sample.run for sample in samples]
    steps = [step for run in runs for step in zip(run.accepted, run.reached, strict=True)]
    judged = sum(a + (a < r) for a, r in steps)
    accepted = sum(a for a, _ in steps)
    tokens = sum(len(run.tokens) for run in runs)
    passes = sum(run.steps for run in runs)
    return Group(
        name=name, prompts=len(runs), tokens=tokens, steps=passes, judged=judged, accepted=accepted,
        tokens_per_step=_share(tokens, passes), token_acceptance=_share(accepted, judged),
        speedup=_speed(samples)["speedup"],
    )  # fmt: skip


# ── by position ───────────────────────────────────────────────────────────────────────────────────────────────────────

ENDS = (1024, 4096, 16384)
"""Positions at which one range ends and the next begins."""


def by_position(runs: Sequence[Run]) -> tuple[PositionRange, ...]:
    """Figures per range of positions; ranges without steps are omitted, and all if positions were not recorded."""
    steps: dict[int, list[list[int]]] = {}
    for run in (run for run in runs if run.positions):
        for at, *step in zip(run.positions, run.committed, run.accepted, run.reached, strict=True):
            steps.setdefault(bisect.bisect_right(ENDS, at), []).append(step)
    return tuple(_range(number, steps[number]) for number in sorted(steps))


def _range(number: int, steps: Sequence[Sequence[int]]) -> PositionRange:
    """steps: tokens committed, accepted, and depth of each."""
    tokens = sum(step[0] for step in steps)
    accepted = sum(step[1] for step in steps)
    judged = sum(a + (a < r) for _, a, r in steps)
    return PositionRange(
        begin=(0, *ENDS)[number], end=(*ENDS, None)[number], steps=len(steps), tokens=tokens, judged=judged,
        accepted=accepted, tokens_per_step=tokens / len(steps), token_acceptance=_share(accepted, judged),
    )  # fmt: skip


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _three(seconds: Sequence[float]) -> dict[str, float | None]:
    return dict(zip(("p50", "p95", "p99"), _curve(seconds, (50, 95, 99)), strict=True))


def _curve(seconds: Sequence[float], at: Sequence[int] = range(101)) -> list[float | None]:
    """Percentiles in milliseconds."""
    return [1000 * float(value) for value in np.percentile(seconds, at)] if seconds else [None] * len(at)


def training_of(manifest: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> Training:
    """The report's summary of a drafter's training."""
    training = manifest.get("training", {})
    # a best checkpoint excludes training that came after it
    lines = [line for line in metrics if training.get("step") is None or line["step"] <= training["step"]]
    held_out: Mapping[str, Any] = next((line["held_out"] for line in reversed(lines) if "held_out" in line), {})
    return Training(
        steps=training.get("step"), seconds=training.get("seconds"), tokens=training.get("tokens"),
        precision=manifest.get("target", {}).get("precision"),
        loss_curve=tuple((line["step"], line["loss"]) for line in lines if "loss" in line),
        acceptance=held_out.get("overlap", ()), agreement=held_out.get("agreement", ()),
        with_siblings=held_out.get("with_siblings", ()),
        held_out=held_out.get("answers"), temperature=held_out.get("temperature"),
    )  # fmt: skip
