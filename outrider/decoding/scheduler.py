"""Continuous batching: a few slots serve any number of requests; when one ends, its slot goes to the next.

A `step` admits waiting requests, reads prompts, advances every live slot by one verified step, and returns what is new.
A single prompt, a benchmark and a server differ only in how long a prompt may delay the other slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import padded
from outrider.decoding.loop import StepRunner, draft_budget, step
from outrider.decoding.protocols import Drafter, Policy, Target
from outrider.decoding.state import DecodeState, FinishReason, Request, Scores

PREFILL_CHUNK, CPU_PREFILL_CHUNK = 512, 96
"""Maximum number of prompt tokens of a slot in one pass; fewer on a CPU, whose caches are small."""
GRAIN = 8
"""Between steps, prompts are read in multiples of this many tokens."""


class Progress(NamedTuple):
    """What one step did to one request."""

    request: int
    """Its number."""
    row: int
    """Its slot, at least until the next step."""
    tokens: list[int]
    """Committed in this step."""
    accepted: int = 0
    """How many of the tokens were drafted; these come first."""
    drafted: int = 0
    """Number of verified nodes."""
    reached: int = 0
    """Their depth."""
    finish_reason: FinishReason | None = None
    text: str = ""
    """The part of its text that became final."""
    logprobs: tuple[Any, ...] = ()
    """One per token, if the request asks for them."""
    error: Exception | None = None
    """Why the request failed; it has no tokens then."""


class Pace:
    """How many prompt tokens are read between two steps of the live slots: as many as take `STEPS` steps, and more if
    more prompts than live slots are waiting."""

    STEPS, NEWEST = 3.2, 0.3
    """Duration of reading, in steps; and the weight of the newest time in the moving averages."""

    def __init__(self, chunk: int):
        """chunk: most prompt tokens of a slot in one pass."""
        self.chunk, self.step_s, self.token_s = chunk, 0.0, 0.0
        """Moving averages: seconds of a step without reading, and of a prompt token; 0 before the first."""
        self.since, self.read_s = 0.0, 0.0
        """When the last step ended (0 if no slot is live), and seconds of reading since then."""

    def stepped(self, now: float) -> None:
        """A step ended at `now`; what the caller does before the next step counts as part of that one."""
        if self.since:
            seconds = now - self.since - self.read_s
            self.step_s += (self.NEWEST if self.step_s else 1.0) * (seconds - self.step_s)
        self.since, self.read_s = now, 0.0

    def read(self, seconds: float, tokens: int) -> None:
        """This many prompt tokens were read."""
        self.read_s += seconds
        self.token_s += (self.NEWEST if self.token_s else 1.0) * (seconds / tokens - self.token_s)

    def most(self, live: int, reading: int) -> int:
        """Prompt tokens to read before the next step.  live, reading: numbers of live slots and of unread prompts."""
        if not live:
            return self.chunk
        steps = self.STEPS * max(1.0, reading / live)
        tokens = steps * self.step_s / self.token_s if self.token_s else 0.0
        return max(GRAIN, min(int(tokens) // GRAIN * GRAIN, PREFILL_CHUNK))


class Prefixes:
    """A cache of prefixes that prompts share; this one stores nothing."""

    def shares(self, state: DecodeState, row: int, other: int) -> bool:
        """Whether slot `row` could reuse what slot `other` is about to read."""
        return False

    def take(self, target: Any, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, row: int) -> int:
        """Copy the stored continuation of a slot's prompt so far into the cache, and count it in `state.prefilled`.
        Returns its number of tokens."""
        return 0

    def put(
        self, target: Any, drafter: Drafter, cache: Any, state: DecodeState, counts: Mapping[int, int], scores: Scores
    ) -> None:
        """Store the result of a pass over the next counts[row] prompt tokens of these slots."""


def all_live(state: DecodeState, error: Exception) -> Sequence[int]:
    """The slots that end when a step fails before its commit: all live ones."""
    return list(state.rows)


class Scheduler:
    """Serves requests over the slots of `state`, each of at most `length` tokens, prompt and answer.

    Requests are numbered from 0 in the order in which they are added.  A slot whose text has ended can be read until
    the next step or `release`.
    """

    def __init__(
        self, target: Target, drafter: Drafter, policy: Policy, state: DecodeState, length: int, *,
        is_patient: bool = False, prefixes: Prefixes | None = None, takes_text: bool = True,
        suspects: Callable[[DecodeState, Exception], Sequence[int]] = all_live, tokens: int | None = None,
        fast: StepRunner | None = None,
    ):  # fmt: skip
        """is_patient: read whole prompts before the next step; otherwise in chunks, so that live slots are not delayed.
        tokens: most tokens of all texts together, drafted ones included; a request that would exceed it waits until
        others have ended.  takes_text: fill `Progress.text`; otherwise the caller takes the text from the judge.
        suspects: the slots that end when a step fails before its commit.  fast: runs the steps that it can; its caches
        hold texts of `length`."""
        self.target, self.drafter, self.policy, self.state = target, drafter, policy, state
        self.is_patient, self.takes_text, self.suspects, self.tokens = is_patient, takes_text, suspects, tokens
        self.prefixes = Prefixes() if prefixes is None else prefixes
        self.fast = fast
        if fast is not None:
            self.cache, self.memory = fast.cache, fast.memory
        else:
            self.cache = target.allocate(len(state.tokens), length + draft_columns(drafter))
            drafter.refresh()
            self.memory = drafter.allocate(self.cache)
        state.judge.allocate(target, self.cache)
        self.queue: deque[tuple[int, Request]] = deque()
        self.serving: dict[int, int] = {}
        """By slot: its request's number, in the order of admission."""
        self.cached: dict[int, int] = {}
        """By admitted request: prompt tokens found in `prefixes`."""
        self.pace = Pace(max_prefill_chunk(target.device))
        self.read_tokens, self.step_s = 0, 0.0
        """Number of prompt tokens read since the caller last reset this; and the seconds of the last step."""
        self._ended: set[int] = set()
        """Slots whose requests have ended and that are not yet freed."""
        self._added = 0
        self._emitted: dict[int, int] = {}
        """By slot: number of tokens of its answer that were returned."""
        self._progress: list[Progress] = []
        """Progress of the current step."""

    @property
    def is_busy(self) -> bool:
        return bool(self.queue) or len(self.serving) > len(self._ended)

    @property
    def free(self) -> int:
        """Free slots that no queued request will take."""
        return len(self.state.tokens) - len(self.serving) + len(self._ended) - len(self.queue)

    def fits(self, request: Request) -> bool:
        """Whether a request added now would be admitted by the next step."""
        waiting = [other for _, other in self.queue]
        return self.free > 0 and (not (self.serving or waiting) or self._has_room([*waiting, request]))

    def _has_room(self, more: Sequence[Request]) -> bool:
        """Whether these requests fit into `tokens` in addition to those being served."""
        if self.tokens is None:
            return True
        live = [self.state.requests[row] for row in self.serving if row not in self._ended]
        return sum(map(self._most, [*live, *more])) <= self.tokens

    def _most(self, request: Request) -> int:
        """Maximum number of tokens that a request may reach."""
        whole = len(request.prompt) + request.max_new_tokens
        return min(whole, self.state.context) + draft_columns(self.drafter)

    def add(self, request: Request) -> int:
        """Queue a request; returns its number."""
        self._added += 1
        if request.max_new_tokens > 0:
            self.queue.append((self._added - 1, request))
        return self._added - 1

    def cancel(self, number: int) -> None:
        """Drop a request, queued or running; it makes no more progress."""
        self.queue = deque(each for each in self.queue if each[0] != number)
        self._ended.update(row for row, other in self.serving.items() if other == number)
        self.release()

    def release(self) -> None:
        """Free the slots of requests that have ended."""
        rows = [row for row in self.serving if row in self._ended]
        if self.fast is not None:
            self.fast.free(rows)
        for row in rows:
            self.cache.free([row])
            self.state.free(row)
            self._ended.discard(row)
            self.cached.pop(self.serving.pop(row), None)
        if rows:
            self.drafter.free(self.memory, rows)  # last, since a drafter is third-party code and may not return

    def step(self) -> list[Progress]:
        """Admit requests, read prompts, and advance the live slots by one verified step."""
        self._progress += self._new_progress({})
        if not self._progress:  # otherwise it was left by a step that was abandoned with its thread
            self.release()
            if not self.state.rows:
                self.pace.since = 0.0
            self._admit()
            self._read()
            if self.state.rows:
                self._advance()
        progress, self._progress = self._progress, []
        return progress

    def _admit(self) -> None:
        for row in range(len(self.state.tokens)):
            if self.queue and row not in self.serving:
                number, request = self.queue[0]
                if self.serving and not self._has_room([request]):
                    return
                self.queue.popleft()
                self.serving[row], self._emitted[row] = number, 0
                self.state.admit(row, request, is_live=False)

    def _read(self) -> None:
        """Read prompts, the oldest request first; slots whose prompt has been read become live."""
        left = self.pace.most(len(self.state.rows), len(self.state.reading - self._ended))
        while (reading := self.state.reading - self._ended) and (self.is_patient or left >= GRAIN):
            left -= max(GRAIN, self._read_chunk(reading, min(left, self.pace.chunk)))

    def _read_chunk(self, reading: Collection[int], most: int) -> int:
        """One pass over prompts of these slots, of at most `most` tokens unless is_patient; returns the number read."""
        state = self.state
        unread = ((row, self._unread(row)) for row in self.serving if row in reading)
        if self.is_patient:
            counts = {row: chunk_size(left, self.pace.chunk) for row, left in unread if left > 0}
        else:
            counts = chunk_sizes(unread, most, lambda row, other: self.prefixes.shares(state, row, other))
        if counts:
            began = perf_counter()
            try:
                scores = read(self.target, self.drafter, self.cache, self.memory, state, counts)
                self.prefixes.put(self.target, self.drafter, self.cache, state, counts, scores)
            except Exception as error:
                self._fail(dict.fromkeys(counts, error))
            self.pace.read(perf_counter() - began, sum(counts.values()))
        ready = [row for row in reading if state.unread(row) <= 0 and row not in self._ended]
        if ready:
            state.start(ready)
        self.read_tokens += sum(counts.values())
        return sum(counts.values())

    def _unread(self, row: int) -> int:
        """Number of a slot's unread prompt tokens, after reusing what is stored of its prefix."""
        reused = self.prefixes.take(self.target, self.drafter, self.cache, self.memory, self.state, row)
        number = self.serving[row]
        self.cached[number] = self.cached.get(number, 0) + reused
        return self.state.unread(row)

    def _advance(self) -> None:
        began = perf_counter()
        try:
            accepted, errors = self._step()
        except Exception as error:
            self._fail(dict.fromkeys(self.suspects(self.state, error), error))
            return
        now = perf_counter()
        self.step_s = now - began
        self.pace.stepped(now)
        self._fail(errors)
        self._progress += self._new_progress(dict(zip(self.state.rows, accepted.counts, strict=True)))

    def _step(self) -> tuple[Accepted, Mapping[int, Exception]]:
        """One step of the live slots, by the fast runner if it can run it; a runner that drafts is not used for plain
        steps."""
        state, fast = self.state, self.fast
        is_fast = fast is not None and fast.prepare(state)
        state.runner = "whole" if is_fast else "plain"
        budget = draft_budget(self.target, self.drafter, self.policy, state)
        if fast is not None and is_fast and (any(budget) or not fast.drafts):
            return fast.step(self.policy, state, budget)
        if fast is not None:
            fast.leave(state)
        return step(self.target, self.drafter, self.policy, self.cache, self.memory, state, budget)

    def _fail(self, errors: Mapping[int, Exception]) -> None:
        self._ended.update(errors)
        self._progress += [Progress(self.serving[row], row, [], error=error) for row, error in errors.items()]

    def _new_progress(self, accepted: Mapping[int, int]) -> list[Progress]:
        """What is new in every text.  accepted: number of accepted nodes, by slot."""
        state, progress = self.state, list[Progress]()
        for b, row in enumerate(state.rows):
            if row in self._ended:
                continue
            tokens = state.tokens[row][len(state.requests[row].prompt) + self._emitted[row] :]
            if not tokens:
                continue
            self._emitted[row] += len(tokens)
            text, logprobs = state.judge.take_output(row, len(tokens), self.takes_text)
            size, depth = (state.drafted[b], state.reached[b]) if accepted else (0, 0)
            count, reason = min(accepted.get(row, 0), len(tokens)), state.finished[row]
            progress.append(Progress(self.serving[row], row, tokens, count, size, depth, reason, text, logprobs))
            if reason is not None:
                self._ended.add(row)
        return progress


def advance(
    target: Target, requests: Sequence[Request], drafter: Drafter, policy: Policy, state: DecodeState,
    tokens: int | None = None, fast: Callable[[int], StepRunner | None] = lambda length: None,
) -> Iterator[Progress]:  # fmt: skip
    """Serve requests over the slots of `state`, one step at a time; `state` can be read between steps.  tokens: as in
    `Scheduler`.  fast: makes a fast runner for texts of this length.  Raises the first error."""
    lengths = [len(request.prompt) + request.max_new_tokens for request in requests if request.max_new_tokens > 0]
    if not lengths:
        return
    length = min(max(lengths), state.context)
    runner = fast(length)
    scheduler = Scheduler(target, drafter, policy, state, length, is_patient=True, tokens=tokens, fast=runner)
    for request in requests:
        scheduler.add(request)
    while scheduler.is_busy:
        for progress in scheduler.step():
            if progress.error is not None:
                raise progress.error
            yield progress
    scheduler.release()
    if runner is not None:
        runner.end()


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def draft_columns(drafter: Drafter) -> int:
    """Columns of a slot's cache beyond its text: the longest draft, its anchor, and the rows of a probe."""
    return max(drafter.limit, 1) + 1 + drafter.probe_rows


def max_prefill_chunk(device: torch.device) -> int:
    """Maximum number of prompt tokens of a slot in one pass on this device."""
    return min(PREFILL_CHUNK, CPU_PREFILL_CHUNK) if device.type == "cpu" else PREFILL_CHUNK


def chunk_size(left: int, most: int) -> int:
    """Prompt tokens to read in one pass, about `most`: up to half as many more if that finishes the prompt."""
    return left if left <= most + most // 2 else most


def chunk_sizes(unread: Iterable[tuple[int, int]], most: int, is_shared: Callable[[int, int], bool]) -> dict[int, int]:
    """Prompt tokens to read in the next pass, by slot, about `most` in total.

    unread: slots, the oldest request first, with their number of unread tokens.  is_shared: whether two slots' prompts
    share a prefix; the later one then waits, and reuses what the first has read.
    """
    counts: dict[int, int] = {}
    for row, left in unread:
        if any(is_shared(row, other) for other in counts):
            continue
        count = chunk_size(left, most)
        width = max(count, *counts.values(), 0)
        if counts and (len(counts) + 1) * width > most:  # a pass is as wide as its longest chunk
            break
        if count > 0:
            counts[row] = count
    return counts


def read(
    target: Target, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, counts: Mapping[int, int]
) -> Scores:
    """One pass over the next counts[row] prompt tokens of each of these slots."""
    rows, lengths = list(counts), list(counts.values())
    starts = [state.prefilled[row] for row in rows]
    chunks = [state.tokens[row][at : at + length] for row, at, length in zip(rows, starts, lengths, strict=True)]
    scores = target.prefill(cache, rows, padded(chunks, 0, state.device), lengths, drafter.taps)
    for row, length in counts.items():
        state.prefilled[row] += length
    began = perf_counter()
    drafter.admit(memory, rows, state, scores, lengths)
    if state.is_drafting:
        state.read_s, state.read_tokens = state.read_s + perf_counter() - began, state.read_tokens + sum(lengths)
    return scores
