"""The `train` section of a run file: how a draft model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from outrider.config import Config as Base
from outrider.errors import ConfigError
from outrider.processes import Way
from outrider.training import losses, rows
from outrider.training.optimizers import Kind
from outrider.training.progress import trackers

FREE = frozenset({
    "save_every", "log_every", "calibrate", "steps", "epochs", "keep", "probe_every", "patience", "track",
    "distributed", "recompute", "sequence_parallel", "target_processes",
})  # fmt: skip
"""Settings that can change on resume: they affect what is written, not what is learnt.  With a new number of steps the
learning rate moves to the new curve."""


class Config(Base):
    """How a draft model is trained."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "read_ahead": "store the features to have them prefetched (prepare.features: cached)"
    }
    steps: PositiveInt | None = 10_000
    """Training steps, each of `accumulate` times `batch` texts.  If you raise this after a run has ended, training
    resumes from its checkpoint; see docs/training.md."""
    epochs: PositiveFloat | None = None
    """Passes over the answers, instead of `steps`."""
    lr: PositiveFloat = 6e-4
    """Peak learning rate, after the warm-up."""
    optimizer: Kind = "adamw"
    """adamw, or muon for the inner matrices and adamw for the rest; with muon, small models need fewer steps."""
    warmup: NonNegativeFloat = 0.04
    """Share of the steps over which the learning rate rises; it then falls to 0 along a cosine."""
    batch: PositiveInt = 8
    """Texts per batch."""
    accumulate: PositiveInt = 1
    """Batches per step, whose gradients are accumulated: for steps with more texts than fit into memory at once."""
    tokens: PositiveInt | None = None
    """Maximum number of tokens in memory at once, padding included: the texts of a step (`batch` times `accumulate`)
    are packed into batches of at most this size, with the same result.  By default, the texts of a batch are padded to
    the longest."""
    recompute: bool = False
    """Store only the inputs of the draft model's layers and recompute the layers in the backward pass (activation
    checkpointing): less memory, more time, the same gradients."""
    loss: Annotated[dict[str, float], AfterValidator(losses.check)] = Field(default={"ce": 0.1, "tv": 1.8})
    """Divergences and their weights; `kl` means {kl: 1}."""
    extra: dict[str, float] = Field(default={})
    """Weights of the method's own loss terms, such as confidence; 1 by default."""
    position: Annotated[dict[str, float], AfterValidator(rows.check)] = Field(default={})
    """Weights by depth that replace the method's own: {exp: g}, {power: b} or {dpace: floor}."""
    select: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rows to train on: those whose loss exceeds the reference's most (AdaSPEC; the paper uses 0.4)."""
    reference: str | None = None
    """Checkpoint that `select` compares with: a drafter of the same kind, trained on all rows."""
    weight_decay: NonNegativeFloat = 0.0
    """Each step shrinks the weights by this share times the learning rate."""
    clip: PositiveFloat = 1.0
    """Maximum gradient norm."""
    skip: NonNegativeInt = 3
    """Maximum number of consecutive bad steps (such as with a loss or gradient that is not finite); they are skipped.
    After one more, training restores the last checkpoint's weights once; 0 ends training at the first bad step."""
    spike: NonNegativeFloat = 10.0
    """A step is also bad if its loss exceeds this many times the median of the last 32 steps; 0 accepts every finite
    loss."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of the passes (autocast) and of Muon's iterations; weights and moments are float32.  auto: the
    fastest on this machine."""
    distributed: Way = "ddp"
    """How several processes, started by a launcher, train together; they split the rows of every batch, so a step
    uses the same texts for any number of processes.  ddp: each has all weights; fsdp: each has a part of the weights
    and moments (FSDP2).  No effect with one process."""
    sequence_parallel: PositiveInt = 1
    """Number of processes that split each text, for texts whose activations exceed one process's memory: each has every
    N-th position, and every attention exchanges positions for heads.  It must divide the number of processes and the
    drafter's kv_heads.  For dflash and dspark."""
    target_processes: NonNegativeInt = 0
    """Number of processes (the last ones) that only run the target and send its states to the others, one batch ahead;
    the others do not load its layers.  0: each process runs the target itself.  Only for `outrider train` with live
    features and ddp."""
    seed: int = 0
    """Seed of the initial weights, the order of texts and all random numbers."""
    save_every: PositiveInt = 500
    """Steps between checkpoints."""
    keep: NonNegativeInt = 2
    """Number of earlier checkpoints kept in `checkpoints/step-N`, besides the newest in `checkpoint`."""
    probe_every: NonNegativeInt = 0
    """Steps between measurements of acceptance on held-out answers and prompts; the best checkpoint is kept and used.
    0 measures only at the end."""
    patience: NonNegativeInt = 0
    """Number of consecutive such measurements without improvement after which training ends; 0 never ends it early."""
    log_every: PositiveInt = 20
    """Steps between rows of metrics.jsonl."""
    track: Annotated[list[str], AfterValidator(trackers.known)] = Field(default=[])
    """Trackers that also receive the metrics: tensorboard, wandb, trackio; each needs accelerate and the package of the
    same name."""
    held_out: NonNegativeInt = 32
    """Answers excluded from training, at most one in 16; acceptance is measured on them at the end, as a reference for
    serving."""
    calibrate: NonNegativeInt = 0
    """Number of held-out prompts of `evaluate.tasks` to calibrate confidences on after training; 0 leaves them as
    trained."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if isinstance(data.get("loss"), str):
            data = {**data, "loss": {data["loss"]: 1.0}}
        return {**data, "steps": data.get("steps")} if data.get("epochs") is not None else data

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Config:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"both steps {self.steps} and epochs {self.epochs} are given; leave one out")
        return self

    @property
    def last_step(self) -> int:
        """`steps`, once `epochs` are resolved."""
        assert self.steps is not None
        return self.steps

    @model_validator(mode="after")
    def _patience_needs_probes(self) -> Config:
        if self.patience and not self.probe_every:
            raise ConfigError(f"train.patience {self.patience} counts measurements; set train.probe_every, in steps")
        return self

    @model_validator(mode="after")
    def _readers_need_whole_weights(self) -> Config:
        if self.target_processes and self.distributed != "ddp":
            raise ConfigError(
                f"train.target_processes {self.target_processes} is incompatible with train.distributed: "
                f"{self.distributed}; set ddp, or leave one out"
            )
        return self

    @model_validator(mode="after")
    def _select_needs_a_reference(self) -> Config:
        if self.select < 1 and self.reference is None:
            raise ConfigError(
                f"train.select {self.select} needs a reference to compare rows with; name its checkpoint as "
                "train.reference, or leave train.select out"
            )
        if self.select >= 1 and self.reference is not None:
            raise ConfigError(
                f"train.reference {self.reference} has no effect with train.select {self.select}, which trains on all "
                "rows; set train.select below 1, or leave train.reference out"
            )
        return self
