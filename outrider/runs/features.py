"""Features for training: live, from a cache that is filled beforehand, or from an engine's files."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.data.answers.store import Answer
from outrider.data.features import cache, encodings
from outrider.data.features.cache import Binding
from outrider.data.features.cached import CachedFeatures, target_states
from outrider.data.features.engine_states import EngineStates
from outrider.data.features.live import LiveFeatures, TextAlone
from outrider.data.overlap.hash_files import HashFile
from outrider.data.rendering import template_hash
from outrider.data.texts import CutAnswers
from outrider.errors import ConfigError
from outrider.nn.draft_model import DraftModel
from outrider.runs import reporter as events
from outrider.runs.file import RunConfig
from outrider.runs.reporter import Reporter
from outrider.targets.remote.served import RunTarget, ServedTarget
from outrider.training.config import Config as TrainConfig

log = logging.getLogger(__name__)
Source = LiveFeatures | CachedFeatures
Sourced = Callable[..., Source]
"""Answers, and optionally their `ngram_hashes` → their features."""


def folder_of(settings: RunConfig) -> Path:
    """The folder of a run's feature cache."""
    return Path(settings.prepare.feature_folder or settings.answers / "features")


def sourced(settings: RunConfig, config: TrainConfig, target: RunTarget, model: DraftModel) -> Sourced:
    """A function from answers to features, as the run file specifies.  config: with a resolved dtype."""
    prepare = settings.prepare
    if prepare.features == "text" and (model.taps or model.reads_states):
        raise ConfigError(
            f"prepare.features text gives no hidden states, but drafter {settings.drafter['kind']!r} reads them; set "
            "it to live, or train a drafter that reads none, such as small_model"
        )
    common: dict[str, Any] = {
        "batch": config.batch, "length": prepare.length, "seed": config.seed, "budget": config.tokens
    }  # fmt: skip

    def source(answers: Sequence[Answer], ngram_hashes: HashFile | None = None) -> Source:
        if not prepare.stores_states:
            return (LiveFeatures if prepare.features == "live" else TextAlone)(
                target, answers, model.taps, dtype=config.dtype, template=template_hash(target.tokenizer),
                ngram_hashes=ngram_hashes, **common,
            )  # fmt: skip
        return CachedFeatures(
            target, answers, bound_to(settings, config.dtype, target, model), folder_of(settings),
            recheck_every=_recheck_every(settings, target), skip_bad=prepare.skip_bad, ngram_hashes=ngram_hashes,
            **common,
        )  # fmt: skip

    return source


def _recheck_every(settings: RunConfig, target: RunTarget) -> int:
    """`prepare.recheck_every`; 0 without a local target to compare with."""
    every = settings.prepare.recheck_every
    if every and isinstance(target, ServedTarget):
        log.warning(
            "stored states are not compared with passes of %s, which is not loaded here (prepare.recheck_every); the "
            "engine's log-probabilities were compared when they were written", target.spec.name,
        )  # fmt: skip
        return 0
    return every


def bound_to(settings: RunConfig, dtype: str, target: RunTarget, model: DraftModel) -> Binding:
    """The binding of the run's cache.  Raises ConfigError for features that the drafter can't learn from."""
    prepare = settings.prepare
    # a drafter without taps reads the final state of every token
    reads_final = not model.taps and model.reads_states
    if prepare.top_logprobs and reads_final:
        raise ConfigError(
            f"prepare.top_logprobs {prepare.top_logprobs} stores no final states, but drafter "
            f"{settings.drafter['kind']!r} reads them; set it to 0"
        )
    if prepare.top_logprobs >= target.spec.vocabulary:
        raise ConfigError(
            f"prepare.top_logprobs {prepare.top_logprobs} must be below the target's vocabulary of "
            f"{target.spec.vocabulary}"
        )
    return Binding.of(
        target, template_hash(target.tokenizer), model.taps, dtype, encoding=prepare.feature_encoding,
        top_logprobs=prepare.top_logprobs, only_learnt=not reads_final,
        source="vllm" if prepare.features == "engine" else "target",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Store:
    """A run's feature cache, its state, and how to fill it."""

    folder: Path
    texts: Sequence[Answer]
    binding: Binding
    states: cache.States
    target: RunTarget
    shard_tokens: int
    total: int
    """Shards of all texts."""
    done: int
    """Shards that exist."""

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    @property
    def size_bytes(self) -> int:
        """Approximate size of all shards."""
        learnt = sum(end - start for text in self.texts for start, end in text.learn) / max(1, self.tokens)
        binding, hidden = self.binding, self.target.spec.hidden
        each = encodings.bytes_per_token(
            binding.encoding, hidden, len(binding.taps), binding.top_logprobs, learnt if binding.only_learnt else 1.0
        )
        return round(self.tokens * each)

    @property
    def free_bytes(self) -> int:
        return cache.free_bytes(self.folder)

    def fill(self, update: Callable[[int], None]) -> None:
        """Write the missing shards; update: called with the number of existing ones."""
        cache.build(
            self.folder, self.texts, self.states, self.binding, head=self.target.head, shard_tokens=self.shard_tokens,
            on_shard=lambda done, of: update(self.total - of + done),
        )  # fmt: skip


def store(
    settings: RunConfig, config: TrainConfig, target: RunTarget, model: DraftModel, answers: Sequence[Answer]
) -> Store | None:
    """The run's cache on this machine; None if features are live.  config: with a resolved dtype.

    Raises DataError for a folder with another binding.
    """
    folder, prepare = folder_of(settings), settings.prepare
    if not prepare.stores_states:
        return None
    binding = bound_to(settings, config.dtype, target, model)
    if cache.bound(folder) is not None:
        there = cache.check(folder, binding)
        binding = replace(binding, taps=there.taps, only_learnt=there.only_learnt)
    texts = CutAnswers(answers, min(prepare.length, target.spec.context))
    if prepare.feature_server is None:
        states: cache.States = target_states(target, binding.taps, config.dtype)
    else:
        states = EngineStates(
            prepare.feature_server,
            settings.target.name,
            binding.taps,
            target.spec.layers,
            target.finish,
            head=target.head,
        )
    shards = cache.planned(texts, prepare.shard_tokens)
    left = len(cache.missing(folder, shards, binding))
    return Store(folder, texts, binding, states, target, prepare.shard_tokens, len(shards), len(shards) - left)


def fill(
    settings: RunConfig, config: TrainConfig, target: RunTarget, model: DraftModel,
    answers: Sequence[Answer], reporter: Reporter,
) -> None:  # fmt: skip
    """Write the features of these answers that the run's cache lacks; nothing if features are live.  config: with a
    resolved dtype."""
    missing = store(settings, config, target, model, answers)
    if missing is None or missing.done == missing.total:
        return
    plan = events.Storing(
        total=missing.total, done=missing.done, tokens=missing.tokens, size_bytes=missing.size_bytes,
        free_bytes=missing.free_bytes, folder=str(missing.folder),
    )  # fmt: skip
    with reporter.working(plan) as update:
        missing.fill(update)
    reporter.finished(events.Stored(str(missing.folder), cache.size_of(missing.folder), missing.tokens))
