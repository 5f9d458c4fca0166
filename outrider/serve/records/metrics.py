"""The engine's metrics: Prometheus' text for /metrics, and the figures of the live page.

A step adds a few numbers to one list, which takes microseconds; everything else is computed on request.  Only the
engine's thread writes to the list, its numbers never decrease, and the interpreter copies a list atomically.  So
readers need no lock, and no counter ever decreases.  A period is the difference of two copies; one copy per second is
kept for five minutes.

prometheus_client only formats the text: its own histograms have no history, which the page needs, and take a lock per
observation.

Names are vLLM's, with `outrider:` for `vllm:`, if they mean the same.  Three things differ.  A prompt's first token
comes from a step, not from the prefill, so `request_steps_total` counts it too.  Accepted tokens are those in the text:
a draft that continues after the end of an answer counts up to that end.  Request latencies are those of finished
answers.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from outrider.serve.calls import Call
from outrider.serve.records.counts import (
    ACCEPTED,
    ACCEPTED_BY,
    CACHED,
    DEEPEST,
    DRAFT_S,
    DRAFTED,
    DRAFTS,
    EDGES,
    FIRST,
    GAP,
    GENERATED,
    HISTORY_S,
    LATENCY_S,
    NOW_S,
    OTHER_S,
    PARTS,
    PASSES,
    PER_TOKEN,
    PROMPT,
    QUERIED,
    QUEUED,
    REACHED_BY,
    READ,
    READ_S,
    READING_S,
    RECENT_S,
    SIZE,
    STEPS,
    VERIFY_S,
    WHOLE,
    WIDTH,
    buckets,
    by_depth,
    deepest,
    interpolated,
    is_speculating,
    num_reaching,
    quantiles,
    reading_at,
    share,
    shares_of_time,
)

PREFIX = "outrider:"
COUNTERS = (
    ("request_steps", STEPS, "Steps with or without a draft, one per request and pass of the target."),
    ("engine_steps", PASSES, "Passes of the target that advance requests, one for all of them together."),
    ("generation_tokens", GENERATED, "Tokens generated."),
    ("prompt_tokens", PROMPT, "Tokens of the prompts of requests that have their first token."),
    ("spec_decode_num_drafts", DRAFTS, "Steps with a draft, one per request and pass of the target."),
    ("spec_decode_num_draft_tokens", DRAFTED, "Tokens drafted, all nodes of a tree."),
    ("spec_decode_num_accepted_tokens", ACCEPTED, "Drafted tokens that became text."),
    ("prefix_cache_queries", QUERIED, "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_cache_hits", CACHED, "Prompt tokens that were found in the prefix cache, and not computed again."),
)
POSITIONS = (
    ("spec_decode_num_accepted_tokens_per_pos", ACCEPTED_BY, "Drafts whose token at this position was accepted."),
    ("spec_decode_num_drafts_per_pos", REACHED_BY, "Drafts that reach this position."),
)
HISTOGRAMS = (
    ("time_to_first_token_seconds", FIRST, "From the arrival of a request to its first token."),
    ("inter_token_latency_seconds", GAP, "Between two steps of a request, each of which has one or more tokens."),
    ("request_time_per_output_token_seconds", PER_TOKEN, "Time after the first tokens, per token after the first."),
    ("e2e_request_latency_seconds", WHOLE, "From the arrival of a request to the end of its answer."),
    ("request_queue_time_seconds", QUEUED, "From the arrival of a request to a slot."),
)
FINISHED = ("stop", "length", "context")
ENDINGS = (*FINISHED, "cancelled", "deadline", "error")
ALARMS = ("drafter_raised", "drafter_hung", "invalid_draft")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did; lists have one entry per live slot."""

    calls: list[Call]
    tokens: list[int]
    """Committed tokens."""
    accepted: list[int]
    """How many of them were drafted."""
    drafted: list[int]
    """Nodes of the drafts."""
    depths: list[int]
    """Depths of the drafts."""
    seconds: float
    draft_s: float
    verify_s: float
    other_s: float
    read_tokens: int
    """Prompt tokens prefilled since the previous step."""


class Telemetry:
    """Counters of one engine.

    model: the label of the metrics.  drafter: shown on the page.  length: tokens of a slot.
    All methods except `refused`, `alarm`, `arrived` and the readers are called from the engine's thread.
    """

    def __init__(self, model: str, slots: int, *, drafter: str = "", length: int | None = None) -> None:
        self.model, self.slots, self.drafter, self.length = model, slots, drafter, length
        self.started = time.time()
        self._began = time.monotonic()
        self._counts: list[Any] = [0] * SIZE
        self._readings: deque[tuple[float, list[Any]]] = deque(maxlen=int(LATENCY_S / READING_S) + 2)
        self._readings.append((self._began, self._counts.copy()))
        self._next_reading = self._began + READING_S
        self._busy_since = self._stepped = self._began
        # ordered sets, whose keys are added and removed atomically
        self._waiting: dict[Call, None] = {}
        self._running: dict[Call, None] = {}
        self._unwritten: dict[Call, None] = {}
        self._endings = dict.fromkeys(ENDINGS, 0)
        self._alarms = dict.fromkeys(ALARMS, 0)
        self._refused: dict[str, int] = {"queue_full": 0}
        self._lock = threading.Lock()
        """For the counts of other threads."""
        self._process = ProcessCollector(registry=None)

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrived(self, call: Call) -> None:
        """The call is waiting for a slot."""
        self._waiting[call] = None

    def refused(self, reason: str) -> None:
        """A request was refused; any thread."""
        with self._lock:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def alarm(self, kind: str) -> None:
        """The drafter failed: drafter_raised, drafter_hung or invalid_draft; any thread."""
        with self._lock:
            self._alarms[kind] = self._alarms.get(kind, 0) + 1

    def admitted(self, call: Call) -> None:
        """The call has a slot."""
        now = time.monotonic()
        if not self._running:
            self._busy_since = now
        self._running[call] = self._unwritten[call] = None
        self._waiting.pop(call, None)
        self._observe(QUEUED, now - call.arrived)
        self._counts[QUERIED] += len(call.request.prompt)

    def cached(self, tokens: int) -> None:
        """This many prompt tokens were found in the prefix cache."""
        self._counts[CACHED] += tokens

    def stepped(self, record: StepRecord) -> None:
        """A step is over.  Takes some microseconds."""
        now, counts = time.monotonic(), self._counts
        if now >= self._next_reading:
            self._readings.append((now, counts.copy()))
            self._next_reading = now + READING_S
        num_live = len(record.tokens)
        # a count comes after the one that contains it, so that a copy made in between has no share above 1
        counts[PASSES] += 1
        counts[STEPS] += num_live
        counts[DRAFTS] += num_live - record.drafted.count(0)
        counts[DRAFTED] += sum(record.drafted)
        for depth in record.depths:
            if depth:
                counts[REACHED_BY + min(depth, DEEPEST)] += 1
        counts[ACCEPTED] += sum(record.accepted)
        for accepted in record.accepted:
            if accepted:
                counts[ACCEPTED_BY + min(accepted, DEEPEST)] += 1
        counts[GENERATED] += sum(record.tokens)
        counts[READ] += record.read_tokens
        counts[DRAFT_S] += record.draft_s
        counts[VERIFY_S] += record.verify_s
        counts[OTHER_S] += record.other_s
        between = now - record.seconds - self._busy_since  # prefill and output since the last step
        counts[READ_S if record.read_tokens else OTHER_S] += max(0.0, between)
        num_first = self._first_tokens(record.calls, now) if self._unwritten else 0
        if num_live > num_first:
            self._observe(GAP, now - self._stepped, num_live - num_first)
        self._busy_since = self._stepped = now

    def ended(self, call: Call, reason: str) -> None:
        """The call has its last token, or was cut off."""
        self._waiting.pop(call, None)
        self._running.pop(call, None)
        self._unwritten.pop(call, None)
        if reason in FINISHED:
            ended = call.finished or time.monotonic()
            self._observe(WHOLE, ended - call.arrived)
            if call.written > 1:
                self._observe(PER_TOKEN, (ended - call.first) / (call.written - 1))
        self._endings[reason] = self._endings.get(reason, 0) + 1

    def _first_tokens(self, calls: Iterable[Call], now: float) -> int:
        """Record the calls whose first step this is; returns their number."""
        new = [call for call in calls if call in self._unwritten]
        for call in new:
            del self._unwritten[call]
            self._observe(FIRST, now - call.arrived)
            self._counts[PROMPT] += len(call.request.prompt)
        return len(new)

    def _observe(self, histogram: int, seconds: float, times: int = 1) -> None:
        self._counts[histogram + bisect_left(EDGES, seconds)] += times
        self._counts[histogram + WIDTH - 1] += times * seconds

    # ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def text(self) -> str:
        """All metrics in Prometheus' text format; any thread."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        """All metrics, for a registry of prometheus_client."""
        counts = self._counts.copy()
        for name, place, help in COUNTERS:
            yield self._family(CounterMetricFamily, name, help, {"": counts[place]})
        depth = deepest(counts)
        for name, place, help in POSITIONS:
            by_position = {str(k): count for k, count in enumerate(num_reaching(counts, place)[:depth])}
            yield self._family(CounterMetricFamily, name, help, by_position, "position")
        seconds = {part: counts[place] for part, place in PARTS}
        yield self._family(CounterMetricFamily, "step_seconds", "Seconds by what they were spent on.", seconds, "part")
        for name, place, help in HISTOGRAMS:
            family = HistogramMetricFamily(PREFIX + name, help, labels=["model_name"])
            family.add_metric([self.model], *buckets(counts, place))
            yield family
        yield from self._labelled_counters()
        yield from self._gauges()
        yield GaugeMetricFamily("process_start_time_seconds", "When counting began.", self.started)
        yield from (one for one in self._process.collect() if one.name != "process_start_time_seconds")

    def snapshot(self) -> dict[str, Any]:
        """Figures of the page, ready for JSON; any thread.  None means no data.

        Rates, `batch` and `time` cover the last 5 s, acceptance covers the last minute, latencies the last five.
        `time` has shares that sum to 1.
        """
        now, counts = time.monotonic(), self._counts.copy()
        seconds, moment = self._since(now - NOW_S, now, counts)
        _, recent = self._since(now - RECENT_S, now, counts)
        _, minutes = self._since(now - LATENCY_S, now, counts)
        with self._lock:
            alarms, refused = self._alarms.copy(), self._refused.copy()
        return {
            "model": self.model, "drafter": self.drafter, "slots": self.slots,
            "uptime_s": round(now - self._began, 1), "running": len(self._running), "waiting": len(self._waiting),
            "reading": len(self._unwritten), "batch": share(moment[STEPS], moment[PASSES]),
            "tokens_per_s": round(moment[GENERATED] / seconds, 2),
            "prompt_tokens_per_s": round(moment[READ] / seconds, 2),
            "history": {"seconds": HISTORY_S, "tokens_per_s": self._history(now, counts)},
            "tokens_per_step": share(recent[GENERATED], recent[STEPS]),
            "tokens_per_draft": share(recent[DRAFTS] + recent[ACCEPTED], recent[DRAFTS]),
            "draft_acceptance": share(recent[ACCEPTED], recent[DRAFTED]),
            "accepted_by_depth": by_depth(recent), "is_speculating": is_speculating(moment),
            "time": shares_of_time(moment, seconds),
            "first_token_s": quantiles(minutes, FIRST), "gap_s": quantiles(minutes, GAP),
            "kv_cache_usage": self._usage(), "alarms": alarms, "refused": refused, "finished": self._endings.copy(),
            "totals": {name: counts[place] for name, place, _ in COUNTERS},
        }  # fmt: skip

    def _family(
        self, kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help: str,
        values: Mapping[str, float], label: str | None = None,
    ) -> CounterMetricFamily | GaugeMetricFamily:  # fmt: skip
        """values: by the label's value; without a label, a single value under any key."""
        family = kind(PREFIX + name, help, labels=["model_name"] if label is None else ["model_name", label])
        for label_value, value in values.items():
            family.add_metric([self.model] if label is None else [self.model, label_value], value)
        return family

    def _labelled_counters(self) -> Iterator[Metric]:
        with self._lock:
            alarms, refused = self._alarms.copy(), self._refused.copy()
        for name, help, label, values in (
            ("request_success", "Requests that ended, by reason.", "finished_reason", self._endings.copy()),
            ("alarms", "Failures of the drafter, by kind; the answers were decoded without drafts.", "kind", alarms),
            ("requests_refused", "Requests that were refused, by reason.", "reason", refused),
        ):
            yield self._family(CounterMetricFamily, name, help, values, label)

    def _gauges(self) -> Iterator[Metric]:
        for name, help, value in (
            ("num_requests_running", "Requests that have a slot.", len(self._running)),
            ("num_requests_waiting", "Requests that are waiting for a slot.", len(self._waiting)),
            ("num_slots", "Requests that can be decoded at once.", self.slots),
            ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", self._usage()),
        ):
            if value is not None:
                yield self._family(GaugeMetricFamily, name, help, {"": value})

    def _usage(self) -> float | None:
        """Share of the slots' tokens that are in use; None if the length of a slot is unknown."""
        if not self.length:
            return None
        used = sum(len(call.request.prompt) + call.written for call in list(self._running))
        return min(1.0, used / (self.slots * self.length))

    # ── periods ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _since(self, at: float, now: float, counts: Sequence[Any]) -> tuple[float, list[Any]]:
        """Seconds since `at`, or a little earlier, and the counts of that period."""
        began, before = reading_at(list(self._readings), at, counts)
        return max(now - began, 1e-3), [after - was for after, was in zip(counts, before, strict=True)]

    def _history(self, now: float, counts: Sequence[Any]) -> list[float]:
        """Tokens/s in each of the last HISTORY_S seconds, the newest last."""
        points = [(at, reading[GENERATED]) for at, reading in self._readings.copy()]
        points.append((max(now, points[-1][0]), counts[GENERATED]))
        line: list[tuple[float, float]] = points[:1]
        for (before, _), (at, total) in itertools.pairwise(points):
            if at > before + READING_S:  # idle from then on
                line.append((before + READING_S, total))
            line.append((at, total))
        totals = [interpolated(line, now - HISTORY_S + second) for second in range(HISTORY_S + 1)]
        return [round(after - before, 1) for before, after in itertools.pairwise(totals)]
