"""What a gate looks at, a function a rule: figures of prompts become tests, what is plain becomes a part at once.  No torch.

A test's estimate is oriented so that below 0 is a loss.  Whether the loss counts is for `gate` to say, which knows how many
tests there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field

from outrider.config import Config as Base
from outrider.gate.pairing import Comparison, Matched, Pair
from outrider.gate.verdicts import Part, Unit, Verdict
from outrider.measure.tasks import TASKS
from outrider.report.bootstrap import Estimate, Floats, estimate_of, normal, resampled, sums
from outrider.report.schema import PromptResult, Row

Rule = Literal[
    "exactness", "lossy rule", "machine", "speed", "tokens per step", "p99 TPOT", "acceptance by depth", "train-serve skew",
    "contamination", "clean figure", "score", "left out",
]  # fmt: skip
TIMED: tuple[Rule, ...] = ("speed", "p99 TPOT")
"""Those that mean nothing on another machine."""
FEWEST_DRAFTS = 30
"""That reach a depth, for its acceptance to be tested."""
Fraction = Annotated[float, Field(ge=0, lt=1)]


# YAML reads a bare `off` as false
Action = Annotated[Literal["stop", "warn", "off"], BeforeValidator(lambda value: "off" if value is False else value)]


class Limit(Base):
    """How much of one kind of loss is tolerated, and what happens beyond."""

    action: Action = "stop"
    tolerated: Fraction = 0.01


class Speed(Limit):
    """Speed, prompt by prompt."""

    by: Literal["speedup", "tokens_per_s"] = "speedup"
    """`speedup` is over the target alone in the same run, which takes the machine's drift out."""


class Policy(Base):
    """What the gate tolerates.  An exactness break always stops; there is no setting for it."""

    speed: Speed = Speed()
    tokens_per_step: Limit = Limit()
    p99_tpot: Limit = Limit(tolerated=0.05)
    """Time per output token of the slowest prompts."""
    acceptance_by_depth: Limit = Limit(tolerated=0.05)
    train_serve_skew: Limit = Limit(tolerated=0.05)
    """Points of acceptance below what training predicted."""
    contamination: Limit = Limit(tolerated=0.05)
    """Share of prompts that stand in what the drafter was trained on, or draws from."""
    clean_figure: Limit = Limit()
    """Tokens per step over prompts that stand in neither."""
    score: Limit = Limit()
    """Points that drafted answers may score below the target's own."""
    left_out: Limit = Limit(tolerated=0.05)
    """Points by which the share of prompts left out may grow."""
    lossy_rule: Literal["stop", "allow"] = "stop"
    """What becomes of a candidate whose acceptance rule changes the output on purpose."""
    level: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Of the intervals that are shown, and that warn."""
    false_stops: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Chance that any noisy test stops a draft that is as good as the old one; all tests share it."""
    draws: Annotated[int, Field(ge=1000)] = 10_000
    seed: int = 0
    least_prompts: Annotated[int, Field(ge=5)] = 5
    """Fewer can't be tested."""
    shared: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of prompts that both reports must have, and of these that must have a figure."""
    required: tuple[Rule, ...] = ("exactness", "speed", "tokens per step")
    """Rules that stop where they could not be measured."""
    warnings_stop: bool = False


# ── tests ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Test:
    """One noisy figure.  Its estimate is oriented so that below 0 is a loss: a log ratio, or a difference."""

    __test__ = False  # for pytest, which takes a class of this name for its own

    where: str
    estimate: Estimate
    prompts: int
    is_whole: bool = False
    """Over all tasks of a drafter at a temperature."""
    eased: str = ""
    """Why a loss only warns; empty where it stops."""


@dataclass(frozen=True, slots=True)
class Open:
    """A rule before its verdict: tests that wait for each other, and parts that need none."""

    rule: Rule
    measures: str
    unit: Unit
    limit: Limit
    tests: tuple[Test, ...] = ()
    parts: tuple[Part, ...] = ()
    rises: bool = False
    """More is worse."""
    what: str = ""
    """What the reason calls it; the rule's name without."""


def silent(where: str, reason: str, is_hole: bool = False) -> Part:
    """A part of which nothing is known, and why."""
    return Part(where, "not measured", reason, is_hole=is_hole)


def _named(group: Matched, where: str) -> str:
    return " ".join(filter(None, (group.name, where)))


def _paired(
    groups: Sequence[Matched], columns: Callable[[PromptResult, PromptResult], tuple[float, ...] | None],
    statistic: Callable[[Floats], Floats], policy: Policy, what: str, *, by_task: bool = True, sparse: bool = False,
) -> tuple[tuple[Test, ...], tuple[Part, ...]]:  # fmt: skip
    """Tests over all tasks and on each, from figures of pairs of prompts.

    columns: the figures, or None where one is missing; statistic takes sums of them over prompts [..., K] and gives a log ratio
    [...].  sparse: that most prompts lack it is no fault.
    """
    tests: list[Test] = []
    parts: list[Part] = []
    for index, group in enumerate(groups):
        tables: dict[str, Floats] = {}
        for task, pair in group.pairs.items():
            found = [values for both in pair.prompts if (values := columns(*both)) is not None]
            if found and (sparse or len(found) >= policy.shared * len(pair.prompts)):
                tables[task] = np.array(found, dtype=np.float64)
            else:
                why = f"{len(found)} of {len(pair.prompts)} prompts have {what} in both reports"
                why = why if pair.prompts else "a report does not list its prompts"
                parts.append(silent(_named(group, task), why, is_hole=not sparse))
        if tables:
            where = _named(group, "all tasks" if len(tables) > 1 else next(iter(tables)))
            whole, own = _bootstrapped(where, tables, statistic, policy, policy.seed + 1000 * index)
            (tests if isinstance(whole, Test) else parts).append(whole)  # type: ignore[arg-type]
            for task in tables if by_task and len(tables) > 1 else ():
                found_there = own[task]
                where = _named(group, task)
                if found_there is None:
                    parts.append(_few(where, len(tables[task]), policy))
                else:
                    tests.append(Test(where, found_there, len(tables[task])))
    return tuple(tests), tuple(parts)


def _few(where: str, count: int, policy: Policy) -> Part:
    return silent(where, f"{count} prompt{'s are' if count != 1 else ' is'} too few, {policy.least_prompts} are needed")


def _bootstrapped(
    where: str, tables: Mapping[str, Floats], statistic: Callable[[Floats], Floats], policy: Policy, seed: int
) -> tuple[Test | Part, dict[str, Estimate | None]]:
    """Over all tasks, drawn within each; and each task's own, None where it is too small.

    Small tasks are drawn as one, since a prompt that is alone would never vary.
    """
    small = [task for task, table in tables.items() if len(table) < policy.least_prompts]
    strata = {task: table for task, table in tables.items() if task not in small}
    own: dict[str, Estimate | None] = dict.fromkeys(tables)
    drawn: list[Floats] = []
    for place, (task, table) in enumerate(strata.items()):
        drawn.append(sums(table, policy.draws, seed + place))
        own[task] = estimate_of(float(statistic(table.sum(axis=0))), statistic(drawn[-1]), len(table))
    if small:
        drawn.append(sums(np.concatenate([tables[task] for task in small]), policy.draws, seed + len(strata)))
    count = sum(map(len, tables.values()))
    if count < policy.least_prompts:
        return _few(where, count, policy), own
    center = float(statistic(np.concatenate(list(tables.values())).sum(axis=0)))
    whole = estimate_of(center, statistic(np.sum(drawn, axis=0)), count, len(drawn))
    return Test(where, whole, count, is_whole=True), own


def _mean(table: Floats) -> Floats:
    """Of (value, 1)."""
    means: Floats = table[..., 0] / table[..., 1]
    return means


def _pace(table: Floats) -> Floats:
    """Log of new/old tokens per step, of (new tokens, new steps, old tokens, old steps)."""
    logs: Floats = np.log(table[..., 0] * table[..., 3] / (table[..., 1] * table[..., 2]))
    return logs


def _counts(new: PromptResult, old: PromptResult) -> tuple[float, ...] | None:
    found = (new.tokens, new.steps, old.tokens, old.steps)
    return tuple(float(value or 0) for value in found) if all(value and value > 0 for value in found) else None


# ── the rules ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def speed(comparison: Comparison, policy: Policy) -> Open:
    def columns(new: PromptResult, old: PromptResult) -> tuple[float, ...] | None:
        a, b = getattr(new, policy.speed.by), getattr(old, policy.speed.by)
        return (math.log(a / b), 1.0) if a and b and a > 0 and b > 0 else None

    tests, parts = _paired(comparison.groups, columns, _mean, policy, f"a {policy.speed.by}")
    named = "speed-up over the target alone" if policy.speed.by == "speedup" else "tokens per second"
    return Open("speed", f"geometric mean over prompts of new/old {named}", "new/old", policy.speed, tests, parts)


def tokens_per_step(comparison: Comparison, policy: Policy) -> Open:
    tests, parts = _paired(comparison.groups, _counts, _pace, policy, "tokens and steps")
    measures = "new/old tokens committed per target pass, over the same prompts"
    return Open("tokens per step", measures, "new/old", policy.tokens_per_step, tests, parts)


def clean_figure(comparison: Comparison, policy: Policy) -> Open:
    """Tokens per step again without the prompts that were found in a drafter's text, or could not be looked for."""
    rows = Open("clean figure", "new/old tokens per step over prompts that no drafter knew", "new/old", policy.clean_figure)
    matched = [(task, pair) for group in comparison.groups for task, pair in group.pairs.items()]
    by_prompt = any(prompt.overlaps is not None for _, pair in matched for prompt in pair.new.per_prompt)
    if not by_prompt and all(pair.new.clean is None for _, pair in matched):
        return replace(rows, parts=(silent("", "the candidate was not checked for overlap"),))
    strange: set[tuple[str, str]] = set()
    for task, pair in matched:
        for row in (pair.new, pair.old):
            strange |= {(task, name) for name in (row.clean.overlapping if row.clean else ())}
            strange |= {(task, prompt.id) for prompt in row.per_prompt if prompt.overlaps}
        if by_prompt:
            strange |= {(task, prompt.id) for prompt in pair.new.per_prompt if prompt.overlaps is None}
    clean = [
        replace(g, pairs={
            task: pair._replace(prompts=tuple(both for both in pair.prompts if (task, both[0].id) not in strange))
            for task, pair in g.pairs.items()
        })
        for g in comparison.groups
    ]  # fmt: skip
    tests, parts = _paired(clean, _counts, _pace, policy, "tokens and steps", by_task=False, sparse=True)
    return replace(rows, tests=tests, parts=parts)


def slowest(comparison: Comparison, policy: Policy) -> Open:
    """The 99th percentile over prompts hangs on two or three of them, so a plain bootstrap believes their luck.

    Every drawn prompt is shaken by the noise between the reports, as most prompts or the target alone show it: a smoothed
    bootstrap.  The target alone also tells how much the machine as a whole was slower, which is taken out.
    """
    tests: list[Test] = []
    parts: list[Part] = []
    for index, group in enumerate(comparison.groups):
        where = _named(group, "all tasks" if len(group.pairs) > 1 else next(iter(group.pairs)))
        every = [both for pair in group.pairs.values() for both in pair.prompts]
        timed = [(new, old) for new, old in every if all(p.tpot_ms and p.tpot_ms > 0 for p in (new, old))]
        if len(timed) < policy.shared * len(every) or not timed:
            parts.append(silent(where, f"{len(timed)} of {len(every)} prompts have a tpot_ms in both reports"))
        elif len(timed) < policy.least_prompts:
            parts.append(silent(where, f"{len(timed)} prompts are too few, {policy.least_prompts} are needed"))
        else:
            logs = np.log([[new.tpot_ms or 1, old.tpot_ms or 1] for new, old in timed])
            alone = [(a.plain_tpot_ms, b.plain_tpot_ms) for a, b in timed]
            drift = np.array([math.log(a / b) for a, b in alone if a and b and a > 0 and b > 0])
            noise = _scatter(logs[:, 0] - logs[:, 1])
            if len(drift) == len(timed):
                logs[:, 0] -= drift.mean()
                noise = max(noise, float(drift.std()))
            tests.append(Test(where, _tail_estimate(logs, noise, policy, index), len(timed)))
    measures = "new/old 99th percentile over prompts of time per output token, the target's own drift taken out"
    return Open("p99 TPOT", measures, "new/old", policy.p99_tpot, tuple(tests), tuple(parts), rises=True)


def _scatter(values: Floats) -> float:
    """Standard deviation by the middle half: a tail that got slower is what is looked for, not noise."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / 1.349


def _tail_estimate(logs: Floats, scatter: float, policy: Policy, index: int) -> Estimate:
    """Of minus the log of new/old 99th percentile.  logs [P, 2]: new, old; scatter: of their difference, without a cause."""
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


class Depths(NamedTuple):
    """Drafts by depth."""

    reached: Floats
    kept: Floats
    """That depth, and all before it."""


def depths_of(row: Row) -> Depths | None:
    """From the histogram; in reports without one, from the shares and the rejections by depth.  None where neither is."""
    if row.accepted_histogram:
        most = max(len(row.accepted_histogram) - 1, 0)
        found = Depths(np.zeros(most), np.zeros(most))
        for deep, steps in enumerate(row.accepted_histogram):
            for accepted, count in enumerate(steps):
                found.reached[:deep] += count
                found.kept[: min(accepted, deep)] += count
        return found
    shares = list(zip(row.accepted_by_depth, row.conditional_acceptance, row.rejections_by_depth, strict=False))
    counts: list[tuple[float, float]] = []
    for share, conditional, rejected in shares:
        if share is None or conditional is None:
            break
        # of the drafts judged at this depth, those not kept were rejected there
        kept = conditional * rejected / (1 - conditional) if conditional < 1 else 0.0
        if conditional == 1 and (row.steps or 0) > 0:
            kept = counts[-1][1] if counts else float(row.steps or 0)
        counts.append((kept / share if share else rejected, kept))
    return Depths(*np.array(counts).T) if counts else None


def _clustering(pairs: Iterable[Pair], new: Depths, old: Depths | None = None) -> float:
    """How many times the variance of tokens per step, over prompts, exceeds that of as many independent steps; 1 at least.

    With `old`, of the difference between the two over the same prompts.
    """
    counts = np.array([values for pair in pairs for both in pair.prompts if (values := _counts(*both)) is not None])
    if len(counts) < 2:
        return 1.0
    seen, alone = np.zeros(len(counts)), 0.0
    for side, depths in ((0, new), (2, old)):
        if depths is not None:
            tokens, steps = counts[:, side], counts[:, side + 1]
            strayed = (tokens - tokens.sum() / steps.sum() * steps) / steps.sum()
            seen = seen + (strayed if side == 0 else -strayed)
            share = np.minimum(1.0, depths.kept / steps.sum())
            weights = 2 * np.arange(len(share)) + 1
            alone += max(0.0, float((weights * share).sum() - share.sum() ** 2)) / float(steps.sum())
    return max(1.0, float((seen**2).sum()) * len(counts) / (len(counts) - 1) / alone) if alone else 1.0


def _summed(rows: Sequence[Row]) -> Depths | None:
    """Of all tasks, as deep as the deepest."""
    found = [depths_of(row) for row in rows]
    if not found or any(depths is None for depths in found):
        return None
    most = max(len(depths.reached) for depths in found if depths is not None)
    filled = [[np.pad(column, (0, most - len(column))) for column in depths] for depths in found if depths is not None]
    return Depths(*np.sum(filled, axis=0))


def acceptance(comparison: Comparison, policy: Policy) -> Open:
    tests: list[Test] = []
    parts: list[Part] = []
    for group in comparison.groups:
        pairs = list(group.pairs.values())
        new, old = _summed([pair.new for pair in pairs]), _summed([pair.old for pair in pairs])
        if new is None or old is None:
            parts.append(silent(group.name, "a report has no acceptance by depth"))
            continue
        widened = math.sqrt(_clustering(pairs, new, old))
        prompts = sum(len(pair.prompts) for pair in pairs)
        for depth in range(len(old.reached)):
            where = _named(group, f"depth {depth + 1}")
            if depth >= len(new.reached) or min(new.reached[depth], old.reached[depth]) < FEWEST_DRAFTS:
                parts.append(silent(where, f"fewer than {FEWEST_DRAFTS} drafts reach it in one of the reports"))
                continue
            # half a draft more on either side: a share of 0 has a logarithm
            sides = [(d.kept[depth] + 0.5, d.reached[depth] + 1.0) for d in (new, old)]
            shares = [kept / reached for kept, reached in sides]
            error = math.sqrt(sum(max(0.0, 1 - share) / kept for share, (kept, _) in zip(shares, sides, strict=True)))
            tests.append(Test(where, normal(math.log(shares[0] / shares[1]), widened * error), prompts))
    measures = "new/old share of the drafts reaching a depth that were kept up to it"
    return Open(
        "acceptance by depth", measures, "new/old", policy.acceptance_by_depth, tuple(tests), tuple(parts), what="acceptance"
    )


def skew(comparison: Comparison, policy: Policy) -> Open:
    tests: list[Test] = []
    parts: list[Part] = []
    for group in comparison.groups:
        pairs = list(group.pairs.values())
        rows = [pair.new for pair in pairs]
        found = _summed(rows)
        predicted = next((row.predicted_by_depth for row in rows if row.predicted_by_depth), ())
        if found is None or not predicted:
            missing = "what training predicted" if found else "acceptance by depth"
            parts.append(silent(group.name, f"the candidate does not say {missing}"))
            continue
        before = _summed([pair.old for pair in pairs])
        widened = math.sqrt(_clustering(pairs, found))
        old_skew = _skews(before, next((pair.old.predicted_by_depth for pair in pairs if pair.old.predicted_by_depth), ()))
        for depth, (expected, reached, kept) in enumerate(zip(predicted, found.reached, found.kept, strict=False)):
            where = _named(group, f"depth {depth + 1}")
            if expected is None or reached < FEWEST_DRAFTS:
                why = "training predicted nothing" if expected is None else f"fewer than {FEWEST_DRAFTS} drafts reach it"
                parts.append(silent(where, why))
                continue
            share = (kept + 0.5) / (reached + 1)
            error = widened * math.sqrt(share * (1 - share) / reached)
            skewed = kept / reached - expected
            is_old = old_skew.get(depth, math.inf) <= skewed
            prompts = sum(row.prompts for row in rows)
            tests.append(Test(where, normal(skewed, error), prompts, eased="no worse than the baseline" if is_old else ""))
    measures = "acceptance as served, less what training predicted, at each depth"
    return Open(
        "train-serve skew", measures, "difference", policy.train_serve_skew, tuple(tests), tuple(parts),
        what="acceptance against training's prediction",
    )  # fmt: skip


def _skews(found: Depths | None, predicted: Sequence[float | None]) -> dict[int, float]:
    """Acceptance less its prediction, by depth."""
    if found is None:
        return {}
    sides = enumerate(zip(predicted, found.reached, found.kept, strict=False))
    return {depth: kept / reached - expected for depth, (expected, reached, kept) in sides if expected is not None and reached}


def score(comparison: Comparison, policy: Policy) -> Open:
    """Drafted answers beside the target's own in the candidate's run: any loss is the drafter's."""
    rows = Open("score", "share of right answers, drafted less the target alone", "difference", policy.score, what="score")
    tests: list[Test] = []
    parts: list[Part] = []
    for index, group in enumerate(comparison.groups):
        tables: dict[str, Floats] = {}
        lonely: list[tuple[float, float, int]] = []
        missing: list[Part] = []
        for task, pair in group.pairs.items():
            both = [(p.score, p.plain_score) for p in pair.new.per_prompt]
            found = [a - b for a, b in both if a is not None and b is not None]
            score = pair.new.score
            if found:
                tables[task] = np.array([(value, 1.0) for value in found])
            elif score is not None and score.drafted is not None and score.plain is not None and score.prompts >= 1:
                variance = sum(share * (1 - share) for share in (score.drafted, score.plain)) / score.prompts
                lonely.append((score.drafted - score.plain, variance, score.prompts))
            else:
                missing.append(silent(_named(group, task), "no scores in the candidate", is_hole=_can_score(task)))
        where, count = _named(group, "all tasks"), sum(map(len, tables.values())) or sum(n for *_, n in lonely)
        if not count:
            parts.append(silent(where, "no scores in the candidate"))
        elif count < policy.least_prompts:
            parts.append(_few(where, count, policy))
        elif tables:
            whole, _ = _bootstrapped(where, tables, _mean, policy, policy.seed + 1000 * index)
            (tests if isinstance(whole, Test) else parts).append(whole)  # type: ignore[arg-type]
        else:
            center = sum(difference * n for difference, _, n in lonely) / count
            error = math.sqrt(sum(variance * n**2 for _, variance, n in lonely)) / count
            tests.append(Test(where, normal(center, error, max(1, count - 1)), count))
        parts += missing if count else ()
    return replace(rows, tests=tuple(tests), parts=tuple(parts))


def _can_score(task: str) -> bool:
    """False for tasks that want a judge: nobody can be asked for their score."""
    known = TASKS.get(task)
    return known is None or known.score is not None


def exactness(comparison: Comparison, policy: Policy) -> Open:
    """Every row of the candidate, also those that the baseline lacks.  A lossy row that the policy allows is another rule's."""
    parts: list[Part] = []
    rows = [row for row in comparison.new.rows if row.lossless is not False or policy.lossy_rule == "stop"]
    for row in rows:
        where = f"{row.drafter} on {row.task} at T {row.temperature:g}"
        if row.is_inexact:
            first = next(iter(row.different), None)
            at = "" if first is None or first.first_difference is None else f", first at token {first.first_difference}"
            said = f": {len(row.different)} of {row.prompts} texts{at} of {first.id}" if first else ""
            parts.append(Part(where, "stop", f"the text is not the target's own{said}", float(len(row.different) or 1)))
        elif row.plain_exact is False:
            parts.append(Part(where, "stop", "the target alone, through the same loop, does not write its own text"))
        elif row.exact and row.compared_tokens != 0:
            parts.append(Part(where, "pass", f"{_tokens(row)} equal to the target's own", 0.0, prompts=row.prompts))
        else:
            why = "drawn by chance, so not compared" if row.temperature > 0 else "the text was not compared"
            parts.append(silent(where, why, is_hole=row.temperature == 0))
    if not rows:
        parts.append(silent("", "every row is under a lossy rule"))
    return Open("exactness", "texts that are not the target's own, token for token", "count", Limit(), parts=tuple(parts))


def _tokens(row: Row) -> str:
    return f"{row.prompts} texts" if row.compared_tokens is None else f"{row.compared_tokens:,} tokens"


def lossy(comparison: Comparison, policy: Policy) -> Open:
    parts = []
    for row in comparison.new.rows:
        where = f"{row.drafter} on {row.task} at T {row.temperature:g}"
        if row.lossless is False or (row.rule is not None and row.lossless is not True):
            allowed = policy.lossy_rule == "allow"
            said = f"{row.loss or f'rule {row.rule} changes the output'}{', which the policy allows' if allowed else ''}"
            parts.append(Part(where, "warn" if allowed else "stop", said, row.distance))
        elif row.lossless is None:
            parts.append(silent(where, "the report does not say by which rule it was measured"))
        else:
            parts.append(Part(where, "pass", "measured under the law", row.distance))
    return Open("lossy rule", "total variation of a token from the target's law", "share", Limit(), parts=tuple(parts))


def contamination(comparison: Comparison, policy: Policy) -> Open:
    parts = []
    for group in comparison.groups:
        rows = [(pair.new, pair.old) for pair in group.pairs.values()]
        new, old = ([row.clean for row in side if row.clean is not None] for side in zip(*rows, strict=True))
        checked, known = sum(c.checked for c in new), sum(len(c.overlapping) for c in new)
        every = sum(row.prompts for row, _ in rows)
        is_whole = len(new) == len(rows) and checked >= policy.shared * every
        share = known / max(1, checked if is_whole else every)
        is_past = share > policy.contamination.tolerated
        if not is_past and not is_whole:
            unsaid = f"{every - checked} of {every} prompts could not be looked for in all that is behind the candidate"
            parts.append(silent(group.name, unsaid))
            continue
        before = sum(len(c.overlapping) for c in old) / max(1, sum(c.checked for c in old)) if old else None
        said = f"{'' if is_whole else 'at least '}{known} of {checked if is_whole else every} prompts"
        said += " stand in what the drafter was trained on or draws from"
        verdict: Verdict = "pass" if not is_past else "warn" if before is not None and share <= before else "stop"
        more = f", {policy.contamination.tolerated:.1%} tolerated{', as many as in the baseline' if verdict == 'warn' else ''}"
        parts.append(Part(group.name, verdict, said + (more if is_past else ""), share, prompts=checked))
    measures = "share of prompts that the drafter may know"
    return Open("contamination", measures, "share", policy.contamination, parts=tuple(parts))


def left_out(comparison: Comparison, policy: Policy) -> Open:
    new, old = comparison.new.share_left_out, comparison.old.share_left_out
    measures = "share of prompts left out, less that of the baseline"
    if new is None or old is None:
        part = silent("", f"the {'candidate' if new is None else 'baseline'} does not say what it left out")
    else:
        grown = new - old
        is_past = grown > policy.left_out.tolerated + 1e-9
        said = f"{new:.1%} of the prompts tried were left out, {old:.1%} in the baseline"
        part = Part("", "stop" if is_past else "pass", said, grown)
    return Open("left out", measures, "difference", policy.left_out, parts=(part,))


def machine(comparison: Comparison, others: Sequence[str]) -> Open:
    missing = [name for name, r in (("candidate", comparison.new), ("baseline", comparison.old)) if not r.fingerprint]
    if missing:
        part = silent("", f"no fingerprint in the {' and the '.join(missing)}: nobody knows whether it was the same machine")
    elif others:
        part = Part("", "warn", f"other machine, times left out: {'; '.join(others)}", float(len(others)))
    else:
        part = Part("", "pass", "the same machine, libraries and settings", 0.0)
    return Open("machine", "differences that times depend on", "count", Limit(action="warn"), parts=(part,))


def opened(comparison: Comparison, policy: Policy, other_machine: Sequence[str] = ()) -> list[Open]:
    """Every rule, in the order they are told; what the policy turned off, or another machine makes void, is not measured."""
    found = [
        exactness(comparison, policy), lossy(comparison, policy), machine(comparison, other_machine),
        speed(comparison, policy), tokens_per_step(comparison, policy), slowest(comparison, policy),
        acceptance(comparison, policy), skew(comparison, policy), contamination(comparison, policy),
        clean_figure(comparison, policy), score(comparison, policy), left_out(comparison, policy),
    ]  # fmt: skip
    void = {rule.rule: "left out: another machine" for rule in found if other_machine and rule.rule in TIMED}
    void |= {rule.rule: "off, by the policy" for rule in found if rule.limit.action == "off"}
    return [replace(r, tests=(), parts=(silent("", void[r.rule]),)) if r.rule in void else r for r in found]
