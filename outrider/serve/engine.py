"""The engine: one thread that continues the texts of many callers, over the slots of one batch.

A round of its loop drops what was cancelled, admits what waits, reads a piece of the prompts that are new, advances all
other slots by one verified step, and gives everybody what the step added.  So requests come and go without waiting for
each other, and a long prompt holds up the others for one piece at most.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from outrider import generation
from outrider.decoding.generate import draft_columns, read
from outrider.decoding.loop import step
from outrider.decoding.protocols import Drafter, Policy
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.policies import named
from outrider.sampling.judge import SamplingJudge
from outrider.serve.calls import (
    Call,
    Ending,
    EngineStopped,
    Listener,
    Output,
    QueueFull,
    WaitingCalls,
    over_by_now,
    seconds_to_next,
)
from outrider.serve.guard import Abandoned, GuardedDrafter, shape_of, suspects
from outrider.serve.metrics import StepRecord, Telemetry
from outrider.serve.outbox import Outbox, Post
from outrider.serve.prediction import with_predictions
from outrider.serve.prefixes import PrefixStore
from outrider.serve.reading import most_read, pieces
from outrider.targets.memory import slot_length
from outrider.targets.protocol import Target

log = logging.getLogger(__name__)

INTERNAL = "the engine failed on this request; the server's log says why"


class Engine:
    """Continues calls over `slots` slots of at most `length` tokens, prompt and answer; their memory is fixed.

    length: the target's context unless given, or less where that takes more than memory_bytes, which is half of what is
    free unless given.  policy, verification: as in `generate`; a policy that learns goes on learning from call to call.
    queue: most calls that wait.  prefix_bytes: memory for beginnings of prompts that calls share.
    post: runs callbacks elsewhere, such as `loop.call_soon_threadsafe`; called once a step, or once every interval_s
    seconds where steps are shorter, and less often with many calls.  First tokens and ends don't wait.
    drafter_timeout_s: seconds after which a drafter that does not return is given up.

    On a CPU, load and build what it needs in a thread that ends before `start`: OpenMP keeps the threads of everyone
    who ever computed, and with more of them than cores, those that decode sleep at every barrier instead of spinning.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, slots: int = 16, length: int | None = None,
        memory_bytes: int | None = None, queue: int = 256, policy: str | Policy | None = None,
        verification: str | SamplingJudge = "standard", prefix_bytes: int = 0, telemetry: Telemetry | None = None,
        post: Post = lambda run: run(), interval_s: float = 0.0, drafter_timeout_s: float = 10.0,
    ):  # fmt: skip
        self.target, self._outbox = target, Outbox(post, interval_s, self._text)
        self.telemetry = Telemetry(target.spec.name, slots) if telemetry is None else telemetry
        inner = Drafter() if drafter is None else drafter
        self._drafts_always, self._shape = bool(inner.limit), shape_of(inner)
        inner = with_predictions(inner, target.spec.vocabulary)
        self._limit = inner.limit
        self.drafter = GuardedDrafter(inner, self.telemetry.alarm)
        self.policy = named.policy(named.DEFAULT if policy is None else policy, self.drafter)
        more = draft_columns(self.drafter)
        self.slots, self.length = slots, slot_length(target, slots, length, memory_bytes, more)
        self.state = generation.batch(target, slots, verification)
        self.state.context = self.length
        self.cache = target.allocate(slots, self.length + more)
        self.memory = self.drafter.allocate(self.cache)
        self.state.judge.allocate(target, self.cache)
        self.prefixes = PrefixStore(prefix_bytes)
        self.error = ""
        """Why the engine ended by itself; "" while it works."""
        self.listener: Listener | None = None
        """Set before `start`."""
        self.replaced = 0.0
        """When another drafter was taken, by `time.monotonic`."""
        self._replacement: Drafter | None = None
        self._waiting = WaitingCalls(queue)
        self._serving: dict[int, Call] = {}  # by slot, in the order of admission
        self._cancelled: set[Call] = set()
        self._changed = threading.Condition()
        self._is_draining = self._is_stopping = self._is_warm = False
        self._drafter_timeout_s, self.threads = drafter_timeout_s, torch.get_num_threads()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._read_tokens = self._invalid = 0
        """Prompt tokens read since the last step; invalid nodes that were reported."""

    # ── for callers, from any thread ──────────────────────────────────────────────────────────────────────────────────

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._serving)

    @property
    def is_degraded(self) -> bool:
        """The drafter was switched off; answers are decoded plainly."""
        return self.drafter.is_off

    def start(self) -> Engine:
        self._decode_in_a_thread()
        if self._limit:
            threading.Thread(target=self._watch, name="outrider-watch", daemon=True).start()
        return self

    def submit(self, call: Call) -> Call:
        """Queue a call.  QueueFull: too many wait.  EngineStopped: no more are taken.  DataError: it can't fit."""
        prompt = len(call.request.prompt)
        if prompt >= self.length:
            raise DataError(
                f"the prompt has {prompt} tokens, and a slot holds {self.length} with the answer; shorten the prompt"
            )
        with self._changed:
            if self._is_draining or self._over.is_set():
                raise EngineStopped("the server is stopping and takes no more requests")
            if len(self._waiting) >= self._waiting.most:
                self.telemetry.refused("queue_full")
                raise QueueFull(len(self._waiting), seconds_to_next(list(self._serving.values()), self.slots))
            self._waiting.push(call)
            self.telemetry.arrived(call)
            self._changed.notify()
        return call

    def cancel(self, call: Call) -> None:
        """End a call; its slot is free after the step that is running.  One that has ended stays as it is."""
        with self._changed:
            self._cancelled.add(call)
            self._changed.notify()

    def replace(self, drafter: Drafter) -> None:
        """Draft with other weights from the next step on; slots go on with what is stored for them.  No text changes.

        Raises ConfigError for a drafter of another shape.
        """
        if (shape := shape_of(drafter)) != self._shape:
            raise ConfigError(f"a drafter like {shape} can't replace one like {self._shape}; start a server with it")
        with self._changed:
            self._replacement = drafter
            self._changed.notify()

    def stop(self, drain_s: float = 0.0) -> None:
        """Take no more calls, let those that are here end for so many seconds, then cancel the rest."""
        with self._changed:
            self._is_draining = True
            self._changed.notify()
        if drain_s and self._thread is not None:
            self._over.wait(drain_s)
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._over.wait(self._drafter_timeout_s + 60)

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _decode_in_a_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="outrider-decode", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self.threads)  # a new thread does not take over what was set in another
        try:
            with torch.inference_mode():
                if not self._is_warm:
                    self._warm_up()
                while self._round():
                    pass
        except Abandoned:
            return
        except BaseException as error:
            log.exception("the engine ends")
            self.error = f"{type(error).__name__}: {error}"
            self._end_all(INTERNAL)
        self._over.set()

    def _warm_up(self) -> None:
        """Have the slots' memory allocated before the first call."""
        self._is_warm = True
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self.target.device)
        self.target.prefill(self.cache, [0], nothing, [1], self.drafter.taps)
        self.cache.free([0])

    def _watch(self) -> None:
        """Gives decoding to another thread where the drafter hangs."""
        while not self._over.wait(min(1.0, self._drafter_timeout_s / 4)):
            if self.drafter.is_hung(self._drafter_timeout_s):
                self._decode_in_a_thread()
                return

    def _round(self) -> bool:
        """One round of the loop; False at the end."""
        self._emit(None)  # of a step that another thread did not finish
        if not self._admit():
            return False
        self._exchange()
        self._read()
        if self.state.rows:
            self._step()
        return True

    def _admit(self) -> bool:
        """Drop calls that are over, give free slots to calls that wait; sleeps while there is nothing to do."""
        with self._changed:
            while not (self._serving or self._waiting or self._is_draining or self._replacement):
                self._cancelled.clear()
                self._sleep()
            over = over_by_now([*self._waiting, *self._serving.values()], self._cancelled)
            self._cancelled = set()
            for call in over:
                self._waiting.remove(call)
        for call, reason in over.items():
            self._end(call, reason)
        with self._changed:
            if self._is_stopping or (self._is_draining and not (self._serving or self._waiting)):
                is_last = True
            else:
                is_last, free = False, [row for row in range(self.slots) if row not in self._serving]
                admitted = [(row, self._waiting.pop()) for row in free[: len(self._waiting)]]
        if is_last:
            self._end_all("the server is stopping")
            return False
        for row, call in admitted:
            call.admitted, call.slot = time.monotonic(), row
            self._serving[row] = call
            self.state.admit(row, call.request, is_live=False)
            self.telemetry.admitted(call)
        self._limit_drafts()
        return True

    def _sleep(self) -> None:
        """Until something changes; the listener knows that there are no calls meanwhile."""
        if self.listener is not None:
            self.listener.busy(False)
        self._changed.wait()
        if self.listener is not None:
            self.listener.busy(True)

    def _exchange(self) -> None:
        """Take another drafter where one was given."""
        with self._changed:
            drafter, self._replacement = self._replacement, None
        if drafter is not None:
            self.drafter.replace(with_predictions(drafter, self.target.spec.vocabulary))
            self.replaced = time.monotonic()

    def _limit_drafts(self) -> None:
        """Without a drafter, a step asks for drafts only while a request has a prediction."""
        if not self.drafter.is_off and not self._drafts_always:
            has_prediction = any(len(call.request.prediction) for call in self._serving.values())
            self.drafter.limit = self._limit if has_prediction else 0

    def _read(self) -> None:
        """Read a piece of the prompts that are new, the eldest first; those that are read take part in steps."""
        state = self.state
        most = most_read(len(state.reading), len(state.rows))
        counts = pieces(self._unread(), most, functools.partial(self.prefixes.shares, state))
        if counts:
            try:
                scores = read(self.target, self.drafter, self.cache, self.memory, state, counts)
                self.prefixes.put(self.target, self.drafter, self.cache, state, counts, scores)
            except Exception as error:
                self._fail(dict.fromkeys(counts, error))
        ready = [row for row in state.reading if state.unread(row) <= 0]
        if ready:
            state.start(ready)
        self._read_tokens += sum(counts.values())

    def _unread(self) -> Iterator[tuple[int, int]]:
        """Slots with unread prompts, and how much is left once what others have read of the same beginning is taken
        over."""
        for row, call in self._serving.items():
            if row in self.state.reading:
                taken = self.prefixes.take(self.target, self.drafter, self.cache, self.memory, self.state, row)
                call.cached += taken
                self.telemetry.cached(taken)
                yield row, self.state.unread(row)

    def _step(self) -> None:
        state, rows, began = self.state, self.state.rows, time.perf_counter()
        calls, before = [self._serving[row] for row in rows], [len(state.tokens[row]) for row in rows]
        counts = [0] * len(rows)
        try:
            counts = step(self.target, self.drafter, self.policy, self.cache, self.memory, state).counts
        except Exception as error:
            errors = dict(state.judge.errors)  # with those, the step is complete
            self._fail(errors or dict.fromkeys(suspects(state, error), error))
            if not errors:
                return
        seconds, timing = time.perf_counter() - began, state.timing
        written = [len(state.tokens[row]) - was for row, was in zip(rows, before, strict=True)]
        for call, count, nodes in zip(calls, counts, state.drafted, strict=True):
            call.steps, call.drafted, call.accepted = call.steps + 1, call.drafted + nodes, call.accepted + count
        if self.listener is not None:
            for call, depth, count in zip(calls, state.reached, counts, strict=True):
                call.drafts.append((depth, count))
        parts = timing.draft, timing.verify, timing.other
        record = StepRecord(calls, written, counts, state.drafted, state.reached, seconds, *parts, self._read_tokens)
        self.telemetry.stepped(record)
        self._read_tokens = 0
        if state.invalid > self._invalid:
            self._invalid = state.invalid
            self.telemetry.alarm("invalid_draft")
        self._emit(counts)

    def _fail(self, errors: Mapping[int, Exception]) -> None:
        """End the calls in these slots with what the error says, where a client may read it."""
        for row, error in errors.items():
            if not isinstance(error, OutriderError):
                log.error("a pass failed", exc_info=error)
            self._end(
                self._serving[row], "error", str(error) if isinstance(error, ConfigError | DataError) else INTERNAL
            )

    # ── what callers are given ────────────────────────────────────────────────────────────────────────────────────────

    def _emit(self, accepted: Sequence[int] | None) -> None:
        """Give every caller the tokens that are new, and free the slots of texts that ended."""
        state, now = self.state, time.monotonic()
        urgent: set[Call] = set()
        over = []
        for b, row in enumerate(state.rows):
            call, reason = self._serving[row], state.finished[row]
            if reason is not None:
                over.append(row)
            tokens = state.tokens[row][len(call.request.prompt) + call.written :]
            if not call.finished and (tokens or reason):
                output = self._output(row, tokens, accepted[b] if accepted else 0)
                self._outbox.put(call, output)
                if not call.first or reason is not None:
                    urgent.add(call)
                call.first, call.written = call.first or now, call.written + len(tokens)
            if not call.finished and reason is not None:
                self._ended(call, reason)
                if self.listener is not None:
                    self.listener.ended(call, state.tokens[row][len(call.request.prompt) :])
        self._outbox.send_due(now, len(self._serving), urgent)
        for row in over:
            self._free(row)

    def _text(self, call: Call) -> str:
        """What became final of its text since this was last asked."""
        judge: Any = self.state.judge
        return "" if call.slot is None else judge.text(call.slot)

    def _output(self, row: int, tokens: list[int], drafted: int) -> Output:
        judge: Any = self.state.judge
        logprobs = tuple(judge.logprobs[row][-len(tokens) :]) if tokens and judge.logprobs[row] else ()
        text = judge.text(row) if logprobs else ""  # which tell of each token's text
        return Output(tokens, text, min(drafted, len(tokens)), logprobs, self.state.finished[row])

    def _free(self, row: int) -> None:
        self.cache.free([row])
        self.state.free(row)
        self._serving.pop(row).slot = None
        self.drafter.free(self.memory, [row])  # last, since it may not return

    def _end(self, call: Call, reason: Ending, error: str = "") -> None:
        """End a call that did not end by itself."""
        self._outbox.put(call, Output(text=self._text(call), finish_reason=reason, error=error))
        if call.slot is not None:
            self._free(call.slot)
        self._outbox.send([call])
        self._ended(call, reason)

    def _ended(self, call: Call, reason: Ending) -> None:
        call.finished = time.monotonic()
        self.telemetry.ended(call, reason)

    def _end_all(self, error: str) -> None:
        with self._changed:
            waiting = [self._waiting.pop() for _ in range(len(self._waiting))]
        for call in [*self._serving.values(), *waiting]:
            self._end(call, "error", error)
