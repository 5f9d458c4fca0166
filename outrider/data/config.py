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
"""Prefixes of paths that are not files: installed Python source, and instructions that ship with Outrider."""


class Source(Base):
    """One source of conversations: a data set on the hub (`name`), or a file or folder (`path`)."""

    name: str | None = None
    """A Hugging Face data set, such as `mlabonne/open-perfectblend`."""
    path: str | None = None
    """`stdlib:train`, `instructions:train`, `packages:NAME,…`, FILE.jsonl, FILE.json, FILE.parquet, FILE.txt, or a
    folder of such files."""
    config: str | None = None
    """Configuration, for a data set that has several."""
    split: str = "train"
    """Split of a data set."""
    revision: str | None = None
    """Commit, tag or branch of a data set; defaults to the newest."""
    answers: str | None = None
    """The output file of a Batch with `path` as its input; answers are joined by `custom_id`."""
    weight: PositiveFloat | None = None
    """Relative share of this source; if any source has a weight, the others have weight 1."""
    count: PositiveInt | None = None
    """Maximum number of conversations from this source; by default all, or 1,000 of `stdlib` and `packages`."""

    @property
    def is_built_in(self) -> bool:
        """Whether it is built in and not a file."""
        return (self.path or "").startswith(BUILT_IN)

    @model_validator(mode="after")
    def _is_one(self) -> "Source":
        if (self.name is None) == (self.path is None):
            raise ValueError("a source needs a name (of a data set) or a path (of a file), and not both")
        kind, unused = ("path", ["config", "revision"]) if self.name is None else ("data set", ["answers"])
        for key in unused:
            if getattr(self, key) is not None:
                raise ValueError(f"{key} has no effect on a {kind}; leave it out")
        return self


class Config(Base):
    """Where prompts come from and how the target answers them."""

    REMOVED: ClassVar[Mapping[str, str]] = {"rotate": "use 'feature_encoding' instead"}

    conversations: str = LIBRARY
    """`stdlib:train` (Python, for the demo target), `instructions:train` (for chat models: 720 prompts for chat, code,
    maths, rewriting and more, then alternately one of them again and a question about a function of the standard
    library), `packages:NAME,…` (the source of installed packages), FILE.jsonl, FILE.json, FILE.parquet, FILE.txt, a
    folder, or a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    held_out: Source | None = None
    """Conversations whose answers are never trained on; acceptance in serving is compared with acceptance on them.  By
    default, `train.held_out` answers are split off from the others; set it if the evaluation's texts are of another
    kind."""
    sources: tuple[Source, ...] = ()
    """Several sources in place of `conversations`, mixed and shuffled; see docs/data.md."""
    count: PositiveInt | None = None
    """Number of conversations used, chosen by the seed; by default all, or 1,000 of `stdlib` and `packages`."""
    deduplicate: Literal["exact", "near", "off"] = "off"
    """Leave out conversations that ask the same thing: with equal texts (exact), or also with nearly equal ones (near).
    """
    min_characters: NonNegativeInt = 0
    """Minimum number of characters of the user's messages; shorter conversations are left out."""
    max_characters: PositiveInt | None = None
    """Maximum number of characters of all messages; longer conversations are left out."""
    decontaminate: bool = True
    """Leave out conversations that share a question with a prompt of `evaluate.tasks`."""
    thinking: Literal["on", "off", "keep"] = "keep"
    """Whether the target thinks first, if its chat template has `enable_thinking`; keep uses the template's default."""
    length: PositiveInt = 4096
    """Maximum number of tokens of one text; longer ones are cut."""
    regenerate: bool = True
    """Let the target generate the answers, which a drafter learns best; false keeps the answers in the sources."""
    max_new_tokens: PositiveInt = 512
    """Maximum number of tokens of an answer."""
    temperature: NonNegativeFloat = 0.7
    """Temperature of the answers; 0 is greedy."""
    top_p: float = Field(0.8, gt=0, le=1)
    """Answers are sampled from the smallest set of most likely tokens whose probabilities sum to this; 1 keeps all."""
    top_k: NonNegativeInt = 20
    """Answers are sampled from this many most likely tokens; 0 keeps all."""
    seed: int = 0
    """Random seed; equal seeds give equal answers."""
    slots: PositiveInt = 16
    """Number of answers generated at the same time."""
    folder: str | None = None
    """Folder of the answers; runs that name the same folder share them.  Defaults to the run's folder."""
    ngram_hashes: bool = True
    """Store hashes of prompts and answers, to check later what a drafter was trained on; see docs/overlap.md."""
    skip_bad: bool = False
    """Count and skip rows that can't be read, instead of stopping at the first."""
    servers: tuple[str, ...] = ()
    """Addresses of servers with OpenAI's API that answer in place of a local target; see docs/data.md."""
    model: str | None = None
    """The target's name on the servers; defaults to the first model of the first server."""
    ask: Literal["tokens", "chat"] = "tokens"
    """What is sent to servers: token ids rendered here with the target's chat template, or messages for their own
    template."""
    key_from: str | None = None
    """Environment variable with the servers' API key."""
    in_flight: PositiveInt = 32
    """Number of concurrent requests per server."""
    attempts: PositiveInt = 5
    """Number of attempts after which a prompt counts as failed."""
    timeout_s: PositiveFloat = 1200
    """Maximum time for one answer, in seconds."""
    patience_s: PositiveFloat = 600
    """Seconds without an answer from any server after which the run stops."""
    features: Literal["live", "cached", "engine", "text"] = "live"
    """Where training gets the target's states: passes during training, files that `outrider prepare` writes, or files
    written by a vLLM server; see docs/features.md.  text: no states; the next token of the text is the teacher, for
    drafters that read no states."""
    feature_folder: str | None = None
    """Folder of these files; defaults to `features` in the answers' folder."""
    feature_server: str | None = None
    """URL of the vLLM server that computes states, for `features: engine`."""
    feature_encoding: Literal["bf16", "int8", "int4"] = "int8"
    """Number type of stored states; int8 takes half the bytes of bf16, int4 a quarter."""
    top_logprobs: NonNegativeInt = 0
    """Number of likeliest tokens stored per token in place of its final hidden state; 0 stores the state."""
    shard_tokens: PositiveInt = 16_384
    """Number of tokens per file of states."""
    recheck_every: NonNegativeInt = 256
    """The stored states of every 256th text (by default) are compared with a pass of the target; 0 compares none."""

    @property
    def stores_states(self) -> bool:
        """Whether states are stored in files before training."""
        return self.features in ("cached", "engine")

    @field_validator("feature_folder")
    @classmethod
    def _is_local(cls, folder: str | None) -> str | None:
        if folder is not None and "://" in folder:
            raise ValueError(
                "a bucket must be mounted first, for example with rclone mount; give the folder it is mounted at"
            )
        return folder

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
        """The sources that train; the one that `conversations` names if none is listed."""
        return self.sources or (source_named(self.conversations, self.split),)

    @property
    def label(self) -> str:
        """The sources, briefly."""
        names = ", ".join(str(source.path or source.name) for source in self.training_sources)
        return names if self.held_out is None else f"{names}, held out {self.held_out.path or self.held_out.name}"

    @property
    def enable_thinking(self) -> bool | None:
        """The value passed to the chat template; None passes nothing."""
        return {"on": True, "off": False}.get(self.thinking)


def source_named(text: str, split: str = "train") -> Source:
    """The source that a text names: built in, a file or folder, or otherwise a data set on the hub."""
    is_path = text.startswith(BUILT_IN) or is_local(text)
    return Source(path=text, split=split) if is_path else Source(name=text, split=split)
