"""Features from a cache on disk: the next batch is read, decoded and padded while the current one trains."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.data.answers.store import Answer
from outrider.data.batches import TextFeatures
from outrider.data.features import cache, encodings
from outrider.data.features import shards as feature_shards
from outrider.data.features.cache import Binding, States
from outrider.data.features.live import states_of
from outrider.data.features.prefetch import Prefetcher
from outrider.data.features.shards import Shard, TextStates, key_of
from outrider.data.overlap.hash_files import HashFile
from outrider.data.texts import BUFFER, CutAnswers, Texts
from outrider.errors import DataError
from outrider.nn.draft_model import Batch, Manifest
from outrider.targets.protocol import Target

log = logging.getLogger(__name__)
OPEN = 2 * BUFFER
"""Maximum number of open shards."""
OTHER_KERNELS = 0.05
"""Additional relative error of states computed by an engine's kernels."""


class CachedFeatures(TextFeatures):
    """Batches from a feature cache, in the order of `LiveFeatures`; with many shards, a few are shuffled at a time."""

    def __init__(
        self, target: Target, answers: Sequence[Answer], binding: Binding, folder: str | Path, *, batch: int,
        length: int, seed: int = 0, recheck_every: int = 0, skip_bad: bool = False,
        ngram_hashes: HashFile | None = None, budget: int | None = None,
    ):  # fmt: skip
        """recheck_every: every `recheck_every`-th text is compared with a pass of the target; 0 compares none.
        skip_bad: leave out texts of damaged shards and texts that the cache lacks.
        Raises DataError if the cache has another binding, or lacks a text.
        """
        self.ngram_hashes = ngram_hashes
        """Hashes of the texts, stored with a checkpoint; None if there are none."""
        self.target, self.taps, self.size, self.dtype = target, binding.taps, batch, binding.dtype
        self._folder = Folder(Path(folder))
        self.cache = cache.check(self._folder.path, binding)
        self.place, self.is_cached, self.bytes = str(folder), False, 0
        context = min(length, target.spec.context)
        self._shard_of = self._folder.shards_by_key(skip_bad)
        answers, missing = self._cached(answers, context)
        if missing and not skip_bad:
            raise DataError(
                f"{len(missing)} of {len(missing) + len(answers)} texts are not in the feature cache {folder}, such as "
                f"{missing[0]}; run `outrider prepare` again, which adds them"
            )
        if missing:
            log.warning(
                "%d texts are left out: they are missing or damaged in the feature cache %s", len(missing), folder
            )
        self.order = Texts(answers, batch=batch, length=context, seed=seed, budget=budget)
        self.texts, self.left_out = self.order.answers, self.order.left_out
        self._keys = [key_of(text, self.cache.only_learnt) for text in self.texts]
        shards: dict[str, list[int]] = {}
        for i, key in enumerate(self._keys):
            shards.setdefault(self._shard_of[key], []).append(i)
        self.order.in_shards([shards[name] for name in sorted(shards)])
        self.manifest = Manifest(
            target.spec, binding.taps, binding.dtype, binding.template, len(self.texts), self.order.tokens
        )
        self._states_type = torch.bfloat16 if binding.dtype == "bfloat16" else getattr(torch, target.spec.dtype)
        self._recheck_every, self._checked = recheck_every, set[int]()
        self._prefetcher = Prefetcher(self.made, target.device)

    def _cached(self, answers: Sequence[Answer], length: int) -> tuple[Sequence[Answer], list[str]]:
        """Answers that are in the cache or have too few tokens to train on, and the ids of the missing ones."""

        def is_missing(answer: Answer) -> bool:
            texts = CutAnswers([answer], length)
            return bool(texts) and key_of(texts[0], self.cache.only_learnt) not in self._shard_of

        missing = [answer.id for answer in answers if is_missing(answer)]
        return [answer for answer in answers if not is_missing(answer)] if missing else answers, missing

    @property
    def disk_bytes(self) -> int:
        """Size of the cache on disk."""
        return self._folder.size_bytes

    @property
    def waited_s(self) -> float:
        """Seconds that training waited for batches."""
        return self._prefetcher.waited_s

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`; the next one is prefetched."""
        return self._prefetcher.batch(step)

    def packed(self, steps: range) -> Iterator[Batch]:
        """As `TextFeatures.packed`; the next batch is prefetched."""
        return self._prefetcher.packed(steps, len(self.order.packed(steps)))

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetcher.close()

    def states(self, texts: Sequence[int]) -> dict[int, TextStates]:
        return {i: self._text(i) for i in texts}

    def _text(self, i: int) -> TextStates:
        key = self._keys[i]
        shard = self._folder.open(self._shard_of[key])
        stored = shard.read(key, self.taps, self._states_type, self.target.device)
        if self._recheck_every and i % self._recheck_every == 0 and i not in self._checked:
            self._recheck(i, stored, shard)
            self._checked.add(i)
        return stored

    def _recheck(self, i: int, stored: TextStates, shard: Shard) -> None:
        """Compare the states of a text with a pass of the target; raises DataError if they differ by more than
        rounding."""
        text = self.texts[i]
        taps, hidden = (
            states[0] for states in states_of(self.target, torch.tensor([text.tokens]), self.taps, self.dtype)
        )
        limit = encodings.TOLERANCE[self.cache.encoding]
        if self.cache.source != "target":
            limit += OTHER_KERNELS
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        if stored.hidden.shape[-1]:
            is_stored = stored.hidden.abs().amax(-1) > 0
            pairs["the final state"] = stored.hidden[is_stored], hidden[is_stored]
        pairs |= {f"tap {tap}": (stored.taps[:, t], taps[:, t]) for t, tap in enumerate(self.taps)}
        for name, (states, reference) in pairs.items():
            error = encodings.relative_error(states, reference)
            if not error <= limit:
                raise DataError(
                    f"{shard.path}, text {text.id}: {name} differs by {error:.0%} from a pass of the target, and "
                    f"rounding explains at most {limit:.0%}; the cache has states of other weights or is damaged: "
                    "delete it and run `outrider prepare` again"
                )


class Folder:
    """The shards of a local cache folder, a few of them open at a time."""

    def __init__(self, path: Path):
        self.path, self.paths = path, sorted(path.glob("features-*.safetensors"))
        self.size_bytes = sum(shard.stat().st_size for shard in self.paths)
        self._open: OrderedDict[str, Shard] = OrderedDict()

    def shards_by_key(self, skip_bad: bool) -> dict[int, str]:
        """The shard of every text, by its key.  skip_bad: check all shards and skip damaged ones, with a warning."""
        shards: dict[int, str] = {}
        for path in self.paths:
            try:
                if skip_bad:
                    feature_shards.open_shard(path)
                with path.open("rb") as file:
                    shards |= dict.fromkeys(feature_shards.keys_in(file, path), path.name)
            except DataError as error:
                if not skip_bad:
                    raise
                log.warning("%s; its texts are left out", error)
        return shards

    def open(self, name: str) -> Shard:
        """An open shard, checked when it is opened; the least recently used one is closed if there are too many."""
        if name not in self._open:
            while len(self._open) >= OPEN:
                self._open.popitem(last=False)
            self._open[name] = feature_shards.open_shard(self.path / name)
        self._open.move_to_end(name)
        return self._open[name]


def target_states(target: Target, taps: tuple[int, ...], dtype: str, batch: int = 16) -> States:
    """Computes states by passes of the target over batches of texts of similar length."""

    def states(texts: Sequence[Answer]) -> Iterator[tuple[int, Tensor, Tensor]]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        for start in range(0, len(order), batch):
            group = order[start : start + batch]
            tokens = pad_sequence(
                [torch.as_tensor(texts[i].tokens, dtype=torch.int64) for i in group], batch_first=True
            )
            tapped, hidden = states_of(target, tokens, taps, dtype)
            for b, i in enumerate(group):
                length = len(texts[i].tokens)
                yield i, tapped[b, :length], hidden[b, :length]

    return states
