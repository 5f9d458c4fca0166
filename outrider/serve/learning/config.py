"""The `serve.learning` section: what is stored of the traffic, and when the drafter is trained on it."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from outrider.config import Config


class Learning(Config):
    """How a drafter learns from its traffic."""

    folder: str
    """Folder of the stored texts, the drafter's versions and the log; each target and drafter needs one of its own."""
    max_mb: PositiveFloat = 256.0
    """Most megabytes of stored texts; the oldest are deleted."""
    held_out: int = Field(8, ge=2)
    """One prompt in this many never trains; new weights are compared with old ones on these."""
    every_texts: PositiveInt = 512
    """New texts to train on after which a new version is made."""
    steps: PositiveInt = 100
    """Training steps of one version."""
    lr: PositiveFloat | None = None
    """Peak learning rate; a quarter of that of the drafter's own training unless given."""
    length: int = Field(1024, ge=16)
    """Most tokens of a text that is trained on; the beginning of a longer one is left out."""
    prompts: int = Field(64, ge=16)
    """Held-out prompts on which a version is compared with the one before it."""
    new_tokens: int = Field(96, ge=8)
    """Most tokens that are written after each of these prompts."""
    while_busy: bool = False
    """Train while requests are decoded, too; no: the training stands still as long as there is one."""
    versions: int = Field(8, ge=1)
    """Number of versions that stay on disk, besides the one that is served and the one before it."""
