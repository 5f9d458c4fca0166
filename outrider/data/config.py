"""The `prepare` section of a run file: where conversations come from, and how the target answers them."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outrider.config import Config as Base


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

    servers: tuple[str, ...] = ()
    """Addresses of servers with OpenAI's API that answer in place of the target here; see docs/regenerate.md."""
    model: str | None = None
    """The target's name on the servers; the first model of the first server unless given."""
    ask: Literal["tokens", "chat"] = "tokens"
    """How servers are asked: with the token ids of the target's chat template here, or with messages for their own."""
    key_from: str | None = None
    """Environment variable that holds the servers' key."""
    in_flight: PositiveInt = 32
    """Number of requests that a server is sent at the same time."""
    attempts: PositiveInt = 5
    """How often a prompt is asked until it has failed."""
    timeout_s: PositiveFloat = 1200
    """Longest wait for one answer, in seconds."""
    patience_s: PositiveFloat = 600
    """Seconds for which no server answers until the run stops."""
