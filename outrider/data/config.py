"""The `prepare` section of a run file: where conversations come from, and how the target answers them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from outrider.config import Config as Base
from outrider.errors import ConfigError
from outrider.hub import is_local

LIBRARY = "stdlib:train"
BUILT_IN = ("stdlib:", "instructions:", "packages:")
"""How paths begin that name no file: pieces of Python source that is installed, and instructions of our own."""


class Source(Base):
    """One source of conversations: a data set of the hub (`name`), or a file or folder (`path`)."""

    name: str | None = None
    """A Hugging Face data set, such as `mlabonne/open-perfectblend`."""
    path: str | None = None
    """`stdlib:train`, `instructions:train`, `packages:NAME,…`, FILE.jsonl, FILE.json, FILE.parquet, FILE.txt, or a
    folder of such files."""
    config: str | None = None
    """Configuration of a data set that has several."""
    split: str = "train"
    """Split of a data set."""
    revision: str | None = None
    """Commit, tag or branch of a data set; its newest unless given."""
    answers: str | None = None
    """The output file of a Batch whose input `path` is: its answers are found by their `custom_id`."""
    weight: PositiveFloat | None = None
    """Share of this source, as a number next to the other weights; with one, all count (1 unless given)."""
    count: PositiveInt | None = None
    """Most conversations of this source; all unless given, of `stdlib` and `packages` 1,000."""

    @property
    def is_built_in(self) -> bool:
        """Whether it is installed source, and no file."""
        return (self.path or "").startswith(BUILT_IN)

    @model_validator(mode="after")
    def _is_one(self) -> "Source":
        if (self.name is None) == (self.path is None):
            raise ValueError("a source needs a name (of a data set) or a path (of a file), and not both")
        given = [key for key in ("config", "revision") if self.path is not None and getattr(self, key) is not None]
        if given or (self.name is not None and self.answers is not None):
            key = given[0] if given else "answers"
            raise ValueError(f"{key} has no effect on a {'path' if given else 'data set'}; leave it out")
        return self


class Config(Base):
    """Where prompts come from, and how the target answers them."""

    REMOVED: ClassVar[Mapping[str, str]] = {"rotate": "use 'feature_encoding' instead"}

    conversations: str = LIBRARY
    """`stdlib:train` (Python, for the demo target), `instructions:train` (for chat models: 720 of chat, code, maths,
    rewriting and more, then in turn one of them again and a question about a function of the standard library),
    `packages:NAME,…` (the source of installed packages), FILE.jsonl, FILE.json, FILE.parquet,
    FILE.txt, a folder, or a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    held_out: Source | None = None
    """Conversations whose answers never train: acceptance on them is what serving is compared with.  Unless given,
    `train.held_out` answers are taken from the others; give some where the evaluation's texts are of another kind."""
    sources: tuple[Source, ...] = ()
    """Several sources in place of `conversations`, mixed and shuffled; see docs/data.md."""
    count: PositiveInt | None = None
    """Conversations used, chosen by the seed; all unless given, of `stdlib` and `packages` 1,000."""
    deduplicate: Literal["exact", "near", "off"] = "off"
    """Leave out conversations that ask the same: with equal texts (exact), or with nearly equal ones too (near)."""
    min_characters: NonNegativeInt = 0
    """Shortest conversation, as a number of characters of what the user writes; shorter ones are left out."""
    max_characters: PositiveInt | None = None
    """Longest conversation, as a number of characters of all its texts; longer ones are left out."""
    decontaminate: bool = True
    """Leave out conversations that ask what a prompt of `evaluate.tasks` asks."""
    thinking: Literal["on", "off", "keep"] = "keep"
    """Whether the target thinks first, where its chat template knows `enable_thinking`; keep leaves it to the
    template."""
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
    features: Literal["live", "cached", "engine"] = "live"
    """Where training takes the target's states from: passes beside it, files that `outrider prepare` writes, or files
    written by a vLLM server; see docs/features.md."""
    feature_folder: str | None = None
    """Where these files are; a folder or an fsspec URL, which is only read.  `features` in the answers' folder unless
    given."""
    feature_server: str | None = None
    """URL of the vLLM server that computes states, for `features: engine`."""
    feature_encoding: Literal["bf16", "int8", "int4"] = "int8"
    """How states are stored; int8 takes half of bf16's bytes, int4 a quarter."""
    top_logprobs: NonNegativeInt = 0
    """Number of likeliest tokens stored per token in place of its final hidden state; 0 stores the state."""
    shard_tokens: PositiveInt = 16_384
    """Tokens of one file of states."""
    recheck_every: NonNegativeInt = 256
    """Texts between two whose stored states are compared with a pass of the target; 0 compares none."""

    @field_validator("held_out", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return source_named(value) if isinstance(value, str) else value

    @field_validator("thinking", mode="before")
    @classmethod
    def _in_words(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # YAML's on and off

    @model_validator(mode="after")
    def _an_engine_has_a_server(self) -> "Config":
        if self.features == "engine" and self.feature_server is None:
            raise ConfigError("prepare.features engine needs a vLLM server; give its URL as prepare.feature_server")
        if self.features != "engine" and self.feature_server is not None:
            raise ConfigError(
                f"prepare.feature_server {self.feature_server} has no effect with prepare.features {self.features}; "
                "set prepare.features to engine, or leave prepare.feature_server out"
            )
        return self

    @model_validator(mode="after")
    def _has_one_list(self) -> "Config":
        if self.sources and self.conversations != LIBRARY:
            raise ValueError("conversations and sources both say where prompts come from; leave one of them out")
        return self

    @property
    def training_sources(self) -> tuple[Source, ...]:
        """The sources that train; the one that `conversations` is short for where none is listed."""
        return self.sources or (source_named(self.conversations, self.split),)

    @property
    def label(self) -> str:
        """The sources in a few words."""
        names = ", ".join(str(source.path or source.name) for source in self.training_sources)
        return names if self.held_out is None else f"{names}, held out {self.held_out.path or self.held_out.name}"

    @property
    def enable_thinking(self) -> bool | None:
        """What the chat template gets; None where it is not asked."""
        return {"on": True, "off": False}.get(self.thinking)


def source_named(text: str, split: str = "train") -> Source:
    """The source that a text means: the library's prompts, a file or folder, or else a data set of the hub."""
    is_path = text.startswith(BUILT_IN) or is_local(text)
    return Source(path=text, split=split) if is_path else Source(name=text, split=split)
