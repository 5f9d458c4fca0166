"""The `serve.learning` section: which traffic is stored, and when the drafter is trained on it."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from outrider.config import Config


class Learning(Config):
    """How a drafter learns from the traffic."""

    folder: str
    """Folder of the stored texts, the drafter's versions and the log; each pair of target and drafter needs its own."""
    max_mb: PositiveFloat = 256.0
    """Maximum number of megabytes of stored texts; the oldest are deleted."""
    held_out: int = Field(8, ge=2)
    """One prompt in this many is never trained on; new weights are compared with old ones on these prompts."""
    every_texts: PositiveInt = 512
    """Number of new training texts after which a new version is trained."""
    horizon_s: PositiveFloat | None = None
    """Train a version only if it should save more decoding time over this many seconds than it takes; by default,
    whenever there are enough new texts."""
    steps: PositiveInt = 100
    """Training steps of one version."""
    lr: PositiveFloat | None = None
    """Peak learning rate; defaults to a quarter of that of the drafter's original training."""
    length: int = Field(1024, ge=16)
    """Maximum number of tokens of a training text; a longer one is cut at its beginning."""
    prompts: int = Field(64, ge=16)
    """Held-out prompts on which a version is compared with the previous one."""
    new_tokens: int = Field(96, ge=8)
    """Maximum number of tokens generated for each of these prompts."""
    while_busy: bool = False
    """Also train while requests are decoded; by default the training is paused then."""
    versions: int = Field(8, ge=1)
    """Number of versions kept on disk, besides the served one and the one before it."""
