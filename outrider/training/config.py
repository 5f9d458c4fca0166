"""The `train` section of a run file: how a draft model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

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
    "distributed", "recompute", "read_ahead", "sequence_parallel", "target_processes",
})  # fmt: skip
"""Settings that change what is written, not what is learnt; another number of steps goes on along another curve."""


class Config(Base):
    """How a draft model is trained."""

    steps: PositiveInt | None = 10_000
    """Training steps, each of `accumulate` times `batch` texts.  If raised after a run has ended, training continues
    from its checkpoint; see docs/training.md."""
    epochs: PositiveFloat | None = None
    """Passes over the answers, in place of `steps`."""
    lr: PositiveFloat = 6e-4
    """Peak learning rate, after the warm-up."""
    optimizer: Kind = "adamw"
    """adamw, or muon for the inner matrices and adamw for the rest: fewer steps at small sizes."""
    warmup: NonNegativeFloat = 0.04
    """Share of the steps over which the rate rises; then it falls along a cosine to 0."""
    batch: PositiveInt = 8
    """Texts per batch."""
    accumulate: PositiveInt = 1
    """Batches per step, whose gradients are added up: a step of more texts than fit into memory at once."""
    tokens: PositiveInt | None = None
    """Number of tokens, padding included, that are in memory at once: the texts of a step, `batch` times `accumulate`,
    lie side by side in batches of at most so many, and the step learns the same.  Unless given, the texts of a batch
    are padded to the longest."""
    recompute: bool = False
    """Keep the inputs of the draft model's layers alone and compute the layers again in the backward pass (activation
    checkpointing): less memory, more time, and the same gradients."""
    read_ahead: bool = False
    """The target reads the texts of the next batch while this one trains, where features are live and too large to be
    cached.  Stored features are always read so."""
    loss: Annotated[dict[str, float], AfterValidator(losses.check)] = Field(default={"ce": 0.1, "tv": 1.8})
    """Divergences and their weights; `kl` is short for {kl: 1}."""
    extra: dict[str, float] = Field(default={})
    """Weights of the method's own terms, such as confidence; 1 unless named."""
    position: Annotated[dict[str, float], AfterValidator(rows.check)] = Field(default={})
    """Weights by depth in place of the method's own: {exp: g}, {power: b} or {dpace: floor}."""
    select: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rows that train: those whose loss exceeds the reference's most (AdaSPEC; 0.4 is the paper's)."""
    reference: str | None = None
    """Checkpoint of a drafter of the same kind, trained on all rows, that `select` compares with."""
    weight_decay: NonNegativeFloat = 0.0
    """In every step weights shrink by this share times the learning rate."""
    clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    skip: NonNegativeInt = 3
    """Number of steps in a row whose loss or gradient may be not finite: they change nothing.  After one more the last
    checkpoint's weights are taken again, once; 0 ends at the first."""
    spike: NonNegativeFloat = 10.0
    """A loss of more than so many times the median of the last 32 steps makes a bad step too; 0 takes every finite
    loss."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of the passes (autocast) and of Muon's iterations; weights and moments are float32.  auto: the
    fastest."""
    distributed: Way = "ddp"
    """Where a launcher started several processes, which share the rows of every batch, so that a step learns the same
    texts however many they are.  ddp: all weights are in each; fsdp: a part of the weights and moments is in each
    (FSDP2).  One process has no use for it."""
    sequence_parallel: PositiveInt = 1
    """Number of processes that share each text, for texts whose activations one can't hold: each has every N-th
    position, and at every attention they exchange positions for heads.  It must divide the number of processes and the
    drafter's kv_heads.  For dflash and dspark."""
    target_processes: NonNegativeInt = 0
    """Number of the processes, the last ones, that only read the target, whose layers the others then do not load, and
    send its states, one batch ahead.  0: each reads for itself.  For `outrider train` with live features, and ddp."""
    seed: int = 0
    """Seed of weights, order of texts and draws."""
    save_every: PositiveInt = 500
    """Steps between two checkpoints."""
    keep: NonNegativeInt = 2
    """Number of earlier checkpoints kept in `checkpoints/step-N`, besides the newest in `checkpoint`."""
    probe_every: NonNegativeInt = 0
    """Steps between two measurements of acceptance on held-out answers and prompts, of which the best checkpoint is
    kept and used; 0 measures at the end alone."""
    patience: NonNegativeInt = 0
    """Number of such measurements in a row without a better one, after which training ends; 0 goes on to the end."""
    log_every: PositiveInt = 20
    """Steps between two rows of metrics.jsonl."""
    track: Annotated[list[str], AfterValidator(trackers.known)] = Field(default=[])
    """Where metrics also go: tensorboard, wandb, trackio; each needs accelerate and the package of its name."""
    held_out: NonNegativeInt = 32
    """Answers that do not train, at most one in 16: acceptance is measured on them at the end, to compare serving
    with."""
    calibrate: NonNegativeInt = 0
    """Held-out prompts of `evaluate.tasks` on which confidences are calibrated after training; 0 leaves them as
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
        """`steps`, where `epochs` are resolved."""
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
                f"train.target_processes {self.target_processes} does not go with train.distributed: "
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
