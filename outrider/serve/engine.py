"""The engine: one thread that generates the texts of many callers in the slots of one batch (continuous batching).

Each round of its loop drops cancelled calls, admits waiting calls to free slots, runs a step of the scheduler, and
sends every caller its new output.  So requests start and end independently, and a long prompt delays the others by at
most one chunk.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from outrider import generation
from outrider.costs.stored import cost_key
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.scheduler import Progress, Scheduler, draft_columns
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.fast.runner import runner_of
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
from outrider.serve.guard import Abandoned, GuardedDrafter, suspects
from outrider.serve.pending import PendingOutput, Post
from outrider.serve.prediction import with_predictions
from outrider.serve.prefixes import PrefixStore
from outrider.serve.records.metrics import StepRecord, Telemetry
from outrider.targets.cache.capacity import capacity
from outrider.targets.protocol import Target

log = logging.getLogger(__name__)

INTERNAL = "the engine failed on this request; see the server's log for the reason"


class Engine:
    """Generates the texts of calls in `slots` slots of at most `length` tokens, prompt and answer together.

    length: defaults to the target's context, or to what fits into memory_bytes, which defaults to half of the free
    memory.  Texts that together would exceed memory_bytes wait.
    policy, verification: as in `generate`; an adaptive policy keeps its state from call to call.
    queue: most waiting calls.  prefix_bytes: memory of the prefix cache.
    post: runs callbacks elsewhere, such as `loop.call_soon_threadsafe`; called once per step, or every interval_s
    seconds if steps are shorter, and less often with many calls.  First and last tokens are sent at once.
    drafter_timeout_s: seconds after which a drafter that does not return is switched off.

    On a CPU, load target and drafter in a thread that ends before `start`: OpenMP keeps a thread pool for every thread
    that ever computed, and with more threads than cores, the decoding ones sleep at every barrier instead of spinning.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, slots: int = 16, length: int | None = None,
        memory_bytes: int | None = None, queue: int = 256, policy: str | Policy | None = None,
        verification: str | SamplingJudge = "standard", prefix_bytes: int = 0, telemetry: Telemetry | None = None,
        post: Post = lambda run: run(), interval_s: float = 0.0, drafter_timeout_s: float = 10.0,
    ):  # fmt: skip
        self.target, self._pending = target, PendingOutput(post, interval_s, self._text)
        self.telemetry = Telemetry(target.spec.name, slots) if telemetry is None else telemetry
        inner = Drafter() if drafter is None else drafter
        self._drafts_always, self._shape = bool(inner.limit), cost_key(inner)
        stored_costs = functools.partial(generation.stored_costs, target, inner)
        inner = with_predictions(inner, target.spec.vocabulary)
        self._limit = inner.limit
        self.drafter = GuardedDrafter(inner, self.telemetry.alarm)
        self.policy = named.policy(named.DEFAULT if policy is None else policy, self.drafter, stored_costs)
        self.slots = slots
        self.length, tokens = capacity(target, slots, length, memory_bytes, draft_columns(self.drafter))
        self.state = generation.batch(target, slots, verification)
        self.state.context = self.length
        self.prefixes = PrefixStore(prefix_bytes)
        self.runner = runner_of(target, self.drafter, self.state, self.length)
        self.scheduler = Scheduler(
            target, self.drafter, self.policy, self.state, self.length, prefixes=self.prefixes, takes_text=False,
            suspects=suspects, tokens=tokens, fast=self.runner.whole,
        )  # fmt: skip
        self.error = ""
        """Why the engine failed; "" while it works."""
        self.listener: Listener | None = None
        """Set before `start`."""
        self.replaced = 0.0
        """When the drafter was last replaced, by `time.monotonic`."""
        self._replacement: Drafter | None = None
        self._waiting = WaitingCalls(queue)
        self._serving: dict[int, Call] = {}
        """By the scheduler's number, in order of admission."""
        self._cancelled: set[Call] = set()
        self._changed = threading.Condition()
        self._is_draining = self._is_stopping = self._is_warm = False
        self._drafter_timeout_s, self.threads = drafter_timeout_s, torch.get_num_threads()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._invalid = 0
        """Invalid nodes reported so far."""

    # ── for callers, from any thread ──────────────────────────────────────────────────────────────────────────────────

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._serving)

    @property
    def is_degraded(self) -> bool:
        """Whether the drafter was switched off; answers are then decoded without drafts."""
        return self.drafter.is_off

    def start(self) -> Engine:
        self._start_decoding()
        if self._limit:
            threading.Thread(target=self._watch, name="outrider-watch", daemon=True).start()
        return self

    def submit(self, call: Call) -> Call:
        """Queue a call.  Raises QueueFull; EngineStopped; DataError for a prompt that does not fit into a slot."""
        prompt = len(call.request.prompt)
        if prompt >= self.length:
            raise DataError(
                f"the prompt has {prompt} tokens, and prompt and answer have at most {self.length}; shorten the prompt"
            )
        with self._changed:
            if self._is_draining or self._over.is_set():
                raise EngineStopped("the server is stopping and accepts no more requests")
            if self._waiting.is_full(call.owner):
                self.telemetry.refused("queue_full")
                raise QueueFull(len(self._waiting), seconds_to_next(list(self._serving.values()), self.slots))
            self._waiting.push(call)
            self.telemetry.arrived(call)
            self._changed.notify()
        return call

    def cancel(self, call: Call) -> None:
        """Cancel a call; its slot is free after the current step.  Does nothing if the call has ended."""
        with self._changed:
            self._cancelled.add(call)
            self._changed.notify()

    def replace(self, drafter: Drafter) -> None:
        """Draft with other weights from the next step on; slots keep their memory.  No text changes.

        Raises ConfigError for a drafter of another shape.
        """
        if (shape := cost_key(drafter)) != self._shape:
            raise ConfigError(
                f"a drafter like {shape} can't replace one like {self._shape}; restart the server with it"
            )
        with self._changed:
            self._replacement = drafter
            self._changed.notify()

    def stop(self, drain_s: float = 0.0) -> None:
        """Accept no more calls, let the current ones end for `drain_s` seconds, then cancel the rest."""
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

    def _start_decoding(self) -> None:
        self._thread = threading.Thread(target=self._run, name="outrider-decode", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self.threads)  # the setting is per thread
        try:
            with torch.inference_mode():
                if not self._is_warm:
                    self._warm_up()
                while self._round():
                    pass
        except Abandoned:
            return
        except BaseException as error:
            log.exception("the engine failed")
            self.error = f"{type(error).__name__}: {error}"
            self._end_all(INTERNAL)
        self._over.set()

    def _warm_up(self) -> None:
        """Allocate the slots' memory before the first call."""
        self._is_warm = True
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self.target.device)
        self.target.prefill(self.scheduler.cache, [0], nothing, [1], self.drafter.taps)
        self.scheduler.cache.free([0])

    def _watch(self) -> None:
        """Continue decoding in another thread if the drafter hangs."""
        while not self._over.wait(min(1.0, self._drafter_timeout_s / 4)):
            if self.drafter.is_hung(self._drafter_timeout_s):
                self._start_decoding()
                return

    def _round(self) -> bool:
        """One round of the loop; False at the end."""
        if not self._admit():
            return False
        self._replace_drafter()
        progress = self.scheduler.step()
        self._note(progress)
        self._emit(progress)
        self.scheduler.release()
        return True

    def _admit(self) -> bool:
        """Drop finished calls and admit waiting calls to free slots; sleeps while idle."""
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
                is_last = False
                running = Counter(call.owner for call in self._serving.values())
                while (first := self._waiting.next(running, self.slots)) and self.scheduler.fits(first.request):
                    self._add(self._waiting.take(first))
                    running[first.owner] += 1
        if is_last:
            self._end_all("the server is stopping")
            return False
        self._limit_drafts()
        return True

    def _add(self, call: Call) -> None:
        call.admitted, call.number = time.monotonic(), self.scheduler.add(call.request)
        self._serving[call.number] = call
        self.telemetry.admitted(call)

    def _sleep(self) -> None:
        """Wait for a change; the listener is told that the engine is idle."""
        if self.listener is not None:
            self.listener.busy(False)
        self._changed.wait()
        if self.listener is not None:
            self.listener.busy(True)

    def _replace_drafter(self) -> None:
        """Replace the drafter if a new one is pending."""
        with self._changed:
            drafter, self._replacement = self._replacement, None
        if drafter is not None:
            if fast := self.scheduler.fast:
                fast.leave(self.state)
            self.drafter.replace(with_predictions(drafter, self.target.spec.vocabulary))
            if fast:
                fast.renew()
            self.replaced = time.monotonic()

    def _limit_drafts(self) -> None:
        """Without a drafter, draft only while a request has a prediction."""
        if not self.drafter.is_off and not self._drafts_always:
            has_prediction = any(len(call.request.prediction) for call in self._serving.values())
            self.drafter.limit = self._limit if has_prediction else 0

    def _note(self, progress: Sequence[Progress]) -> None:
        """Update call counts and telemetry."""
        for call in self._serving.values():
            cached = self.scheduler.cached.get(call.number, 0)
            self.telemetry.cached(cached - call.cached)
            call.cached = cached
        written = [each for each in progress if each.tokens]
        if not written:
            return
        calls = [self._serving[each.request] for each in written]
        for call, each in zip(calls, written, strict=True):
            call.steps, call.drafted = call.steps + 1, call.drafted + each.drafted
            call.accepted += each.accepted
            if self.listener is not None:
                call.drafts.append((each.reached, each.accepted))
        timing = self.state.timing
        self.telemetry.stepped(
            StepRecord(
                calls, [len(each.tokens) for each in written], [each.accepted for each in written],
                [each.drafted for each in written], [each.reached for each in written], self.scheduler.step_s,
                timing.draft, timing.verify, timing.other, self.scheduler.read_tokens,
            )
        )  # fmt: skip
        self.scheduler.read_tokens = 0
        if self.state.invalid > self._invalid:
            self._invalid = self.state.invalid
            self.telemetry.alarm("invalid_draft")

    # ── output ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _emit(self, progress: Sequence[Progress]) -> None:
        """Send every caller its new output."""
        now = time.monotonic()
        urgent: set[Call] = set()
        for each in progress:
            if each.error is None:
                call, reason = self._serving[each.request], each.finish_reason
                self._pending.put(call, Output(each.tokens, each.text, each.accepted, each.logprobs, reason))
                if not call.first or reason is not None:
                    urgent.add(call)
                call.first, call.slot, call.written = call.first or now, each.row, call.written + len(each.tokens)
        self._pending.send_due(now, len(self._serving), urgent)
        for each in progress:
            if each.finish_reason is not None:
                call = self._serving.pop(each.request)
                self._ended(call, each.finish_reason)
                if self.listener is not None:
                    self.listener.ended(call, self.state.tokens[each.row][len(call.request.prompt) :])
        for each in progress:  # last, since this frees the slots of all finished calls
            if each.error is not None:
                self._fail(self._serving[each.request], each.error)

    def _fail(self, call: Call, error: Exception) -> None:
        """End a call with the error's message, if the client is allowed to see it."""
        if not isinstance(error, OutriderError):
            log.error("a pass failed", exc_info=error)
        self._end(call, "error", str(error) if isinstance(error, ConfigError | DataError) else INTERNAL)

    def _text(self, call: Call) -> str:
        """Text that has become final since the last call."""
        judge: Any = self.state.judge
        return "" if call.slot is None else judge.text(call.slot)

    def _end(self, call: Call, reason: Ending, error: str = "") -> None:
        """End an unfinished call."""
        self._pending.put(call, Output(finish_reason=reason, error=error))
        self._pending.send([call])
        self._ended(call, reason)
        if self._serving.pop(call.number, None) is not None:
            self.scheduler.cancel(call.number)  # last, since a drafter may not return

    def _ended(self, call: Call, reason: Ending) -> None:
        call.finished = time.monotonic()
        self.telemetry.ended(call, reason)

    def _end_all(self, error: str) -> None:
        with self._changed:
            waiting = [*self._waiting]
            for call in waiting:
                self._waiting.remove(call)
        for call in [*self._serving.values(), *waiting]:
            self._end(call, "error", error)
