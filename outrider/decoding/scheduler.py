"""Requests over slots: a few slots serve any number of requests; one that ends gives its slot to the next.

A `step` admits what waits, reads prompts, advances every slot by one verified step, and says what that wrote.  One
prompt, a benchmark and a server differ in how long they let a prompt hold up the others, and in nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import padded
from outrider.decoding.loop import StepRunner, nodes_wanted, step
from outrider.decoding.protocols import Drafter, Policy, Target
from outrider.decoding.state import DecodeState, FinishReason, Request, Scores

PREFILL_CHUNK, ON_A_CPU = 512, 96
"""Most prompt tokens of a slot that are read in one pass; a CPU's caches hold what fewer need."""
GRAIN = 8
"""Prompts are read in multiples of it beside steps."""


class Progress(NamedTuple):
    """What one step did to one request."""

    request: int
    """Its number."""
    row: int
    """Its slot, which it keeps until the next step."""
    tokens: list[int]
    """Committed."""
    accepted: int = 0
    """How many of the tokens were drafted, the first ones."""
    drafted: int = 0
    """Nodes that were verified."""
    reached: int = 0
    """How deep they go."""
    finish_reason: FinishReason | None = None
    text: str = ""
    """What became final of its text."""
    logprobs: tuple[Any, ...] = ()
    """One for each of the tokens, where the request asks for them."""
    error: Exception | None = None
    """Why it ends here, and without these tokens."""


class Pace:
    """How many prompt tokens are read between two steps of other slots: as many as hold them up for `STEPS`, and for
    longer where more prompts wait than texts are written."""

    STEPS, LATELY = 3.2, 0.3
    """Steps that reading may take as long as; and how much the newest time counts."""

    def __init__(self, chunk: int):
        """chunk: most of a pass."""
        self.chunk, self.step_s, self.token_s = chunk, 0.0, 0.0
        """Seconds from one step to the next without prompts, and of a prompt's token, lately; 0 before the first."""
        self.since, self.read_s = 0.0, 0.0
        """When the last step ended, 0 where nobody waits for the next; and seconds of reading since."""

    def stepped(self, now: float) -> None:
        """A step ended; what its callers do with it is part of the next one."""
        if self.since:
            seconds = now - self.since - self.read_s
            self.step_s += (self.LATELY if self.step_s else 1.0) * (seconds - self.step_s)
        self.since, self.read_s = now, 0.0

    def read(self, seconds: float, tokens: int) -> None:
        """So many tokens of prompts were read."""
        self.read_s += seconds
        self.token_s += (self.LATELY if self.token_s else 1.0) * (seconds / tokens - self.token_s)

    def most(self, live: int, reading: int) -> int:
        """Prompt tokens, where so many slots take part in steps, and so many prompts are to be read."""
        if not live:
            return self.chunk
        steps = self.STEPS * max(1.0, reading / live)
        wanted = steps * self.step_s / self.token_s if self.token_s else 0.0
        return max(GRAIN, min(int(wanted) // GRAIN * GRAIN, PREFILL_CHUNK))


class Prefixes:
    """A store of beginnings that prompts share; this one stores nothing."""

    def shares(self, state: DecodeState, row: int, other: int) -> bool:
        """Whether a slot could take over what another is about to read."""
        return False

    def take(self, target: Any, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, row: int) -> int:
        """Put what is known of a slot's prompt, after what it has read, into the cache; count it in
        `state.prefilled`.  Returns how many tokens that is."""
        return 0

    def put(
        self, target: Any, drafter: Drafter, cache: Any, state: DecodeState, counts: Mapping[int, int], scores: Scores
    ) -> None:
        """Store what a pass over the next counts[row] prompt tokens of these slots has computed."""


def everyone(state: DecodeState, error: Exception) -> Sequence[int]:
    """Slots that end where a step failed before its commit."""
    return list(state.rows)


class Scheduler:
    """Requests over the slots of `state`, each of at most `length` tokens, prompt and answer.

    Requests are numbered from 0 in the order in which they are added.  A slot stays as it was when its text ended until
    the next step, or `release`.
    """

    def __init__(
        self, target: Target, drafter: Drafter, policy: Policy, state: DecodeState, length: int, *,
        is_patient: bool = False, prefixes: Prefixes | None = None, takes_text: bool = True,
        suspects: Callable[[DecodeState, Exception], Sequence[int]] = everyone, tokens: int | None = None,
        fast: StepRunner | None = None,
    ):  # fmt: skip
        """is_patient: prompts are read whole before the next step; else in pieces, so that no text waits long.
        tokens: most of all texts together, drafted ones included; a request that would exceed it waits until others
        have ended.  takes_text: `Progress.text` is filled; else the caller asks the judge.
        suspects: slots that end where a step fails before its commit.  fast: takes the steps that it can; its caches
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
        """Whose request each slot serves, in the order of admission."""
        self.cached: dict[int, int] = {}
        """By request that was admitted: prompt tokens that `prefixes` knew."""
        self.pace = Pace(chunk_on(target.device))
        self.read_tokens, self.step_s = 0, 0.0
        """Prompt tokens read since the last verified step, and that step's seconds."""
        self._over: set[int] = set()
        """Slots whose requests have ended."""
        self._added = 0
        self._told: dict[int, int] = {}
        """By slot: tokens of its answer that were given out."""
        self._found: list[Progress] = []
        """Of the step that is under way."""

    @property
    def is_busy(self) -> bool:
        return bool(self.queue) or len(self.serving) > len(self._over)

    @property
    def free(self) -> int:
        """Slots that nobody has or waits for."""
        return len(self.state.tokens) - len(self.serving) + len(self._over) - len(self.queue)

    def fits(self, request: Request) -> bool:
        """Whether a request that is added now would be admitted by the next step."""
        waiting = [other for _, other in self.queue]
        return self.free > 0 and (not (self.serving or waiting) or self._has_room([*waiting, request]))

    def _has_room(self, more: Sequence[Request]) -> bool:
        """Whether there are tokens for these beside those that are served."""
        if self.tokens is None:
            return True
        live = [self.state.requests[row] for row in self.serving if row not in self._over]
        return sum(map(self._most, [*live, *more])) <= self.tokens

    def _most(self, request: Request) -> int:
        """Tokens that a request may come to hold."""
        whole = len(request.prompt) + request.max_new_tokens
        return min(whole, self.state.context) + draft_columns(self.drafter)

    def add(self, request: Request) -> int:
        """Queue a request; returns its number."""
        self._added += 1
        if request.max_new_tokens > 0:
            self.queue.append((self._added - 1, request))
        return self._added - 1

    def cancel(self, number: int) -> None:
        """Forget a request, wherever it is; there is no progress of it any more."""
        self.queue = deque(each for each in self.queue if each[0] != number)
        self._over.update(row for row, other in self.serving.items() if other == number)
        self.release()

    def release(self) -> None:
        """Free the slots of requests that have ended."""
        rows = [row for row in self.serving if row in self._over]
        if self.fast is not None:
            self.fast.free(rows)
        for row in rows:
            self.cache.free([row])
            self.state.free(row)
            self._over.discard(row)
            self.cached.pop(self.serving.pop(row), None)
        if rows:
            self.drafter.free(self.memory, rows)  # last: what is not ours may not return

    def step(self) -> list[Progress]:
        """Admit, read prompts, advance what is read by one verified step."""
        self._found += self._written({})
        if not self._found:  # else a step that did not come to its end, as its thread was given up, has left them
            self.release()
            if not self.state.rows:
                self.pace.since = 0.0
            self._admit()
            self._read()
            if self.state.rows:
                self._advance()
        found, self._found = self._found, []
        return found

    def _admit(self) -> None:
        for row in range(len(self.state.tokens)):
            if self.queue and row not in self.serving:
                number, request = self.queue[0]
                if self.serving and not self._has_room([request]):
                    return
                self.queue.popleft()
                self.serving[row], self._told[row] = number, 0
                self.state.admit(row, request, is_live=False)

    def _read(self) -> None:
        """Read prompts, the eldest first; those that are read take part in steps."""
        left = self.pace.most(len(self.state.rows), len(self.state.reading - self._over))
        while (reading := self.state.reading - self._over) and (self.is_patient or left >= GRAIN):
            left -= max(GRAIN, self._read_piece(reading, min(left, self.pace.chunk)))

    def _read_piece(self, reading: Collection[int], most: int) -> int:
        """One pass over prompts of these slots, of at most so many tokens where texts wait; returns how many."""
        state = self.state
        unread = ((row, self._unread(row)) for row in self.serving if row in reading)
        if self.is_patient:
            counts = {row: piece(left, self.pace.chunk) for row, left in unread if left > 0}
        else:
            counts = pieces(unread, most, lambda row, other: self.prefixes.shares(state, row, other))
        if counts:
            began = perf_counter()
            try:
                scores = read(self.target, self.drafter, self.cache, self.memory, state, counts)
                self.prefixes.put(self.target, self.drafter, self.cache, state, counts, scores)
            except Exception as error:
                self._fail(dict.fromkeys(counts, error))
            self.pace.read(perf_counter() - began, sum(counts.values()))
        ready = [row for row in reading if state.unread(row) <= 0 and row not in self._over]
        if ready:
            state.start(ready)
        self.read_tokens += sum(counts.values())
        return sum(counts.values())

    def _unread(self, row: int) -> int:
        """Prompt tokens left of a slot, once what others have read of the same beginning is taken over."""
        taken = self.prefixes.take(self.target, self.drafter, self.cache, self.memory, self.state, row)
        number = self.serving[row]
        self.cached[number] = self.cached.get(number, 0) + taken
        return self.state.unread(row)

    def _advance(self) -> None:
        began = perf_counter()
        try:
            accepted, errors = self._stepped()
        except Exception as error:
            self._fail(dict.fromkeys(self.suspects(self.state, error), error))
            return
        now = perf_counter()
        self.step_s = now - began
        self.pace.stepped(now)
        self._fail(errors)
        self._found += self._written(dict(zip(self.state.rows, accepted.counts, strict=True)))

    def _stepped(self) -> tuple[Accepted, Mapping[int, Exception]]:
        """One step of the live slots, by the fast runner where it can take it and drafts are wanted, or there are
        none."""
        state, fast = self.state, self.fast
        is_fast = fast is not None and fast.prepare(state)
        state.runner = "whole" if is_fast else "plain"
        wanted = nodes_wanted(self.target, self.drafter, self.policy, state)
        if fast is not None and is_fast and (any(wanted) or not fast.drafts):
            return fast.step(self.policy, state, wanted)
        if fast is not None:
            fast.leave(state)
        return step(self.target, self.drafter, self.policy, self.cache, self.memory, state, wanted)

    def _fail(self, errors: Mapping[int, Exception]) -> None:
        self._over.update(errors)
        self._found += [Progress(self.serving[row], row, [], error=error) for row, error in errors.items()]

    def _written(self, accepted: Mapping[int, int]) -> list[Progress]:
        """What is new of every text.  accepted: by slot."""
        state, found = self.state, []
        for b, row in enumerate(state.rows):
            if row in self._over:
                continue
            tokens = state.tokens[row][len(state.requests[row].prompt) + self._told[row] :]
            if not tokens:
                continue
            self._told[row] += len(tokens)
            text, logprobs = state.judge.told(row, len(tokens), self.takes_text)
            size, depth = (state.drafted[b], state.reached[b]) if accepted else (0, 0)
            own, reason = min(accepted.get(row, 0), len(tokens)), state.finished[row]
            found.append(Progress(self.serving[row], row, tokens, own, size, depth, reason, text, logprobs))
            if reason is not None:
                self._over.add(row)
        return found


def advance(
    target: Target, requests: Sequence[Request], drafter: Drafter, policy: Policy, state: DecodeState,
    tokens: int | None = None, fast: Callable[[int], StepRunner | None] = lambda length: None,
) -> Iterator[Progress]:  # fmt: skip
    """Serve requests over the slots of `state`, one step at a time; `state` can be read between steps.  tokens: as in
    `Scheduler`.  fast: makes the fast runner for texts of a length.  Raises the first error."""
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
    """Columns of a slot's cache besides its text's: for the longest draft, its anchor, and a probe's rows."""
    return max(drafter.limit, 1) + 1 + drafter.probe_rows


def chunk_on(device: torch.device) -> int:
    """Most prompt tokens of a slot in one pass of this device."""
    return min(PREFILL_CHUNK, ON_A_CPU) if device.type == "cpu" else PREFILL_CHUNK


def piece(left: int, most: int) -> int:
    """How many of a prompt's tokens one pass reads, about `most`: half as many more where these are the last."""
    return left if left <= most + most // 2 else most


def pieces(unread: Iterable[tuple[int, int]], most: int, is_shared: Callable[[int, int], bool]) -> dict[int, int]:
    """By slot, how many of its prompt's tokens are read now, about `most` of all together.

    unread: slots, the eldest first, with how many tokens each has left.  is_shared: whether two slots' prompts begin
    alike; the later one takes over in the next round what the first has read.
    """
    counts: dict[int, int] = {}
    for row, left in unread:
        if any(is_shared(row, other) for other in counts):
            continue
        count = piece(left, most)
        width = max(count, *counts.values(), 0)
        if counts and (len(counts) + 1) * width > most:  # one pass is as wide as the longest piece
            break
        if count > 0:
            counts[row] = count
    return counts


def prefill(target: Target, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, rows: Sequence[int]) -> None:
    """Read these slots' prompts up to the last token, which is the anchor, in chunks; the drafter reads each chunk."""
    most = chunk_on(target.device)
    while left := {row: count for row in rows if (count := state.unread(row))}:
        read(target, drafter, cache, memory, state, {row: min(count, most) for row, count in left.items()})


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
