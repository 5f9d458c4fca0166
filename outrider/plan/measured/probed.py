"""Results of a probe: acceptance by method and category, with intervals over requests.  No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outrider.plan.acceptance import Acceptance
from outrider.plan.measured.probe import NODES, SEED, Replayed, num_requests
from outrider.plan.measured.sample import MOST_NEW, Sample
from outrider.plan.schema import Probed, ProbedRow
from outrider.report import bootstrap
from outrider.report.parts import Range
from outrider.traffic.logs.categories import CATEGORIES

ALL = "all"
"""The category of rows over all requests."""


def without_loops(records: Iterable[Replayed]) -> tuple[list[Replayed], int]:
    """The records of requests in which no answer loops, and the number of requests left out."""
    records = list(records)
    loops = {record.number for record in records if record.loops}
    return [record for record in records if record.number not in loops], len(loops)


def rows(records: Sequence[Replayed]) -> list[ProbedRow]:
    """One row per method over all requests, and one per method and category."""
    rows = []
    for method in dict.fromkeys(record.method for record in records):
        of_method = [record for record in records if record.method == method]
        rows.append(_row(method, ALL, of_method))
        by_category = {name: [record for record in of_method if record.category == name] for name in CATEGORIES}
        rows += [_row(method, name, of_category) for name, of_category in by_category.items() if of_category]
    return rows


def _row(method: str, category: str, records: Sequence[Replayed], depth: int = NODES) -> ProbedRow:
    """Acceptance when decoding with drafts of at most `depth` tokens."""
    texts = [(record.tokens, record.steps(depth).accepted) for record in records]
    steps = [len(accepted) for _, accepted in texts]
    reaching = lambda depth_reached: [sum(count >= depth_reached for count in accepted) for _, accepted in texts]
    return ProbedRow(
        method=method, category=category, requests=len(records), steps=sum(steps),
        tokens=sum(tokens for tokens, _ in texts), tokens_per_step=_over([tokens for tokens, _ in texts], steps),
        survival=tuple(_over(reaching(k), steps) for k in range(1, depth + 1)),
    )  # fmt: skip


def _over(amounts: Sequence[float], steps: Sequence[int]) -> Range:
    """Ratio of amounts to steps over requests; without an interval if these are too few."""
    if len(steps) < bootstrap.MIN_PROMPTS:
        return Range(center=sum(amounts) / sum(steps))
    return Range(**bootstrap.ratio_of_totals(amounts, steps)._asdict())


def acceptance(records: Sequence[Replayed], source: str) -> Acceptance | None:
    """A method's acceptance over all its requests; None if these are too few."""
    if len(records) < bootstrap.MIN_PROMPTS:
        return None
    shallower = tuple(_at(records, source, depth) for depth in range(1, NODES))
    return _at(records, source, NODES)._replace(shallower=shallower)


def _at(records: Sequence[Replayed], source: str, depth: int) -> Acceptance:
    """The acceptance of drafts of at most `depth` tokens."""
    whole = _row(records[0].method, ALL, records, depth)
    center = tuple(share.center or 0.0 for share in whole.survival)
    nodes = [drafted for record in records for drafted in record.steps(depth).nodes]
    offered = tuple(sum(drafted > k for drafted in nodes) / len(nodes) for k in range(depth))
    tokens, mean = whole.tokens_per_step, sum(center)
    ends = [min(max(0.0, (end or 1.0) - 1) / mean, 1 / center[0]) if mean else 1.0 for end in (tokens.low, tokens.high)]
    low, high = (tuple(share * scale for share in center) for scale in ends)
    return Acceptance(low, center, high, "probe", source, offered)


def summary(
    sample: Sample, requested: int | None, records: Sequence[Replayed], left_out: Mapping[str, int], because: str | None
) -> Probed:
    """The probe as a part of the plan.  because: why no requests, or fewer than requested, were replayed."""
    return Probed(
        requests=len({record.number for record in records}), wanted=num_requests(requested), because=because,
        calls=sample.calls,
        categories=dict(sample.categories), rows=tuple(rows(records)), seed=SEED, new_tokens=MOST_NEW,
        left_out=dict(sample.left_out) | {reason: count for reason, count in left_out.items() if count},
    )  # fmt: skip


def acceptances(records: Sequence[Replayed], requests: int, texts: int) -> dict[str, Acceptance]:
    """Acceptance by method, for those with enough requests.  texts: requests of the log that can be replayed."""
    source = f"measured on {requests} of your {texts} requests"
    by_method = {
        name: [record for record in records if record.method == name] for name in {record.method for record in records}
    }
    by_name = {name: acceptance(of_method, source) for name, of_method in by_method.items()}
    return {name: each for name, each in by_name.items() if each is not None}
