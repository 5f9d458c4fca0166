"""The `prepare` section of a run file: where conversations come from, and how the target answers them."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from outrider.config import Config as Base
from outrider.errors import ConfigError


class Config(Base):
    """Where prompts come from, and how the target answers them."""

    conversations: str = "stdlib:train"
    """`stdlib:train`, FILE.jsonl, FILE.json, FILE.txt, or a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    count: PositiveInt | None = None
    """Conversations used, the first ones; all unless given, of `stdlib` 1,000."""
    length: PositiveInt = 4096
    """Most tokens of one text; longer ones are cut."""
    regenerate: bool = True
    """Let the target write the answers.  A drafter learns the target's own text best; false keeps the answers given."""
    max_new_tokens: PositiveInt = 512
    """Longest answer, in tokens."""
    temperature: NonNegativeFloat = 0.7
    """Temperature of the answers; 0 is greedy."""
    top_p: float = Field(0.8, gt=0, le=1)
    """Answers are drawn from the fewest most likely tokens whose probabilities sum to this; 1 keeps all."""
    top_k: NonNegativeInt = 20
    """Answers are drawn from this many most likely tokens; 0 keeps all."""
    seed: int = 0
    """Seed of the draws; equal seeds give equal answers."""
    slots: PositiveInt = 16
    """Answers written at the same time."""
    folder: str | None = None
    """Where the answers go; runs that name the same folder share them.  The run's own folder unless given."""
    ngram_hashes: bool = True
    """Keep hashes of prompts and answers, so that a drafter can be asked later what it was trained on; see
    docs/overlap.md."""
    skip_bad: bool = False
    """Count rows that can't be read and go on, instead of stopping at the first."""
    features: Literal["live", "cached", "engine"] = "live"
    """Where training takes the target's states from: passes beside it, files that `outrider prepare` writes, or files
    written by a vLLM server; see docs/features.md."""
    feature_folder: str | None = None
    """Where these files are; a folder or an fsspec URL, which is only read.  `features` in the answers' folder unless
    given."""
    feature_server: str | None = None
    """URL of the vLLM server that computes states, for `features: engine`."""
    feature_encoding: Literal["bf16", "fp8", "int8", "int4"] = "int8"
    """How states are stored; int8 takes half of bf16's bytes, int4 a quarter."""
    top_logprobs: NonNegativeInt = 0
    """Number of likeliest tokens stored per token in place of its final hidden state; 0 stores the state."""
    rotate: NonNegativeInt = 0
    """Number of coordinates that a token's taps are rotated to; 0 stores the taps."""
    shard_tokens: PositiveInt = 16_384
    """Tokens of one file of states."""
    recheck_every: NonNegativeInt = 256
    """Texts between two whose stored states are compared with a pass of the target; 0 compares none."""

    @model_validator(mode="after")
    def _an_engine_has_a_server(self) -> "Config":
        if (self.features == "engine") != (self.feature_server is not None):
            given = f"prepare.features {self.features} and prepare.feature_server {self.feature_server}"
            raise ConfigError(f"{given} don't belong together; set features to engine and name its server, or neither")
        return self
