"""What a server does to have its drafter learn: it stores texts, runs the training job, takes versions that passed, and
goes back where acceptance drops.

The engine's thread hands over each text that ended, which is all that it does for this.  Everything else is one thread
here, which looks around once a second; whatever fails in it is logged, and serving goes on.
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
from outrider.targets.protocol import Target

log = logging.getLogger("outrider.serve")

LOOK_S = 1.0
"""Seconds between two rounds of the thread."""
MOST_WAITING = 10_000
"""Texts that may wait to be stored; more are not."""
RECENT = 256
"""Texts by which acceptance is judged, before a swap and after it."""
BEFORE = 128
"""Texts under the version that is served without which no other is taken: too few would hide that one is worse."""
FEWEST = 16
"""Texts under a new version without which it is not judged."""
TAIL = 0.001
"""Chance of going back where nothing got worse, at each look."""
IDLE_S = 5.0
"""Longest wait for a moment without requests, in which a version is loaded."""
SWAP_S = 10.0
"""Longest wait for the engine to take a drafter."""


class Job:
    """The training process, which can stand still."""

    def __init__(self, folder: Folder):
        command = [sys.executable, "-m", "outrider.serve.learning.job", str(folder.path), "--for-server"]
        with (folder.path / JOB_LOG).open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def stand_still(self, is_still: bool) -> None:
        self._process.send_signal(signal.SIGSTOP if is_still else signal.SIGCONT)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Learner:
    """Has the drafter of `engine` learn, from `start` to `stop`.  `engine` is not started yet; it drafts with the
    version that `folder` says."""

    def __init__(self, engine: Engine, target: Target, folder: Folder):
        self.engine, self.target, self.folder, self.config = engine, target, folder, folder.config
        self.state = folder.state()
        """What is served, as far as this server knows."""
        self._depths = engine.drafter.limit
        self._ended: queue.SimpleQueue[tuple[float, Text]] = queue.SimpleQueue()
        self._recent: deque[Counts] = deque(maxlen=RECENT)
        """Of texts under the version that is served."""
        self._before: list[Counts] = []
        """Of texts under the version before, as long as it may come back; empty otherwise."""
        self._before_version = 0
        self._num_new = 0
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
        """Store what waits; end the training, which begins again with the next start."""
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
        """A text ended by itself."""
        request = call.request
        if call.is_stored and request.sampling.grammar is None and self._ended.qsize() < MOST_WAITING:
            sampling = request.sampling
            drafts = [] if len(request.prediction) or request.max_draft == 0 else call.drafts
            text = Text(request.prompt, answer, drafts, sampling.temperature, sampling.top_k, sampling.top_p)
            self._ended.put((call.admitted, text))

    def busy(self, is_busy: bool) -> None:
        """Requests are there, or none is left."""
        with self._busy_lock:
            self._is_busy = is_busy
            if self._job is not None and not self.config.while_busy:
                self._job.stand_still(is_busy)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(LOOK_S)
            acts = [self._store, self._go_back_if_worse, self._obey, self._take_version, self._train]
            for act in acts[:1] if is_last else acts:
                try:
                    act()
                except Exception as error:  # whatever is wrong with learning, requests are served
                    self._warn(error)

    def _warn(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason in self._warned:
            return
        self._warned.add(reason)
        log.error("the drafter can't learn: %s; requests are served as before", reason, exc_info=error)
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
        if texts:
            self._num_new += self.folder.buffer.add(texts)["train"]

    def _train(self) -> None:
        """Start the job where there is enough to train on; note its end."""
        if self._job is not None and self._job.code is not None:
            if self._job.code:
                self.folder.log("failed", reason=f"the training ended with {self._job.code}; see {JOB_LOG}")
            self._job = None
        is_due = self._num_new >= self.config.every_texts and not self._before and not self.engine.is_degraded
        if self._job is None and is_due:
            self._num_new = 0
            with self._busy_lock:
                self._job = Job(self.folder)
            self.busy(self._is_busy)

    def _take_version(self) -> None:
        """Serve a version that passed, once there is something to compare it with."""
        for version in [one for one in self.folder.versions() if one > self.state.newest]:
            result = self.folder.result(version)
            if not result["passed"] or result["from"] != self.state.version:
                self._use(self.state.version, version)
                continue
            if len(self._recent) < BEFORE or self._before or self.engine.is_degraded:
                return
            before, texts = self.state.version, list(self._recent)
            self._use(before, version)  # not again, should it fail
            self._swap(version)
            self.state = State(version, version)
            if self.folder.state().version == before:  # nobody asked for another meanwhile
                self._use(version, version)
            self._before, self._before_version = texts, before
            self.folder.log("swapped", version=version, **{"from": before})

    def _obey(self) -> None:
        """Serve the version that somebody asked for, such as `outrider learning undo`."""
        requested = self.folder.state()
        if requested.version != self.state.version:
            self._swap(requested.version)
            self.folder.log("swapped", version=requested.version, asked=True)
            self._before = []
        self.state = requested

    def _go_back_if_worse(self) -> None:
        """Compare texts since the last swap with those before it, until there are enough to trust the version."""
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
        """Load a version and have the engine draft with it."""
        until = time.monotonic() + IDLE_S
        while self._is_busy and time.monotonic() < until:
            time.sleep(0.01)
        # in a thread that ends, as when a server starts: OpenMP keeps the threads of everyone who ever computed
        with ThreadPoolExecutor(1, "outrider-load") as loading:
            drafter = loading.submit(_loaded, self.folder, version, self.target, self.engine.threads).result()
        before, until = self.engine.replaced, time.monotonic() + SWAP_S
        self.engine.replace(drafter)
        while self.engine.replaced == before:
            if time.monotonic() > until:
                raise OutriderError(f"the engine did not take version {version} within {SWAP_S:g} s")
            time.sleep(0.001)
        self._recent.clear()


def _loaded(folder: Folder, version: int, target: Target, threads: int) -> Drafter:
    torch.set_num_threads(threads)
    return load_drafter(folder.checkpoint(version), target)


def figures_of(comparison: Change, texts: int) -> dict[str, Any]:
    highest = comparison.highest if math.isfinite(comparison.highest) else None
    return {
        "tokens_per_draft": {"old": round(comparison.old, 4), "new": round(comparison.new, 4)}, "texts": texts,
        "at_most": None if highest is None else round(highest, 4),
    }  # fmt: skip
