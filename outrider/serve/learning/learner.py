"""Online learning in the server: stores texts, runs the training job, serves versions that passed, and rolls back if
acceptance drops.

The engine's thread only hands over each finished text.  Everything else happens in one thread here, once a second;
its failures are logged, and serving continues.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from outrider.decoding.protocols import Drafter
from outrider.errors import OutriderError
from outrider.loading import load_drafter
from outrider.serve.calls import Call
from outrider.serve.engine import Engine
from outrider.serve.learning.buffer import Text
from outrider.serve.learning.folder import JOB_LOG, Folder, State
from outrider.serve.learning.live_acceptance import Change, Counts, change, counts_of
from outrider.serve.learning.updates import Updates
from outrider.targets.protocol import Target

log = logging.getLogger("outrider.serve")

LOOK_S = 1.0
"""Seconds between two rounds of the thread."""
MOST_WAITING = 10_000
"""Texts that may wait to be stored; further ones are dropped."""
RECENT = 256
"""Texts on which acceptance is measured, before and after a swap."""
BEFORE = 128
"""Minimum number of texts under the served version before another is swapped in: with fewer, a drop could go unnoticed.
"""
FEWEST = 16
"""Minimum number of texts under a new version before it is judged."""
TAIL = 0.001
"""Probability, per comparison, of a rollback although nothing got worse."""
IDLE_S = 5.0
"""Maximum wait for an idle moment in which to load a version."""
SWAP_S = 10.0
"""Maximum wait for the engine to replace its drafter."""


class Job:
    """The training process, which can be paused."""

    def __init__(self, folder: Folder):
        command = [sys.executable, "-m", "outrider.serve.learning.job", str(folder.path), "--for-server"]
        with (folder.path / JOB_LOG).open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def pause(self, is_paused: bool) -> None:
        self._process.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Learner:
    """Trains the drafter of `engine` from `start` to `stop`.  `engine` must not be started yet, and must draft with the
    served version of `folder`."""

    def __init__(self, engine: Engine, target: Target, folder: Folder):
        self.engine, self.target, self.folder, self.config = engine, target, folder, folder.config
        self.state = folder.state()
        """What this server serves."""
        self._depths = engine.drafter.limit
        self._ended: queue.SimpleQueue[tuple[float, Text]] = queue.SimpleQueue()
        self._recent: deque[Counts] = deque(maxlen=RECENT)
        """Counts of texts under the served version."""
        self._before: list[Counts] = []
        """Counts of texts under the previous version while a rollback is possible; otherwise empty."""
        self._before_version = 0
        self._num_new = 0
        self._updates = Updates(self._last_result())
        self._window_start = self._busy_since = time.monotonic()
        self._busy_s = 0.0
        """Decoding time from `_window_start`, where the last training began, to `_busy_since`."""
        self._job: Job | None = None
        self._is_busy = False
        self._busy_lock = threading.Lock()
        self._warned: set[str] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-learning", daemon=True)
        engine.listener = self

    def start(self) -> Learner:
        self.folder.log("started", version=self.state.version)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Store the waiting texts and stop the training, which restarts with the next `start`."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(30)
        if self._job is not None:
            self._job.end()

    def __enter__(self) -> Learner:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── called by the engine ──────────────────────────────────────────────────────────────────────────────────────────

    def ended(self, call: Call, answer: list[int]) -> None:
        """A text was finished."""
        request = call.request
        if call.is_stored and request.sampling.grammar is None and self._ended.qsize() < MOST_WAITING:
            sampling = request.sampling
            drafts = [] if len(request.prediction) or request.max_draft == 0 else call.drafts
            text = Text(request.prompt, answer, drafts, sampling.temperature, sampling.top_k, sampling.top_p)
            self._ended.put((call.admitted, text))

    def busy(self, is_busy: bool) -> None:
        """The engine now has requests, or none are left."""
        with self._busy_lock:
            before, self._busy_since = self._busy_since, time.monotonic()
            self._busy_s += (self._busy_since - before) * self._is_busy
            self._is_busy = is_busy
            if self._job is not None and not self.config.while_busy:
                self._job.pause(is_busy)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(LOOK_S)
            acts = [self._store, self._roll_back_if_worse, self._obey, self._take_version, self._train]
            for act in acts[:1] if is_last else acts:
                try:
                    act()
                except Exception as error:  # requests are served whatever is wrong with learning
                    self._warn(error)

    def _warn(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason in self._warned:
            return
        self._warned.add(reason)
        log.error("the drafter can't learn: %s; requests are still served", reason, exc_info=error)
        with suppress(OSError):
            self.folder.log("failed", reason=reason)

    def _store(self) -> None:
        texts: list[Text] = []
        with suppress(queue.Empty):
            while True:
                admitted, text = self._ended.get_nowait()
                texts.append(text)
                if admitted >= self.engine.replaced and text.is_drafted:
                    self._recent.append(counts_of(text, self._depths))
                    self._updates.add(self._recent[-1])
        if texts:
            self._num_new += self.folder.buffer.add(texts)["train"]

    def _train(self) -> None:
        """Start the job when there are enough texts; log its failure."""
        if self._job is not None and self._job.code is not None:
            if self._job.code:
                self.folder.log("failed", reason=f"the training ended with {self._job.code}; see {JOB_LOG}")
            elif (result := self._last_result()) is not None:
                self._updates.ended(result)
            self._job = None
        is_due = self._num_new >= self.config.every_texts and not self._before and not self.engine.is_degraded
        if self._job is None and is_due and self._pays():
            self._num_new = 0
            with self._busy_lock:
                self._busy_s, self._window_start = 0.0, self._busy_since
                self._job = Job(self.folder)
            self.busy(self._is_busy)

    def _pays(self) -> bool:
        if self.config.horizon_s is None:
            return True
        self.busy(self._is_busy)  # count up to now
        share = self._busy_s / (self._busy_since - self._window_start)
        return self._updates.payoff(share * self.config.horizon_s).is_due

    def _last_result(self) -> dict[str, Any] | None:
        versions = self.folder.versions()
        return self.folder.result(versions[-1]) if versions else None

    def _take_version(self) -> None:
        """Serve a version that passed, once there are enough texts to compare it with."""
        for version in [version for version in self.folder.versions() if version > self.state.newest]:
            result = self.folder.result(version)
            if not result["passed"] or result["from"] != self.state.version:
                self._use(self.state.version, version)
                continue
            if len(self._recent) < BEFORE or self._before or self.engine.is_degraded:
                return
            before, texts = self.state.version, list(self._recent)
            self._use(before, version)  # not retried if it fails
            self._swap(version)
            self.state = State(version, version)
            if self.folder.state().version == before:  # no other version was requested in the meantime
                self._use(version, version)
            self._before, self._before_version = texts, before
            self.folder.log("swapped", version=version, **{"from": before})

    def _obey(self) -> None:
        """Serve the version that was requested, for example by `outrider learning undo`."""
        requested = self.folder.state()
        if requested.version != self.state.version:
            self._swap(requested.version)
            self.folder.log("swapped", version=requested.version, asked=True)
            self._before = []
        self.state = requested

    def _roll_back_if_worse(self) -> None:
        """Compare the texts since the last swap with those before it, until there are enough to trust the version."""
        if not self._before or len(self._recent) < FEWEST:
            return
        comparison = change(list(self._recent), self._before, TAIL)
        version, before = self.state.version, self._before_version
        if comparison.is_drop:
            self._swap(before)
            self._use(before, self.state.newest)
            self.folder.log("rolled back", version=version, to=before, **figures_of(comparison, len(self._recent)))
        elif len(self._recent) == RECENT:
            self.folder.log("trusted", version=version, **figures_of(comparison, RECENT))
        else:
            return
        self._before = []

    def _use(self, version: int, newest: int) -> None:
        self.folder.use(version, newest)
        self.state = State(version, newest)

    def _swap(self, version: int) -> None:
        """Load a version and replace the engine's drafter with it."""
        until = time.monotonic() + IDLE_S
        while self._is_busy and time.monotonic() < until:
            time.sleep(0.01)
        # in a short-lived thread, since OpenMP keeps a thread pool for every thread that ever computed
        with ThreadPoolExecutor(1, "outrider-load") as loading:
            drafter = loading.submit(_loaded, self.folder, version, self.target, self.engine.threads).result()
        before, until = self.engine.replaced, time.monotonic() + SWAP_S
        self.engine.replace(drafter)
        while self.engine.replaced == before:
            if time.monotonic() > until:
                raise OutriderError(f"the engine did not load version {version} within {SWAP_S:g} s")
            time.sleep(0.001)
        self._recent.clear()
        self._updates.restart()


def _loaded(folder: Folder, version: int, target: Target, threads: int) -> Drafter:
    torch.set_num_threads(threads)
    return load_drafter(folder.checkpoint(version), target)


def figures_of(comparison: Change, texts: int) -> dict[str, Any]:
    highest = comparison.highest if math.isfinite(comparison.highest) else None
    return {
        "tokens_per_draft": {"old": round(comparison.old, 4), "new": round(comparison.new, 4)}, "texts": texts,
        "at_most": None if highest is None else round(highest, 4),
    }  # fmt: skip
