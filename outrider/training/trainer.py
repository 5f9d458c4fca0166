"""The training loop: read features, step, save.  On a CPU, N steps, a restart and N more steps equal 2N steps bit for
bit."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import checkpoint, machine
from outrider.errors import ConfigError, TrainingError
from outrider.nn.blocks import recompute
from outrider.nn.draft_model import Batch, DraftModel, FeatureSource
from outrider.processes import ALONE, Processes, check_parts
from outrider.storage.lock import held
from outrider.training import losses
from outrider.training.config import Config
from outrider.training.guard import Guard
from outrider.training.optimizers import Optimizers, pack
from outrider.training.progress.checkpoints import Probe, Probes, chosen, keep
from outrider.training.progress.metrics import Metrics, Unwritten
from outrider.training.progress.resume import joined_of, resume, resume_moments
from outrider.training.progress.throughput import Pace, StepFlops
from outrider.training.progress.trackers import Tracker, Trackers, named
from outrider.training.step import optimise
from outrider.weights import not_finite, weights_of

log = logging.getLogger(__name__)
LOOK_EVERY = 8
"""Steps between measurements of the mean overlap, for losses that depend on it."""
OnStep = Callable[[int, Mapping[str, Any]], None]


def with_steps(config: Config, source: FeatureSource) -> Config:
    """`config` with epochs converted to steps."""
    if config.epochs is None:
        return config
    steps = math.ceil(config.epochs * source.steps_per_pass / config.accumulate)
    return config.model_copy(update={"steps": steps, "epochs": None})


def with_dtype(config: Config, folder: str | Path, device: torch.device) -> Config:
    """`config` with `auto` resolved: the dtype of the checkpoint in `folder` if there is one, otherwise the fastest on
    the device."""
    if config.dtype != "auto":
        return config
    place = Path(folder) / "checkpoint"
    before: dict[str, Any] = {}
    if checkpoint.is_there(place):
        before = checkpoint.manifest_of(place)["training"].get("config") or {}
    return config.model_copy(update={"dtype": before.get("dtype") or machine.training_dtype(device)})


def train(
    model: DraftModel, source: FeatureSource, config: Config, folder: str | Path, *, on_step: OnStep | None = None,
    probe: Probe | None = None, reference: DraftModel | None = None, origin: str | None = None, force: bool = False,
    track: Sequence[Tracker] = (), processes: Processes = ALONE,
) -> Path:  # fmt: skip
    """Train `model` to `config.steps`, resuming from an existing checkpoint.  Returns the folder of the best checkpoint
    if `config.probe_every` is set, otherwise of the newest.

    If the checkpoint was trained with other `steps` or `epochs`, the learning rate joins the new curve; see
    `step.Joined`.
    folder: receives `checkpoint/`, `checkpoints/` and `metrics.jsonl`.  probe: measures the model at the end and every
    `config.probe_every` steps; its results go to the metrics.
    reference: the loaded model of `config.reference`.  origin: the trained drafter that `model` got its weights from;
    without one, `DraftModel.begin` initialises the model.
    force: resume even if settings differ from those of the checkpoint.
    track: trackers that receive the metrics, besides those in `config.track`.
    processes: those that train together, each with the same arguments; they split the rows of every batch, and the
    first one writes.
    Raises TrainingError after too many bad steps (see `Guard`), naming the first bad tensor, and if another process is
    training in `folder`; a good checkpoint is never overwritten.
    Raises KeyboardInterrupt on Ctrl-C or SIGTERM, after finishing and saving the current step.
    """
    folder = Path(folder)
    check_shared(model, config, processes.count)
    _check(model, config, folder, reference)
    busy = TrainingError(f"another process is training in {folder}; wait for it, or give this run another name")
    with held(folder, busy) if processes.is_first else nullcontext():
        torch.manual_seed(config.seed)
        model = model.float().train()
        recompute(model, config.recompute)
        config = processes.same(with_steps(with_dtype(config, folder, model.target.device), source))
        stripe, parts = processes.stripe(config.sequence_parallel), config.sequence_parallel
        if processes.count > 1:
            source.share(processes.rank // parts, processes.count // parts, stripe)
        processes.lay_out(config.distributed)
        loop = _Loop(model, source, config, folder, reference, processes)
        loop.begin(origin, force)
        with (
            _finish_the_step(processes) as asked_to_stop,
            _metrics(config, folder, loop.facts, track, processes) as metrics,
        ):
            probes = Probes(probe, config, folder, metrics, processes)
            while loop.step < config.last_step:
                if probes.is_due(loop.step):
                    probes.look(model, loop.step)
                if probes.is_over:
                    break
                figures = loop.take(metrics)
                if on_step is not None:
                    on_step(loop.step, figures)
                if loop.step == config.last_step:
                    processes.gather(None)  # no step is left in which to notice a stop requested meanwhile
                stops = asked_to_stop()
                loop.save(stops or probes.is_due(loop.step))
                if stops:
                    raise KeyboardInterrupt
            probes.look(model, loop.step)
    model.eval()
    return processes.same(chosen(folder) if processes.is_first else folder)


class _Loop:
    """The state of a training run between steps."""

    optimizer: Optimizers
    guard: Guard

    def __init__(
        self, model: DraftModel, source: FeatureSource, config: Config, folder: Path, reference: DraftModel | None,
        processes: Processes,
    ):  # fmt: skip
        self.model, self.source, self.config, self.folder = model, source, config, folder
        self.reference, self.processes, self.place = reference, processes, folder / "checkpoint"
        self.facts: dict[str, Any] = {
            "config": config.model_dump(mode="json"), "seconds": 0.0, "tokens": 0, "step": 0,
            "world_size": processes.count,
        }  # fmt: skip
        """Stored in a checkpoint's manifest."""

    @property
    def step(self) -> int:
        """Steps taken."""
        step: int = self.facts["step"]
        return step

    @property
    def seconds(self) -> float:
        """Duration of the training run, including time before it was resumed."""
        return self._before + time.monotonic() - self._began

    def begin(self, origin: str | None, force: bool) -> None:
        """Load weights and moments from the checkpoint if there is one; otherwise initialise them."""
        model, config, facts, layout = self.model, self.config, self.facts, self.processes.weights
        if origin is not None:  # its training texts are unknown
            facts |= {"from": origin, "ngram_hashes": [None]}
        facts |= resume(self.place, model, facts["config"], force)
        if self.processes.is_first:
            checkpoint.tidy(self.place)
        self._given = _name_texts(facts, self.source)
        if not self.step and origin is None:
            model.begin(self.source.counts)
        layout.spread(model)
        vocabulary, dtype = model.target.spec.vocabulary, getattr(torch, config.dtype)
        self.optimizer = Optimizers(model, config.optimizer, vocabulary, config.weight_decay, dtype, layout)
        resume_moments(self.place, model, self.optimizer, layout)
        self.guard = Guard(config, self.place, model, self.optimizer, self.processes)
        self._joined, self._before, self._began = joined_of(facts), facts["seconds"], time.monotonic()
        assert config.dtype != "auto"
        self._pace = Pace(model.target.device, config.dtype, facts["tokens"])

    def take(self, metrics: Metrics | Unwritten) -> dict[str, Any]:
        """Take one step and write it to the metrics if it is logged.  Returns its figures."""
        config, facts = self.config, self.facts
        is_logged = (self.step + 1) % config.log_every == 0 or self.step + 1 == config.steps
        looks = not losses.BY_OVERLAP.isdisjoint(config.loss) and self.step % LOOK_EVERY == 0
        batches, near = _Batches(self.source, config, self.step), facts.get("overlap", 0.0)
        flops = StepFlops() if is_logged else None
        figures = optimise(
            self.model, self.guard.held, batches, config, self.step, is_logged or looks, self.reference, near,
            self._joined, self.processes, flops,
        )  # fmt: skip
        facts["step"] += 1
        self.guard.meet(figures, facts, batches.again)
        if looks and "bad" not in figures:
            facts["overlap"] = figures["overlap"]
        facts["tokens"] += batches.tokens
        if flops is not None and "bad" not in figures:
            figures |= self._pace.facts(facts["tokens"], batches.tokens, flops.count)
            metrics.write({"step": self.step, **figures, "seconds": round(self.seconds, 2), "tokens": facts["tokens"]})
        return figures

    def save(self, is_asked: bool) -> None:
        """Write a checkpoint if requested or due.  If it is due, the previous one is kept as well."""
        is_due = self.step % self.config.save_every == 0 or self.step == self.config.steps
        if not (is_asked or is_due):
            return
        self.facts["seconds"] = round(self.seconds, 3)
        if is_due and self.processes.is_first and checkpoint.is_there(self.place):
            keep(self.folder, checkpoint.manifest_of(self.place)["training"]["step"], self.config.keep)
        _save(self.place, self.model, self.optimizer, self.facts, self._given, self.processes)


class _Batches:
    """The batches of one step, created lazily."""

    def __init__(self, source: FeatureSource, config: Config, step: int):
        self.source, self.numbers = source, range(step * config.accumulate, (step + 1) * config.accumulate)
        self.budget, self.tokens = config.tokens, 0
        """Tokens of texts so far, without padding."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.again():
            self.tokens += int((batch.whole.documents > 0).sum())
            yield batch

    def again(self) -> Iterator[Batch]:
        """The same batches again, without counting them."""
        return map(self.source.batch, self.numbers) if self.budget is None else self.source.packed(self.numbers)


def check_shared(model: DraftModel, config: Config, processes: int) -> None:
    """Raises ConfigError if this many processes can't train the model together."""
    parts = config.sequence_parallel
    check_parts(processes, parts)
    if parts > 1:
        model.check_split(parts)
    by_rows = processes // parts
    if config.batch < by_rows:
        raise ConfigError(
            f"train.batch {config.batch} is less than the {by_rows} processes that share its rows; set at least "
            f"{by_rows} (lower train.accumulate to keep the number of texts per step), or start fewer processes"
        )
    if by_rows > 1 and not model.rows_are_independent:
        raise ConfigError(
            f"drafter {model.config.kind!r} weighs a row by the other rows of its batch, so several processes can't "
            "share one; train it in one process"
        )


def _check(model: DraftModel, config: Config, folder: Path, reference: DraftModel | None) -> None:
    """Create the folder.  Refuse settings that can't work, and warn of a slow number type."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(
            f"can't make {folder} ({error.strerror}); give the run another name, or move the file that is in the way"
        ) from error
    if config.recompute and not recompute(model, True):
        raise ConfigError(
            f"train.recompute recomputes decoder layers of the draft model, but drafter {model.config.kind!r} has "
            "none of its own; leave it out, and set a lower train.tokens to save memory"
        )
    if config.select < 1 and reference is None:
        raise ConfigError(
            f"train.select {config.select} needs the reference {config.reference}; pass its loaded model as `reference`"
        )
    if reference is not None and (reference.config.kind, reference.taps) != (model.config.kind, model.taps):
        model_text, other = (f"a {each.config.kind} with taps {each.taps}" for each in (model, reference))
        raise ConfigError(
            f"train.reference is {other}, but the drafter is {model_text}; use a reference of the same kind and taps"
        )
    slow = machine.slow_type(config.dtype, machine.TRAINING) if model.target.device.type == "cpu" else None
    if slow is not None:
        log.warning("train.dtype=%s: %s; train.dtype=auto chooses that one", config.dtype, slow)


def _save(
    place: Path, model: DraftModel, optimizer: Optimizers, facts: Mapping[str, Any], hash_files: Mapping[str, Path],
    processes: Processes,
) -> None:  # fmt: skip
    """Write the checkpoint, independent of the number of processes, with the hashes of all training texts.  hash_files:
    those not stored yet."""
    state = pack(model, optimizer, processes.weights, processes.is_first)
    with processes.weights.whole(model) as whole:
        if whole is not None:
            _write(place, whole, state, facts, hash_files)


def _write(
    place: Path, model: DraftModel, state: Mapping[str, Tensor], facts: Mapping[str, Any],
    hash_files: Mapping[str, Path],
) -> None:  # fmt: skip
    """`_save` in the process that writes."""
    if lost := not_finite({**weights_of(model), **state}):
        raise TrainingError(
            f"step {facts['step']}: {', '.join(lost[:4])} is not finite, so no checkpoint is written; the last one is "
            f"intact; lower train.lr (now {facts['config']['lr']})"
        )
    there = checkpoint.whole(place)
    stored = {one["file"]: there / one["file"] for one in facts["ngram_hashes"] if one is not None}
    files = {name: path if path.exists() else hash_files.get(name, path) for name, path in stored.items()}
    files[checkpoint.PROVENANCE] = place.parent / checkpoint.PROVENANCE  # the run's, if it has one
    checkpoint.save(place, model, facts, state, files)


def _name_texts(facts: dict[str, Any], source: FeatureSource) -> dict[str, Path]:
    """Add the hashes of the texts that training now uses to `facts`; returns the new files.

    There is one entry per set of texts; None stands for texts with unknown hashes.
    """
    before = facts.setdefault("ngram_hashes", [])
    mine = getattr(source, "ngram_hashes", None)
    if facts["step"] == facts["config"]["steps"]:
        return {}
    if mine is None:
        facts["ngram_hashes"] = before if None in before else [*before, None]
        return {}
    if any(one is not None and one["hash"] == mine.facts["hash"] for one in before):
        return {}
    name = checkpoint.NGRAM_HASHES if not before else f"training.{len(before) + 1}.grams"
    facts["ngram_hashes"] = [*before, {key: value for key, value in mine.facts.items() if key != "of"} | {"file": name}]
    return {name: mine.path}


def _metrics(
    config: Config, folder: Path, facts: Mapping[str, Any], track: Sequence[Tracker], processes: Processes
) -> Metrics | Unwritten:  # fmt: skip
    """The metrics writer: `Metrics` in the first process, `Unwritten` in the others."""
    if not processes.is_first:
        return Unwritten(processes.same({}))
    step = facts["step"]
    metrics = Metrics(folder, step, Trackers([*track, *named(config.track, folder, step)], facts["config"]))
    processes.same(metrics.probes)
    return metrics


@contextmanager
def _finish_the_step(processes: Processes) -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or a scheduler's SIGTERM, requests a stop after the current step; a second signal stops immediately.

    With several processes, all stop if one receives a signal; a signal that arrives after a step's gradients were
    summed takes effect after the next step.  A second signal is then ignored, since the launcher forwards signals that
    every process has already received.
    """
    requests: list[bool] = []

    def ask(number: int, frame: Any) -> None:
        if requests and processes.count == 1:
            raise KeyboardInterrupt
        requests.append(True)

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not in the main thread, so no signals arrive
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    try:
        yield processes.agreed(lambda: bool(requests))
    finally:
        for number_before, handler in before.items():
            signal.signal(number_before, handler)
