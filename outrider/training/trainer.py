"""The training loop: features in, rows of logits against the target's, a step.  Knows no method.

Logits exist a chunk at a time: each chunk's loss is back-propagated to the rows at once, then the rows' gradient goes through
the model in one go.  Training 2N steps equals N, a stop, and N more, bit for bit on a CPU.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator
from torch import Tensor

from outrider import checkpoint, machine
from outrider.config import Config as Base
from outrider.config import nearest
from outrider.decoding.accept import overlap
from outrider.errors import CheckpointError, ConfigError, TrainingError
from outrider.lock import held
from outrider.nn.draft_model import Batch, DraftModel, FeatureSource, Predictions
from outrider.training import losses, rows
from outrider.training.optimizers import Kind, Optimizers, pack, unpack

log = logging.getLogger(__name__)

CHUNK_ELEMENTS = {"cpu": 2**21}
"""Logits that exist at once, by device: 8 MiB in float32 stay near a CPU's cores; elsewhere 2**24, 64 MiB, fill the device."""
LOOK_EVERY = 8
"""Steps between two looks at the mean overlap, for losses that go by it."""


class Config(Base):
    """How a draft model is trained."""

    steps: PositiveInt = 10_000
    lr: PositiveFloat = 6e-4
    """Peak learning rate."""
    optimizer: Kind = "adamw"
    """adamw, or muon for the inner matrices and adamw for the rest: fewer steps at small sizes."""
    warmup: NonNegativeFloat = 0.04
    """Share of the steps over which the rate rises; then it falls along a cosine to 0."""
    batch: PositiveInt = 8
    """Texts per step."""
    loss: dict[str, float] = Field(default={"ce": 0.1, "tv": 1.8})
    """Divergences and their weights."""
    extra: dict[str, float] = Field(default={})
    """Weights of the method's own terms, such as confidence; 1 unless named."""
    position: dict[str, float] = Field(default={})
    """Weights by depth in place of the method's own: {exp: g}, {power: b} or {dpace: floor}."""
    select: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rows that train: those whose loss exceeds the reference's most (AdaSPEC; 0.4 is the paper's)."""
    reference: str | None = None
    """Checkpoint of a drafter of the same kind, trained on all rows, that `select` compares with."""
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of the passes (autocast) and of Muon's iterations; weights and moments are float32.  auto: the fastest."""
    seed: int = 0
    save_every: PositiveInt = 500
    log_every: PositiveInt = 20
    calibrate: NonNegativeInt = 0
    """Held-out prompts of `evaluate.tasks` on which confidences are calibrated after training; 0 leaves them as trained."""

    @field_validator("loss")
    @classmethod
    def _known_terms(cls, loss: dict[str, float]) -> dict[str, float]:
        return dict(losses.check(loss))

    @field_validator("position")
    @classmethod
    def _known_position(cls, position: dict[str, float]) -> dict[str, float]:
        return dict(rows.check(position))

    @model_validator(mode="after")
    def _select_needs_a_reference(self) -> Config:
        if (self.select < 1) != (self.reference is not None):
            raise ConfigError(
                f"train.select {self.select} and train.reference {self.reference} belong together: a selection compares with a "
                "reference, and without one below 1 the reference has no effect; set both, or neither"
            )
        return self


OnStep = Callable[[int, Mapping[str, Any]], None]
Probe = Callable[[DraftModel], Mapping[str, Any]]


def settled(config: Config, folder: str | Path, device: torch.device) -> Config:
    """`config` with its dtype chosen: that of the training in `folder` that is gone on with, else the device's fastest."""
    if config.dtype != "auto":
        return config
    place = Path(folder) / "checkpoint"
    before: dict[str, Any] = {}
    if (checkpoint.whole(place) / checkpoint.MANIFEST).exists():
        before = checkpoint.manifest_of(place)["training"].get("config") or {}
    return config.model_copy(update={"dtype": before.get("dtype") or machine.training_dtype(device)})


def train(
    model: DraftModel, source: FeatureSource, config: Config, folder: str | Path, *, on_step: OnStep | None = None,
    probe: Probe | None = None, reference: DraftModel | None = None,
) -> Path:  # fmt: skip
    """Train `model` to `config.steps` and return its checkpoint folder; goes on from one that is there.

    folder: gets `checkpoint/` and `metrics.jsonl`.  probe: measures the model at the end, into the metrics.
    reference: the model that `config.reference` names, loaded.
    Raises TrainingError where a loss is not finite, naming the first bad tensor, and where another process trains there; no
    good checkpoint is overwritten.
    KeyboardInterrupt: the current step is finished and saved first.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(
            f"can't make the folder {folder} ({error.strerror}); give the run another name, or move away what is there"
        ) from error
    if config.select < 1 and reference is None:
        raise ConfigError(
            f"train.select {config.select} needs the reference {config.reference}, loaded; give `reference` to train"
        )
    if reference is not None and (reference.config.kind, reference.taps) != (model.config.kind, model.taps):
        raise ConfigError(
            f"train.reference is a {reference.config.kind} with taps {reference.taps}, the drafter a {model.config.kind} with "
            f"taps {model.taps}; a selection compares two of one kind that see the same layers"
        )
    _warn_if_slow(config, model.target.device)
    with held(folder, TrainingError(f"another process is training in {folder}; wait for it, or give this run another name")):
        return _train(model, source, config, folder, on_step, probe, reference)


def _warn_if_slow(config: Config, device: torch.device) -> None:
    slow = machine.slow_type(config.dtype, machine.TRAINING) if device.type == "cpu" else None
    if slow is not None:
        log.warning("train.dtype=%s: %s; train.dtype=auto takes that one", config.dtype, slow)


def _train(
    model: DraftModel, source: FeatureSource, config: Config, folder: Path, on_step: OnStep | None, probe: Probe | None,
    reference: DraftModel | None,
) -> Path:  # fmt: skip
    torch.manual_seed(config.seed)
    model = model.float().train()
    config = settled(config, folder, model.target.device)
    dtype = getattr(torch, config.dtype)
    optimizer = Optimizers(model, config.optimizer, model.target.spec.vocabulary, config.weight_decay, dtype)
    place = folder / "checkpoint"
    facts: dict[str, Any] = {"config": config.model_dump(mode="json"), "seconds": 0.0, "tokens": 0, "step": 0}
    facts |= _resume(place, model, optimizer, facts["config"])
    given = _name_texts(facts, source)
    if not facts["step"]:
        model.begin(source.counts)
    metrics = Metrics(folder, facts["step"])
    before, began = facts["seconds"], time.monotonic()

    def save() -> None:
        facts["seconds"] = round(before + time.monotonic() - began, 3)
        there = checkpoint.whole(place)
        kept = {one["file"]: there / one["file"] for one in facts["grams"] if one is not None}
        files = {name: path if path.exists() else given.get(name, path) for name, path in kept.items()}
        checkpoint.save(place, model, facts, pack(model, optimizer), files)

    with _finish_the_step() as asked_to_stop, metrics:
        while facts["step"] < config.steps:
            is_logged = (facts["step"] + 1) % config.log_every == 0 or facts["step"] + 1 == config.steps
            looks = not losses.BY_OVERLAP.isdisjoint(config.loss) and facts["step"] % LOOK_EVERY == 0
            batch, near = source.batch(facts["step"]), facts.get("overlap", 0.0)
            found = optimise(model, optimizer, batch, config, facts["step"], is_logged or looks, reference, near)
            facts["step"] += 1
            if looks:
                facts["overlap"] = found["overlap"]
            facts["tokens"] += int((batch.documents > 0).sum())
            if is_logged:
                metrics.write(
                    {
                        "step": facts["step"],
                        **found,
                        "seconds": round(before + time.monotonic() - began, 2),
                        "tokens": facts["tokens"],
                    }
                )
            if on_step is not None:
                on_step(facts["step"], found)
            if asked_to_stop():
                save()
                raise KeyboardInterrupt
            if facts["step"] % config.save_every == 0 or facts["step"] == config.steps:
                save()
        if probe is not None and not metrics.is_probed:
            metrics.write({"step": facts["step"], **probe(model.eval())})
    model.eval()
    return place


def optimise(
    model: DraftModel, optimizer: Optimizers, batch: Batch, config: Config, step: int, is_counted: bool,
    reference: DraftModel | None = None, near: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """One step of the optimiser.  Returns its loss, terms and, where counted, expected acceptance by depth.

    near: mean overlap of draft and target, as it was found of late.
    """
    lr = config.lr * rate(step, config)
    model.progress = step / config.steps
    optimizer.zero_grad()
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
        noise = torch.get_rng_state()
        predictions = model.predict(batch)
        chosen = None if reference is None else select(predictions, reference, batch, config, noise, near)
        found = accumulate(predictions, config, is_counted, chosen, near)
    predictions.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    if not (math.isfinite(found["loss"]) and bool(norm.isfinite())):
        raise TrainingError(
            f"step {step + 1}: the loss is {found['loss']}, the gradient's norm {float(norm)}; first bad tensor: "
            f"{first_bad(model, batch)}. The last checkpoint is whole; lower train.lr (now {config.lr}) or look at that tensor"
        )
    optimizer.step(lr)
    return found | {"lr": lr, "gradient_norm": round(float(norm), 4)}


def select(
    predictions: Predictions, reference: DraftModel, batch: Batch, config: Config, noise: Tensor, near: float = 0.0
) -> Tensor:  # fmt: skip
    """[M] bool, which rows train.  noise: the random state under which the rows were drawn; the reference draws the same."""
    after = torch.get_rng_state()
    torch.set_rng_state(noise)
    with torch.no_grad():
        theirs = reference.predict(batch)
    torch.set_rng_state(after)
    loss = functools.partial(losses.combine, config.loss, near=near)
    chosen = rows.most_learnable(predictions, theirs, config.select, loss, _chunk(predictions))
    # weights that were cast without a gradient would be taken from there by the passes that need one
    torch.clear_autocast_cache()
    return chosen


def accumulate(
    predictions: Predictions, config: Config, is_counted: bool = False, chosen: Tensor | None = None, near: float = 0.0
) -> dict[str, Any]:
    """Back-propagate every chunk's loss to its rows.  Returns the loss over all rows, and where counted its terms, acceptance
    by depth and mean overlap.

    chosen [M] bool: the rows that train; acceptance is counted over all that are to be learnt.
    """
    learnt = predictions.weight > 0 if chosen is None else chosen
    # what D-PACE gives a row is known only with its logits: its blocks are counted, not weighed
    by_draft = "dpace" in config.position
    total = (
        (learnt.float() if by_draft else rows.weights(config.position, predictions, slice(None)) * learnt).sum().clamp(min=1e-9)
    )
    sums: dict[str, float] = {"loss": 0.0}
    depths = int(predictions.depth.max()) + 1 if len(predictions.depth) else 0
    kept, rows_at = torch.zeros(depths), torch.zeros(depths)
    for draft, target, part in predictions.chunks(_chunk(predictions)):
        weight = rows.weights(config.position, predictions, part, draft) * learnt[part] / total
        terms = {"divergence": losses.combine(config.loss, draft, target, predictions.labels[part], near)}
        terms |= _weighted(predictions.extra(part, draft, target), config.extra)
        loss = torch.stack([(weight * term).sum() for term in terms.values()]).sum()
        loss.backward()
        sums["loss"] += loss.item()
        if is_counted:
            for name, term in terms.items():
                sums[name] = sums.get(name, 0.0) + float((weight * term.detach()).sum())
            _count(kept, rows_at, predictions, part, draft.detach(), target)
    if not is_counted:
        return sums
    accepted = (kept / rows_at.clamp(min=1)).tolist()
    expected = 1 + sum(math.prod(accepted[: k + 1]) for k in range(depths))
    return sums | {
        "acceptance": [round(a, 4) for a in accepted], "expected_tokens_per_step": round(expected, 4),
        "overlap": float(kept.sum() / rows_at.sum().clamp(min=1)),
    }  # fmt: skip


def _weighted(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """The method's own terms times what `train.extra` says.  Raises ConfigError for a weight of no term."""
    unknown = sorted(weights.keys() - terms.keys())
    if unknown:
        end = nearest(unknown[0], terms) if terms else "; it has none of its own, leave train.extra out"
        raise ConfigError(f"train.extra: this draft model has no term {unknown[0]!r}{end}")
    return {name: weights.get(name, 1.0) * term for name, term in terms.items()}


def _chunk(predictions: Predictions) -> int:
    """Rows whose logits exist at once."""
    elements = CHUNK_ELEMENTS.get(predictions.labels.device.type, 2**24)
    return max(1, elements // predictions.vocabulary)


def rate(step: int, config: Config) -> float:
    """Share of the peak rate: linear warm-up, then a cosine to 0."""
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))


def first_bad(model: DraftModel, batch: Batch) -> str:
    """The first tensor, from the input on, that holds a NaN or an infinity."""
    inputs = [("batch.taps", batch.taps), ("batch.hidden", batch.hidden)]
    weights = [(f"weight {name}", weight) for name, weight in model.named_parameters()]
    gradients = [(f"gradient of {name}", w.grad) for name, w in model.named_parameters() if w.grad is not None]
    for name, value in (*inputs, *weights, *gradients):
        if not value.isfinite().all():
            return f"{name} {tuple(value.shape)}"
    return "none of inputs, weights and gradients: the loss itself overflowed"


def _count(kept: Tensor, rows_at: Tensor, predictions: Predictions, part: slice, draft: Tensor, target: Tensor) -> None:
    learnt = (predictions.weight[part] > 0).cpu()
    share = overlap(target.float().softmax(-1), draft.float().softmax(-1)).cpu()
    depth = predictions.depth[part].cpu()
    kept.index_add_(0, depth[learnt], share[learnt])
    rows_at.index_add_(0, depth[learnt], torch.ones(int(learnt.sum())))


def _resume(place: Path, model: DraftModel, optimizer: Optimizers, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Go on from a checkpoint, if there is one of this very training; refuse one of another."""
    if not (checkpoint.whole(place) / checkpoint.MANIFEST).exists():
        return {}
    manifest = checkpoint.manifest_of(place)
    checkpoint.check_binding(manifest, model.target, place)
    free = ("save_every", "log_every", "calibrate")  # they change what is written, not what is learnt
    mine = {
        "drafter": model.config.model_dump(mode="json"),
        "train": {key: value for key, value in settings.items() if key not in free},
    }
    own = type(model.config)().model_dump(mode="json")
    config = checkpoint.config_of(manifest, place, model.target) if manifest["kind"] == own["kind"] else manifest["config"]
    theirs = {
        "drafter": (own if manifest["kind"] == own["kind"] else {}) | {"kind": manifest["kind"], **config},
        "train": Config().model_dump(mode="json") | (manifest["training"].get("config") or {}),
    }
    differs = [f"{part}.{key}" for part in mine for key in mine[part] if mine[part][key] != theirs[part].get(key)]
    if differs:
        raise CheckpointError(
            f"{place} was trained with other settings ({', '.join(sorted(differs))}); name another run, delete the folder, "
            "or set them back to go on"
        )
    checkpoint.check_taps(manifest, model, place)
    checkpoint.load_weights(place, model)
    state = checkpoint.load_state(place)
    if state is not None:
        unpack(state, model, optimizer)
    elif manifest["training"]["step"] < settings["steps"]:
        raise CheckpointError(
            f"{place} was stopped at step {manifest['training']['step']} and lacks {checkpoint.TRAINING}, without which it "
            "can't go on as it was; put the file back, or name another run"
        )
    before = {"grams": [None]} | manifest["training"]
    return {key: before[key] for key in ("step", "seconds", "tokens", "overlap", "grams") if key in before}


def _name_texts(facts: dict[str, Any], source: FeatureSource) -> dict[str, Path]:
    """Name in `facts` the hashes of the texts it trains on from here, beside those before; returns where new ones are.

    One entry for each set of texts; None stands for texts whose hashes are not known.
    """
    before = facts.setdefault("grams", [])
    mine = getattr(source, "grams", None)
    if facts["step"] == facts["config"]["steps"]:
        return {}
    if mine is None:
        facts["grams"] = before if None in before else [*before, None]
        return {}
    if any(one is not None and one["hash"] == mine.facts["hash"] for one in before):
        return {}
    name = checkpoint.GRAMS if not before else f"training.{len(before) + 1}.grams"
    facts["grams"] = [*before, {key: value for key, value in mine.facts.items() if key != "of"} | {"file": name}]
    return {name: mine.path}


class Metrics:
    """metrics.jsonl, one line a logged step, and TensorBoard beside it where that is installed.

    A line that the disk has no room for waits for the next one; training goes on, and its checkpoint does not hang on it.
    """

    def __init__(self, folder: Path, step: int):
        self.path = folder / "metrics.jsonl"
        self.waiting = b""
        self.is_told = False
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        rows = [_row(line) if line.endswith(b"\n") else None for line in lines]
        damaged = [number for number, row in enumerate(rows, 1) if row is None]
        if damaged and damaged != [len(lines)]:  # a torn last line is what a crash leaves
            log.warning("%s, line %d can't be read, and %d in all; they are left out", self.path, damaged[0], len(damaged))
        # what a crash left beyond the checkpoint would otherwise stand there twice
        kept = [(line, row) for line, row in zip(lines, rows, strict=True) if row is not None and row["step"] <= step]
        self.is_probed = any("loss" not in row for _, row in kept)
        if len(kept) < len(lines):
            self._keep(b"".join(line for line, _ in kept))
        self.board = _tensorboard(folder)

    def __enter__(self) -> Metrics:
        with _no_metrics(self.path):
            self.file = self.path.open("ab", buffering=0)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._flush()
        self.file.close()
        if self.board is not None:
            self.board.close()
        if self.waiting and kind is None:
            lines = len(self.waiting.splitlines())
            raise TrainingError(f"{self.path} lacks its last {lines} lines, the disk has no room; the checkpoint is whole")

    def write(self, values: Mapping[str, Any]) -> None:
        self.waiting += json.dumps(values).encode() + b"\n"
        self._flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(f"train/{name}", value, values["step"])

    def _flush(self) -> None:
        """Write what waits, as far as there is room."""
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if not self.is_told:
                log.warning("can't write %s (%s): its lines wait; make room", self.path, error.strerror)
            self.is_told = True

    def _keep(self, data: bytes) -> None:
        """Put these lines in place of the file, whole or not at all."""
        part = self.path.with_name(self.path.name + ".part")
        with _no_metrics(self.path):
            part.write_bytes(data)
            os.replace(part, self.path)


@contextmanager
def _no_metrics(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(f"can't write {path} ({error.strerror}); it is as it was. Make room and run again") from error


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics; None where it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder / "tensorboard")


@contextmanager
def _finish_the_step() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for a stop after the current step; a second one stops at once."""
    asked: list[bool] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: there Ctrl-C never arrives
        before = None
    try:
        yield lambda: bool(asked)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
