"""A server's counters of drafts, read from its /metrics, and the difference between two readings.  No torch.

Supports Outrider, vLLM and llama-server (counters), and SGLang (gauges of its last logging interval, which can't be
subtracted).  Samples of several engines and models are summed.  The `_created` series that Python servers add to each
counter is a time stamp, not a count, so names are matched exactly, never by prefix.

`tokens_per_step` means the same as everywhere in Outrider: tokens committed per step, including bonus tokens and steps
without a draft, but not tokens from prefills.  Servers report 1 + accepted / drafts instead: per step *with a draft*,
before the last step is cut at the end of an answer.  That is `tokens_per_draft`.  Outrider counts steps, and one of
them generates a prompt's first token.  vLLM has no counter of steps, but its histogram of gaps between tokens gets one
entry per step and request (as of 0.32).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.errors import DataError
from outrider.traffic.address import address_of

TIMEOUT_S = 10.0
LARGEST_BYTES = 32 * 2**20


class Names(NamedTuple):
    """Metric names of one kind of server; None if it has no such metric."""

    server: str
    drafts: str
    drafted: str | None = None
    accepted: str | None = None
    by_position: str | None = None
    """The label `position` is the position in the draft, from 0."""
    tokens_per_step: str | None = None
    """A gauge, for servers without counters."""
    steps: str | None = None
    """Steps with or without a draft, one per request and target pass."""
    generated: str | None = None
    first_tokens: str | None = None
    """Requests whose first token came from the prefill, not from a step."""
    running: str | None = None
    waiting: str | None = None


NAMES = (
    Names(
        "Outrider", "outrider:spec_decode_num_drafts_total", "outrider:spec_decode_num_draft_tokens_total",
        "outrider:spec_decode_num_accepted_tokens_total", "outrider:spec_decode_num_accepted_tokens_per_pos_total",
        steps="outrider:request_steps_total", generated="outrider:generation_tokens_total",
        running="outrider:num_requests_running", waiting="outrider:num_requests_waiting",
    ),
    Names(
        "vLLM", "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        steps="vllm:inter_token_latency_seconds_count", generated="vllm:generation_tokens_total",
        first_tokens="vllm:time_to_first_token_seconds_count", running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
    ),
    Names(
        "llama-server", "llamacpp:spec_decode_num_drafts_total", "llamacpp:spec_decode_num_draft_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_total", "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        generated="llamacpp:tokens_predicted_total", running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
    ),
    Names(
        "SGLang", "sglang:spec_verify_calls_total", tokens_per_step="sglang:spec_accept_length",
        generated="sglang:generation_tokens_total", first_tokens="sglang:time_to_first_token_seconds_count",
        running="sglang:num_running_reqs", waiting="sglang:num_queue_reqs",
    ),
)  # fmt: skip
"""Tried in this order: the first one whose draft counters are present determines the kind of server."""
STARTED = "process_start_time_seconds"


COUNTED = ("drafts", "drafted", "accepted", "steps", "generated", "first_tokens")
"""Counts that only increase while a server runs."""
IN_JSON = (
    "drafts", "drafted", "accepted", "by_position", "tokens_per_step", "tokens_per_draft", "steps", "generated",
    "first_tokens", "restarted", "is_interval",
)  # fmt: skip


@dataclass(frozen=True)
class SpeculationStats:
    """What was drafted and accepted over a period.  None for anything the server does not report."""

    drafts: int = 0
    """Steps with a draft."""
    drafted: int | None = None
    accepted: int | None = None
    by_position: tuple[int, ...] = ()
    """[k]: drafts of which at least k + 1 tokens were accepted; empty if the server does not report it."""
    steps: int | None = None
    """With or without a draft."""
    generated: int | None = None
    """Generated tokens."""
    first_tokens: int | None = None
    """Tokens from prefills, one per request."""
    restarted: bool = False
    """Whether the server restarted between the readings; the counts then start there."""
    is_interval: bool = False
    """Whether `tokens_per_step` is the server's mean over its last logging interval, not over the time between the
    readings."""
    gauge: float | None = None
    """The mean that the server reports; None if it reports none, or nothing was drafted."""

    @property
    def tokens_per_step(self) -> float | None:
        """Over all steps if the server counts them, otherwise over those with a draft; None if there was no step."""
        if self.is_interval:
            return self.gauge
        if self.steps is None or self.generated is None:
            return self.tokens_per_draft
        return (self.generated - (self.first_tokens or 0)) / self.steps if self.steps > 0 else None

    @property
    def tokens_per_draft(self) -> float | None:
        """1 + accepted / drafts, which servers call mean acceptance length."""
        return 1 + self.accepted / self.drafts if self.drafts > 0 and self.accepted is not None else None

    @property
    def covers_every_step(self) -> bool:
        """Whether `tokens_per_step` includes steps without a draft, as in a report."""
        return self.is_interval or (self.steps is not None and self.generated is not None)

    @property
    def rates(self) -> tuple[float, ...]:
        """[k]: share of the drafts with at least k + 1 accepted tokens."""
        return tuple(count / self.drafts for count in self.by_position) if self.drafts else ()

    @property
    def draft_acceptance(self) -> float | None:
        """Share of the drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    def json(self) -> dict[str, Any]:
        """Counts, and the figures derived from them."""
        return {name: getattr(self, name) for name in IN_JSON}


def merged(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """Several periods as one: counts are added, gauges weighted by their drafts."""
    if not parts:
        return SpeculationStats()
    columns = {name: [getattr(part, name) for part in parts] for name in COUNTED}
    counts: dict[str, Any] = {name: None if None in column else sum(column) for name, column in columns.items()}
    positions = itertools.zip_longest(*(part.by_position for part in parts), fillvalue=0)
    gauges = [(part.gauge, max(part.drafts, 1)) for part in parts if part.gauge is not None]
    return SpeculationStats(
        **counts, by_position=tuple(map(sum, positions)), restarted=any(part.restarted for part in parts),
        is_interval=any(part.is_interval for part in parts),
        gauge=sum(value * n for value, n in gauges) / sum(n for _, n in gauges) if gauges else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Counters:
    """One reading of a server's counters."""

    server: str | None
    """The kind of server, by its metric names; None if the metrics say nothing about drafts."""
    total: SpeculationStats = SpeculationStats()
    """Since the server started."""
    running: int | None = None
    waiting: int | None = None
    started: float | None = None
    """Start of the process, in seconds since 1970."""

    def age_s(self, at_s: float) -> float:
        """Seconds since the process started; 0 if unknown."""
        return max(0.0, at_s - self.started) if self.started else 0.0

    def has_restarted(self, before: Counters) -> bool:
        """Whether the server restarted after `before`: a different start time, or a count that fell."""
        if self.started is not None and before.started is not None and abs(self.started - before.started) > 1:
            return True
        pairs = [(getattr(self.total, name), getattr(before.total, name)) for name in COUNTED]
        pairs += itertools.zip_longest(self.total.by_position, before.total.by_position, fillvalue=0)
        return any(now is not None and then is not None and now < then for now, then in pairs)

    def since(self, before: Counters | None = None) -> SpeculationStats:
        """Counts after `before`, or since the server started.  Raises DataError if it has no metrics of drafts."""
        if self.server is None:
            raise DataError(
                "the server's metrics say nothing about drafts; start vLLM, SGLang (--enable-metrics), llama-server "
                "(--metrics) or Outrider with a drafter"
            )
        restarted = before is not None and self.has_restarted(before)
        total, then = self.total, SpeculationStats() if before is None or restarted else before.total
        pairs = {name: (getattr(total, name), getattr(then, name)) for name in COUNTED}
        gains: dict[str, Any] = {name: None if now is None else now - (was or 0) for name, (now, was) in pairs.items()}
        positions = itertools.zip_longest(total.by_position, then.by_position, fillvalue=0)
        # the gauge of an idle server keeps its last value
        gauge = None if total.drafts and not gains["drafts"] else total.gauge or None
        by_position = tuple(now - was for now, was in positions)
        return replace(total, **gains, by_position=by_position, restarted=restarted, gauge=gauge)


def scrape(url: str, client: httpx.Client | None = None) -> Counters:
    """Read the counters of the server at `url`, which may be its root, its /v1 or its /metrics.

    Raises DataError if the server does not answer, or not with metrics.
    """
    address = address_of(url)
    page = f"{address.shown}/metrics"
    query = f"?{address.query}" if address.query else ""
    with nullcontext(client) if client else httpx.Client(timeout=TIMEOUT_S) as http:
        try:
            with http.stream("GET", page + query, headers=address.authorization()) as response:
                if response.status_code != 200:
                    raise DataError(
                        f"{page} answered {response.status_code} instead of metrics; {_advice(response.status_code)}"
                    )
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if len(body) > LARGEST_BYTES:
                        raise DataError(
                            f"{page} answered more than {LARGEST_BYTES >> 20} MiB; give the address of a server with "
                            "/metrics"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"can't read {page}: {reason}; start the server, or correct the address") from None
    return read(body.decode("utf-8", "replace"), page)


def _advice(status: int) -> str:
    if status == 404:
        return "SGLang and llama-server need --enable-metrics and --metrics"
    return "put user:password@ in the address" if status in (401, 403) else "look at the server's log"


def read(text: str, source: str = "the metrics") -> Counters:
    """Counters from text in Prometheus' format.  Raises DataError for any other format."""
    wanted_names = {name for names in NAMES for name in names if name} | {STARTED}
    # only a few dozen of a server's thousands of lines are needed, and the parser takes 20 µs per line
    lines = [line for line in text.splitlines() if re.split(r"[{\s]", line, maxsplit=1)[0] in wanted_names]
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise DataError(
            f"{source}: not in Prometheus' text format ({error}); give the address of a server's /metrics"
        ) from None
    if not samples and not re.search(r"^# (TYPE|HELP) |^[A-Za-z_:][\w:]*(\{.*\})? [-+\dNI]", text, flags=re.MULTILINE):
        raise DataError(f"{source}: the response has no metrics; give the address of a server's /metrics")
    names = next((names for names in NAMES if names.drafts in samples or names.tokens_per_step in samples), None)
    started = max([value for _, value in samples.get(STARTED, [])], default=None)
    return Counters(None, started=started) if names is None else _counters(names, samples, started)


def _counters(
    names: Names, samples: Mapping[str, list[tuple[Mapping[str, str], float]]], started: float | None
) -> Counters:
    """Counters of one kind of server, summed over all its engines and models."""

    def total(name: str | None) -> int | None:
        return round(sum(value for _, value in samples[name])) if name is not None and name in samples else None

    positions: Counter[int] = Counter()
    for labels, value in samples.get(names.by_position or "", []):
        position = labels.get("position", "")
        if position.isdecimal() and int(position) < 10_000:
            positions[int(position)] += round(value)
    # idle engines report 0, which is not a mean
    gauges = [value for _, value in samples.get(names.tokens_per_step or "", []) if value > 0]
    counts: dict[str, Any] = {name: total(getattr(names, name)) for name in COUNTED}
    total_stats = SpeculationStats(
        **counts | {"drafts": counts["drafts"] or 0},
        by_position=tuple(positions[position] for position in range(max(positions, default=-1) + 1)),
        is_interval=names.tokens_per_step is not None,
        gauge=sum(gauges) / len(gauges) if gauges else None,
    )  # fmt: skip
    return Counters(names.server, total_stats, total(names.running), total(names.waiting), started)
