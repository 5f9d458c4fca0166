"""How many drafted tokens are accepted, measured or published, always with an interval and a source.  No torch.

A speed-up needs only the survival curve of acceptance: [k] is the share of steps that accept at least k + 1 drafted
tokens, if that many may be drafted.  Tokens per step at depth K are 1 plus the sum of its first K entries.

A deep draft's curve does not begin like a shallow draft's: steps with deep drafts start after the hard tokens at which
deep drafts end, and in a shallow tree the first nodes have fewer siblings.  So a probe has one curve per depth;
reports, checkpoints and papers have a single one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from outrider.errors import DataError
from outrider.report.schema import Report, Row

TABLE = Path(__file__).with_name("acceptance.yaml")
Basis = Literal["probe", "report", "checkpoint", "published"]


class Acceptance(NamedTuple):
    """A method's acceptance."""

    low: tuple[float, ...]
    center: tuple[float, ...]
    high: tuple[float, ...]
    basis: Basis
    source: str
    offered: tuple[float, ...] = ()
    """[k]: share of steps that draft at least k + 1 tokens; empty if all do."""
    shallower: tuple[Acceptance, ...] = ()
    """[k]: acceptance of drafts of k + 1 tokens, if measured separately."""

    @property
    def depth(self) -> int:
        """The largest known depth."""
        return len(self.center)

    def at(self, depth: int) -> Acceptance:
        """The acceptance of drafts of `depth` tokens if measured separately, otherwise this one."""
        return self.shallower[depth - 1] if 0 < depth <= len(self.shallower) else self

    def tokens(self, depth: int) -> tuple[float, float, float]:
        """Tokens per step at this depth, bonus token included: low, center, high."""
        return tuple(1 + sum(curve[:depth]) for curve in (self.low, self.center, self.high))  # type: ignore[return-value]

    def drafted(self, depth: int) -> float:
        """Mean drafted tokens per step."""
        return sum(self.offered[:depth]) if self.offered else float(depth)


def survival(conditional: Sequence[float]) -> tuple[float, ...]:
    """The survival curve from conditional acceptance: [k] is the share accepted at depth k + 1, given that all earlier
    tokens were."""
    return tuple(accumulate(conditional, mul))


def tokens_per_step(alpha: float, depth: float) -> float:
    """Tokens per step of a chain whose tokens are each accepted with probability `alpha`; depth may be infinite."""
    if alpha >= 1:
        return depth + 1
    return (1 - alpha ** (depth + 1)) / (1 - alpha) if depth < math.inf else 1 / (1 - alpha)


def alpha_of(tokens: float, depth: float) -> float:
    """The acceptance probability per token that gives this many tokens per step.  Raises DataError if none does."""
    if not 1 <= tokens <= depth + 1:
        raise DataError(f"tokens per step must be 1 to {depth + 1:g} at depth {depth:g}, got {tokens:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, depth) < tokens else (low, middle)
    return low


def even(tokens: float, depth: float, most: int) -> tuple[float, ...]:
    """The survival curve, `most` deep, of a chain whose tokens are all accepted with the same probability."""
    alpha = alpha_of(tokens, depth)
    return tuple(alpha ** (k + 1) for k in range(most))


# ── sources ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def published(kind: str) -> Acceptance | None:
    """Published acceptance of a kind on other targets; None if there is none."""
    entry = _table().get(kind)
    if entry is None:
        return None
    depth = math.inf if entry["depth"] is None else entry["depth"]
    most = entry.get("known_to") or int(min(depth, 16))
    ends = float(entry["low"]), float(entry["high"])
    center = float(entry.get("typical") or math.sqrt(ends[0] * ends[1]))
    low, middle, high = (even(tokens, depth, most) for tokens in (ends[0], center, ends[1]))
    return Acceptance(low, middle, high, "published", entry["source"])


def of_report(report: Report, drafter: str, path: str) -> Acceptance | None:
    """A report's acceptance of a drafter at its lowest temperature, over all tasks; None if it has none."""
    rows = [row for row in report.rows if row.drafter == drafter and row.tokens_per_step is not None]
    rows = [row for row in rows if row.temperature == min(each.temperature for each in rows)]
    if not rows:
        return None
    curves = [_curve(row) for row in rows]
    steps = [row.steps or 1 for row in rows]
    depth = max(len(survived) for survived, _ in curves)
    center = tuple(_mean([survived[k : k + 1] for survived, _ in curves], steps) for k in range(depth))
    offered = tuple(_mean([shares[k : k + 1] for _, shares in curves], steps) for k in range(depth))
    total = sum(steps)
    share = _interval(rows, total, center)
    low, high = (tuple(min(1.0, value * scale) for value in center) for scale in share)
    return Acceptance(low, center, high, "report", f"{path}, {sum(row.prompts for row in rows)} prompts", offered)


def _mean(values: Sequence[Sequence[float]], weights: Sequence[int]) -> float:
    """Weighted mean; an empty sequence counts as 0."""
    return sum(weight * sum(value) for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _curve(row: Row) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Survival curve and offered shares of a row, from its histogram if it has one, otherwise from the shares at each
    depth."""
    histogram = row.accepted_histogram
    if histogram and (steps := sum(map(sum, histogram))):
        depth = len(histogram) - 1
        survived = [sum(sum(column[k + 1 :]) for column in histogram) / steps for k in range(depth)]
        offered = [sum(sum(column) for column in histogram[k + 1 :]) / steps for k in range(depth)]
        return tuple(survived), tuple(offered)
    shares = [share or 0.0 for share in row.accepted_by_depth]
    return tuple(shares), tuple(1.0 for _ in shares)


def _interval(rows: Sequence[Row], steps: int, center: Sequence[float]) -> tuple[float, float]:
    """The ends of the 95 % interval as factors of the accepted tokens; over prompts if possible, otherwise over
    steps."""
    ranges = [row.tokens_per_step_range for row in rows]
    if all(each is not None and None not in (each.center, each.low, each.high) for each in ranges):
        ends = [(each.low - 1, each.center - 1, each.high - 1) for each in ranges]  # type: ignore[union-attr, operator]
        middle = sum(each[1] for each in ends)
        if middle > 0:
            return sum(each[0] for each in ends) / middle, sum(each[2] for each in ends) / middle
    mean = sum(center)
    if mean <= 0:
        return 1.0, 1.0
    squares = sum((2 * k + 1) * share for k, share in enumerate(center))
    error = 1.96 * math.sqrt(max(0.0, squares - mean**2) / max(1, steps)) / mean
    return max(0.0, 1 - error), 1 + error


def of_checkpoint(manifest: Mapping[str, Any], name: str) -> Acceptance | None:
    """Acceptance from a checkpoint's own evaluation, at its lowest temperature; None if it has none."""
    rows = [row for row in (manifest.get("report") or {}).get("rows", ()) if row.get("accepted_by_depth")]
    rows = [row for row in rows if row["temperature"] == min(each["temperature"] for each in rows)]
    if not rows:
        return None
    tokens = [row.get("tokens") or 1 for row in rows]
    curves = [[share or 0.0 for share in row["accepted_by_depth"]] for row in rows]
    center = tuple(_mean([each[k : k + 1] for each in curves], tokens) for k in range(max(map(len, curves))))
    whole = _mean(
        [[row.get("tokens_per_step") or 1 + sum(each)] for row, each in zip(rows, curves, strict=True)], tokens
    )
    # drafts cut short by the end of a text count in the tokens but not in the shares
    scale = (whole - 1) / sum(center) if sum(center) else 1.0
    prompts = sum(row.get("prompts") or 0 for row in rows)
    scaled = tuple(min(1.0, share * scale) for share in center)
    return _around(scaled, prompts, "checkpoint", f"the evaluation in {name}, {prompts} prompts")


def _around(center: tuple[float, ...], texts: int, basis: Basis, source: str) -> Acceptance:
    """With a binomial interval over this many texts, since their spread is not stored."""
    error = lambda share: 1.96 * math.sqrt(share * (1 - share) / max(1, texts))
    low = tuple(max(0.0, share - error(share)) for share in center)
    high = tuple(min(1.0, share + error(share)) for share in center)
    return Acceptance(low, center, high, basis, source)
