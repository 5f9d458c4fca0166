"""How much to speculate at each load: tokens per second by draft length and load, and the resulting table.  No torch.

Longer drafts pay off while the target is memory-bound, and cost time when it is compute-bound; so the best length falls
with the load.  The choice is the sequence of lengths, none longer at a higher load, with the largest total gain over
all loads, where each change of length must gain more than a margin and more than the noise: from the highest load down,
the shorter draft is kept until a longer one is better.  If there is no difference, the table says 0.

Noise: the relative deviation of repeats is assumed to be the same everywhere, and measurements on one server deviate
together.  Whether to draft at all is decided by a Student's t-test over all repeats, with a Bonferroni correction over
all lengths and loads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import ConfigError, DataError
from outrider.report.bootstrap import student
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import whole_text

LARGEST = 1024
"""The highest load that tables are written for."""
MARGIN = 0.02


class Range(NamedTuple):
    """The number of tokens per step while `first` to `last` requests are running."""

    first: int
    last: int
    tokens: int


class Arm(NamedTuple):
    """One way to draft."""

    tokens: int
    width: int = 1
    cutoff: float | None = None

    def order(self) -> tuple[int, int, float]:
        """The sort key of arms."""
        return self.tokens, self.width, self.cutoff or 0.0


class Point(NamedTuple):
    """One measurement."""

    arm: Arm
    load: int
    """Concurrent requests."""
    round: int
    tokens_per_s: float


class Gain(NamedTuple):
    """The gain of the chosen setting at one load."""

    load: int
    tokens: int
    tokens_per_s: float
    ratio: float
    """Ratio to the shortest draft measured, which is no speculation if that was measured."""
    low: float | None
    """95 % interval of the ratio; None if nothing was measured twice."""
    high: float | None


@dataclass(frozen=True)
class Choice:
    """How much to speculate at each load."""

    ranges: tuple[Range, ...]
    width: int
    cutoff: float | None
    gains: tuple[Gain, ...]
    pays_to: int | None
    """The highest load at which it speculates; 0 if there is none; None if it speculates at every measured load."""
    noise: float | None
    """Relative standard deviation of repeats."""
    notes: tuple[str, ...]
    fixed: Arm
    """The single setting with the largest gain over all loads, for engines without a table by load."""
    best_ratio: float | None
    """Speed of the best draft over all loads relative to no speculation; None if either was not measured."""

    def plain(self, weights: str | None = None) -> dict[str, Any]:
        """The choice as values for JSON, with the engines' tables. weights: checksum of the draft's weights, if
        known."""
        choice = asdict(self) | {"gains": [one._asdict() for one in self.gains], "fixed": self.fixed._asdict()}
        tables: dict[str, Any] = {"llamacpp": for_llamacpp(self.fixed)}
        if self.width == 1 and self.cutoff is None:  # tables by load support neither trees nor cut-offs
            ranges = self.ranges
            tables |= {"vllm": for_vllm(ranges), "sglang": for_sglang(ranges), "trtllm": for_trtllm(ranges)}
        return {"outrider_tune": 1, "weights": weights, **choice, "tables": tables}

    def write(self, path: Path, weights: str | None = None) -> None:
        """Write tune.json atomically."""
        with replacing(path) as part:
            part.write_text(json.dumps(self.plain(weights), indent=2) + "\n", encoding="utf-8")


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def choose(points: Sequence[Point], margin: float = MARGIN, largest: int = LARGEST) -> Choice:
    """The lengths with the largest gain, by load.

    margin: relative speed-up that a change of length must reach.  Raises DataError if points are missing.
    """
    table = _Table(points, margin)
    ways = sorted(
        {arm[1:] for arm in table.arms if arm.tokens}, key=lambda way: (way != (1, None), way[0], way[1] or 0.0)
    )
    best: tuple[float, list[Arm]] | None = None
    for way in ways or [(1, None)]:
        value, chosen = table.best([arm for arm in table.arms if arm.tokens == 0 or arm[1:] == way])
        # a tree or a cut-off must pass the same test as a change of length
        if best is None or value > best[0] + table.price(len(table.loads)):
            best = (value, chosen)
    assert best is not None
    chosen = best[1]
    drafting = next((arm for arm in chosen if arm.tokens), Arm(0))
    ranges = _ranges(table, chosen, max(largest, table.loads[-1]))
    pays_to = None if ranges[-1].tokens else max((one.last for one in ranges if one.tokens), default=0)
    gains = tuple(table.gain(load, arm) for load, arm in zip(table.loads, chosen, strict=True))
    notes, (fixed, best_ratio) = _notes(table, ranges), table.constant()
    return Choice(ranges, drafting.width, drafting.cutoff, gains, pays_to, table.noise, notes, fixed, best_ratio)


def _notes(table: _Table, ranges: Sequence[Range]) -> tuple[str, ...]:
    longest = max(arm.tokens for arm in table.arms)
    notes = (
        (
            table.noise is None,
            "everything was measured only once, so the noise is unknown; measure with --rounds 2 or more",
        ),
        (table.left_out, f"{table.left_out} round was not measured completely and does not count"),
        (
            table.shortest.tokens,
            "0 tokens was not measured, so it is unknown whether speculation pays off; add 0 to --tokens",
        ),
        (
            ranges[-1].tokens,
            f"nothing was measured beyond {table.loads[-1]} concurrent requests; the last length is used there",
        ),
        (
            0 < ranges[0].tokens == longest,
            "the longest draft measured is the best; longer ones may be even better",
        ),
    )
    return tuple(note for holds, note in notes if holds)


class _Table:
    """Mean logarithms of the speeds, and their uncertainty."""

    def __init__(self, points: Sequence[Point], margin: float) -> None:
        self.arms, self.loads = sorted({p.arm for p in points}, key=Arm.order), sorted({p.load for p in points})
        logs = {point[:3]: math.log(point.tokens_per_s) for point in points}
        rounds = sorted({point.round for point in points})
        gaps = {number: [cell for cell in self._cells() if (*cell, number) not in logs] for number in rounds}
        whole = [number for number in rounds if not gaps[number]]
        if not whole:
            missing = ", ".join(f"{arm.tokens} tokens at {load}" for arm, load in next(iter(gaps.values()), [])[:4])
            raise DataError(f"not measured yet: {missing or 'anything'}; rerun the same command to resume")
        self.repeats, self.left_out = len(whole), len(rounds) - len(whole)
        self.mean = {cell: sum(logs[(*cell, number)] for number in whole) / len(whole) for cell in self._cells()}
        self.deviations = [
            [logs[arm, load, number] - self.mean[arm, load] for load in self.loads]
            for arm in self.arms
            for number in whole
        ]
        self.freedom = len(self.arms) * (len(whole) - 1)
        squares = sum(one**2 for row in self.deviations for one in row)
        self.noise = math.sqrt(squares / (self.freedom * len(self.loads))) if self.freedom else None
        self.margin = margin

    def _cells(self) -> list[tuple[Arm, int]]:
        return [(arm, load) for arm in self.arms for load in self.loads]

    @property
    def shortest(self) -> Arm:
        return self.arms[0]

    def price(self, loads: int, from_none: bool = True) -> float:
        """The total gain that a change at the lowest `loads` loads must reach.

        from_least: the change is from no drafting to drafting, which is tested as one of all possible changes; any
        other change is tested by itself, since choosing the wrong one of two lengths that both pay off costs little.

        Measurements of one server deviate together across loads, so they are summed first and the noise is that of the
        sums.
        """
        if not self.freedom:
            return math.log1p(self.margin)
        squares = sum(sum(row[:loads]) ** 2 for row in self.deviations)
        error = math.sqrt(squares / self.freedom * 2 / self.repeats)
        tail = 0.025 / max(1, (len(self.arms) - 1) * len(self.loads)) if from_none else 0.05
        return max(math.log1p(self.margin), -student(tail, self.freedom) * error)

    def best(self, arms: Sequence[Arm]) -> tuple[float, list[Arm]]:
        """(total gain, one arm per load) of the best sequence in which no load drafts more than a lower one."""
        count = len(self.loads)
        # value[k], path[k]: for the loads from here to the highest, with arm k here
        value = [self.mean[arm, self.loads[-1]] - (k > 0) * self.price(count) for k, arm in enumerate(arms)]
        path: list[list[Arm]] = [[arm] for arm in arms]
        for place in range(count - 2, -1, -1):
            prices, was, ways = [self.price(place + 1, j == 0) for j in range(len(arms))], value, path
            value, path = [], []
            for k, arm in enumerate(arms):
                following = max(range(k + 1), key=lambda j: was[j] - (j < k) * prices[j])
                value.append(self.mean[arm, self.loads[place]] + was[following] - (following < k) * prices[following])
                path.append([arm, *ways[following]])
        top = max(range(len(arms)), key=value.__getitem__)
        return value[top], path[top]

    def constant(self) -> tuple[Arm, float | None]:
        """The setting with the largest gain over all loads, and the speed of the best draft relative to no
        speculation."""
        mean = {arm: sum(self.mean[arm, load] for load in self.loads) / len(self.loads) for arm in self.arms}
        price = self.price(len(self.loads)) / len(self.loads)
        best = max(self.arms, key=lambda arm: mean[arm] - (arm != self.shortest) * price)
        drafts = [mean[arm] for arm in self.arms if arm.tokens]
        is_measured = self.shortest.tokens == 0 and drafts
        return best, math.exp(max(drafts) - mean[self.shortest]) if is_measured else None

    def gain(self, load: int, arm: Arm) -> Gain:
        speed, ratio = math.exp(self.mean[arm, load]), self.mean[arm, load] - self.mean[self.shortest, load]
        if self.noise is None:
            return Gain(load, arm.tokens, speed, math.exp(ratio), None, None)
        error = 0.0 if arm == self.shortest else self.noise * math.sqrt(2 / self.repeats)
        around = -student(0.025, self.freedom) * error
        return Gain(load, arm.tokens, speed, math.exp(ratio), math.exp(ratio - around), math.exp(ratio + around))


def _ranges(table: _Table, chosen: Sequence[Arm], largest: int) -> tuple[Range, ...]:
    """Between two measured loads, the length changes where their lines cross on a log-load axis."""
    ranges, first = [], 1
    for place, arm in enumerate(chosen[:-1]):
        after = chosen[place + 1]
        if after.tokens == arm.tokens:
            continue
        here, there = table.loads[place], table.loads[place + 1]
        ahead, later = (table.mean[arm, load] - table.mean[after, load] for load in (here, there))
        share = min(1.0, max(0.0, ahead / (ahead - later))) if ahead > later else 0.5
        last = min(there - 1, max(here, int(here * (there / here) ** share)))
        ranges.append(Range(first, last, arm.tokens))
        first = last + 1
    return (*ranges, Range(first, largest, chosen[-1].tokens))


# ── the tables of engines ─────────────────────────────────────────────────────────────────────────────────────────────


def check(ranges: Sequence[Range]) -> None:
    """Raises ConfigError unless the ranges start at 1, have no gaps, and draft no more at a higher load."""
    expected, tokens = 1, math.inf
    for one in ranges:
        if one.first != expected or one.last < one.first or not 0 <= one.tokens <= tokens:
            rule = f"[first, last, tokens], begin at {expected} and have no more tokens than the one before"
            raise ConfigError(f"a range must be {rule}, got {list(one)}")
        expected, tokens = one.last + 1, one.tokens
    if not ranges or not any(one.tokens for one in ranges):
        raise ConfigError("this table drafts nothing at any load; serve without speculation (--tokens 0)")


def for_vllm(ranges: Sequence[Range]) -> list[list[int]]:
    """`num_speculative_tokens_per_batch_size`: inclusive ranges from 1; beyond the last one vLLM uses its configured
    length."""
    return [list(one) for one in ranges]


def for_sglang(ranges: Sequence[Range]) -> dict[str, dict[str, list[int]]]:
    """`--speculative-adaptive-config`: the lowest batch of each range → the one length allowed there."""
    return {str(one.first): {"candidate_steps": [one.tokens]} for one in ranges}


def for_trtllm(ranges: Sequence[Range]) -> dict[int, int]:
    """`draft_len_schedule`: the highest batch of each range → its length; nothing is drafted beyond the last one. 0 is
    left out."""
    return {one.last: one.tokens for one in ranges if one.tokens}


def for_llamacpp(arm: Arm) -> dict[str, float]:
    """llama-server's flags, which apply at every load; {} is no speculation, also for a tree, which it does not
    support."""
    if not arm.tokens or arm.width > 1:
        return {}
    return {"spec-draft-n-max": arm.tokens, "spec-draft-p-min": arm.cutoff or 0.0}


def not_paying(ratio: float | None) -> str:
    """How far the best draft is from paying off, as the end of a sentence. ratio: its speed relative to no
    speculation."""
    if ratio is None:
        return ""
    return f": the best draft reaches {ratio:.2f} of the speed without" + (", within the noise" if ratio > 1 else "")


def read_fixed(path: Path) -> tuple[Arm, float | None]:
    """The one setting for every load, and the best draft's relative speed, from a file of `outrider tune`."""
    try:
        content = parse_json(whole_text(path))
        fixed, ratio = content["fixed"], content["best_ratio"]
        arm = Arm(
            int(fixed["tokens"]), int(fixed["width"]), None if fixed["cutoff"] is None else float(fixed["cutoff"])
        )
        return arm, None if ratio is None else float(ratio)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not a schedule ({reason}); give the tune.json of `outrider tune`") from None


def read(path: Path) -> tuple[Range, ...]:
    """The ranges in a file written by `outrider tune`.

    Raises ConfigError if they were measured with a tree or a cut-off: engines' tables by load support neither.
    """
    try:
        content = parse_json(whole_text(path))
        ranges = tuple(Range(*(int(value) for value in row)) for row in content["ranges"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        content = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not a schedule ({content}); give the tune.json of `outrider tune`") from None
    check(ranges)
    if (content.get("width") or 1) != 1 or content.get("cutoff") is not None:
        measured = f"width {content.get('width')} and cut-off {content.get('cutoff')}"
        raise ConfigError(
            f"{path} was measured with {measured}, which a table by load can't express; deploy with --tokens, --width "
            "and --cutoff"
        )
    return ranges
