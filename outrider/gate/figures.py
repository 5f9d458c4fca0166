"""Rules on per-prompt figures, new against old: speeds, tokens per step, the slowest prompts.  No torch.

Prompts are resampled within their tasks.  An estimate below 0 is a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import numpy as np

from outrider.gate.outcome import Part, Test, silent, too_few
from outrider.gate.policy import Policy
from outrider.gate.statistics.pairing import MatchedReports
from outrider.report.bootstrap import Estimate, Floats, estimate_of, resampled, sums
from outrider.report.parts import PromptResult

Results = Iterator[Test | Part]


def speed(comparison: MatchedReports, policy: Policy) -> Results:
    """Log of new/old speed, prompt by prompt."""
    return _paired(comparison, partial(speed_log, policy=policy), _mean, policy, f"a {policy.speed.by}")


def speed_log(new: PromptResult, old: PromptResult, policy: Policy) -> tuple[float, ...] | None:
    """(log of new/old speed, 1), whose sums give the mean.  None if a speed is missing."""
    a, b = (p.speedup if policy.speed.by == "speedup" else p.tokens_per_s for p in (new, old))
    return (math.log(a / b), 1.0) if a and b and a > 0 and b > 0 else None


def tokens_per_step(comparison: MatchedReports, policy: Policy) -> Results:
    """Log of new/old tokens per step."""
    return _paired(comparison, counts, _pace, policy, "tokens and steps")


def clean_figure(comparison: MatchedReports, policy: Policy) -> Results:
    """Tokens per step without the prompts that occur in a drafter's texts or could not be looked up."""
    matched = [(task, pair) for group in comparison.groups for task, pair in group.pairs.items()]
    by_prompt = any(prompt.contaminated is not None for _, pair in matched for prompt in pair.new.per_prompt)
    if not by_prompt and all(pair.new.clean is None for _, pair in matched):
        yield silent("", "the candidate was not checked for overlap")
        return
    unclean: set[tuple[str, str]] = set()
    for task, pair in matched:
        for row in (pair.new, pair.old):
            unclean |= {(task, name) for name in (row.clean.contaminated if row.clean else ())}
            unclean |= {(task, prompt.id) for prompt in row.per_prompt if prompt.contaminated}
        if by_prompt:
            unclean |= {(task, prompt.id) for prompt in pair.new.per_prompt if prompt.contaminated is None}
    yield from _paired(comparison, counts, _pace, policy, "tokens and steps", without=unclean)


def counts(new: PromptResult, old: PromptResult) -> tuple[float, ...] | None:
    """Tokens and steps of both; None if one is missing."""
    values = (new.tokens, new.steps, old.tokens, old.steps)
    return tuple(float(value or 0) for value in values) if all(value and value > 0 for value in values) else None


def _paired(
    comparison: MatchedReports, columns: Callable[[PromptResult, PromptResult], tuple[float, ...] | None],
    statistic: Callable[[Floats], Floats], policy: Policy, what: str,
    without: Collection[tuple[str, str]] | None = None,
) -> Results:  # fmt: skip
    """Tests over all tasks and on each, from figures of pairs of prompts.

    columns: the figures, or None if one is missing.  statistic: from their sums over prompts [..., K] to a log ratio
    [...].  without: (task, prompt) to leave out; then there is a single test over all tasks, and few prompts are
    enough.
    """
    for index, group in enumerate(comparison.groups):
        tables: dict[str, Floats] = {}
        for task, pair in group.pairs.items():
            prompts = [both for both in pair.prompts if (task, both[0].id) not in (without or ())]
            rows = [values for both in prompts if (values := columns(*both)) is not None]
            if rows and (without is not None or len(rows) >= policy.shared * len(prompts)):
                tables[task] = np.array(rows, dtype=np.float64)
            else:
                why = f"{len(rows)} of {len(prompts)} prompts have {what} in both reports"
                why = why if prompts else "a report does not list its prompts"
                yield silent(group.named(task), why, is_hole=without is None)
        if not tables:
            continue
        where = group.named("all tasks" if len(tables) > 1 else next(iter(tables)))
        whole, by_task = _bootstrapped(where, tables, statistic, policy, policy.seed + 1000 * index)
        yield whole
        for task in tables if without is None and len(tables) > 1 else ():
            place = group.named(task)
            count = len(tables[task])
            yield Test(place, by_task[task], count) if task in by_task else too_few(place, count, policy)


def _bootstrapped(
    where: str, tables: Mapping[str, Floats], statistic: Callable[[Floats], Floats], policy: Policy, seed: int
) -> tuple[Test | Part, dict[str, Estimate]]:
    """The test over all tasks, resampled within each, and an estimate for each task that is large enough.

    Small tasks are resampled together: a task with one prompt would never vary.
    """
    large = {task: table for task, table in tables.items() if len(table) >= policy.min_prompts}
    small = [table for task, table in tables.items() if task not in large]
    by_task: dict[str, Estimate] = {}
    drawn: list[Floats] = []
    for i, (task, table) in enumerate(large.items()):
        drawn.append(sums(table, policy.draws, seed + i))
        by_task[task] = estimate_of(float(statistic(table.sum(axis=0))), statistic(drawn[-1]), len(table))
    if small:
        drawn.append(sums(np.concatenate(small), policy.draws, seed + len(large)))
    count = sum(map(len, tables.values()))
    if count < policy.min_prompts:
        return too_few(where, count, policy), by_task
    center = float(statistic(np.concatenate(list(tables.values())).sum(axis=0)))
    whole = estimate_of(center, statistic(np.sum(drawn, axis=0)), count, len(drawn))
    return Test(where, whole, count, is_whole=True), by_task


def _mean(table: Floats) -> Floats:
    """Mean of the values, from sums of (value, 1)."""
    means: Floats = table[..., 0] / table[..., 1]
    return means


def _pace(table: Floats) -> Floats:
    """Log of new/old tokens per step, from (new tokens, new steps, old tokens, old steps)."""
    logs: Floats = np.log(table[..., 0] * table[..., 3] / (table[..., 1] * table[..., 2]))
    return logs


# ── the slowest prompts ───────────────────────────────────────────────────────────────────────────────────────────────


def slowest(comparison: MatchedReports, policy: Policy) -> Results:
    """99th percentile of time per output token over prompts, by a smoothed bootstrap.

    It depends on two or three prompts, whose luck a plain bootstrap would mistake for a real effect.  So noise is added
    to every resampled prompt: the noise between the reports, estimated from most prompts or from the target alone.  The
    target alone also shows by how much the machine as a whole was slower, which is subtracted.
    """
    for index, group in enumerate(comparison.groups):
        where = group.named("all tasks" if len(group.pairs) > 1 else next(iter(group.pairs)))
        every = [both for pair in group.pairs.values() for both in pair.prompts]
        timed = [(new, old) for new, old in every if all(p.tpot_ms and p.tpot_ms > 0 for p in (new, old))]
        if len(timed) < policy.shared * len(every) or not timed:
            yield silent(where, f"{len(timed)} of {len(every)} prompts have a tpot_ms in both reports")
        elif len(timed) < policy.min_prompts:
            yield too_few(where, len(timed), policy)
        else:
            logs = np.log([[new.tpot_ms or 1, old.tpot_ms or 1] for new, old in timed])
            alone = [(a.plain_tpot_ms, b.plain_tpot_ms) for a, b in timed]
            drift = np.array([math.log(a / b) for a, b in alone if a and b and a > 0 and b > 0])
            noise = _scatter(logs[:, 0] - logs[:, 1])
            if len(drift) == len(timed):
                logs[:, 0] -= drift.mean()
                noise = max(noise, float(drift.std()))
            yield Test(where, _tail_estimate(logs, noise, policy, index), len(timed))


def _scatter(values: Floats) -> float:
    """Standard deviation estimated from the middle half of the values: a slower tail is the effect, not noise."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / 1.349


def _tail_estimate(logs: Floats, scatter: float, policy: Policy, index: int) -> Estimate:
    """Minus the log of new/old 99th percentile.  logs [P, 2]: new, old.  scatter: noise of their difference."""
    shake = np.float32(scatter / math.sqrt(2))
    noise = np.random.default_rng(policy.seed + index)

    def gain(drawn: Floats) -> Floats:
        # float32: most of a gate's time goes here
        shaken = drawn.astype(np.float32) + shake * noise.standard_normal(drawn.shape, dtype=np.float32)
        high = np.quantile(shaken, 0.99, axis=-2)
        result: Floats = (high[..., 1] - high[..., 0]).astype(np.float64)
        return result

    high = np.quantile(logs, 0.99, axis=0)
    drawn = resampled(logs, gain, policy.draws, policy.seed + index)
    return estimate_of(float(high[1] - high[0]), drawn, len(logs))
